"""A grader that calls the verifiers of reasoning-gym. They run on the CPU, offline, on the metadata of a row."""

import json
import threading
from typing import Any

from engine.text.threads import StringThread
from tasks.datasets.gym import create_procedural
from tasks.graders.base import BaseGrader, Grade, GraderError, as_number, in_thread
from tasks.graders.rules import AnswerFrom, extract_answer

RAISES_ON_UNPARSEABLE = frozenset({"prime_factorization"})
"""Verifiers that raise ValueError if the answer does not have the expected form. For these it means a wrong answer. Any
other exception of a verifier is an error. (The list was found by giving invalid answers to all 106 verifiers of
reasoning-gym 0.1.25.)"""


class ReasoningGymGrader(BaseGrader):
    """The score of reasoning-gym's verifier for the answer extracted from the completion.

    A completion without an answer scores 0.0, without a call of the verifier. Most verifiers give partial credit, for
    instance 0.5 for "12" if the answer is "2", the share of correct characters. With `exact`, a score below 1.0 becomes
    0.0.
    """

    def __init__(
        self, grader_key: str = "reasoning_gym", *, answer_from: AnswerFrom = "last_number", exact: bool = False
    ) -> None:
        super().__init__(grader_key)
        self.answer_from, self.exact = answer_from, exact
        self._verifiers: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    async def grade(self, thread: StringThread) -> Grade:
        answer = extract_answer(thread.last_content(), self.answer_from)
        if answer is None:
            return Grade(value=0.0, grader_key=self.grader_key, reasoning="no answer in the completion")
        # A verifier may compute for seconds, which must not block the other grades.
        score = await in_thread(self._score, answer, thread)
        value = float(score == 1.0) if self.exact else score
        return Grade(value=value, grader_key=self.grader_key, answer=answer)

    def _score(self, answer: str, thread: StringThread) -> float:
        """Call the verifier of the dataset from which the thread's row comes."""
        source: Any = thread.metadata.get("reasoning_gym")
        if not isinstance(source, dict) or not {"dataset", "config", "entry"} <= set(source):
            raise GraderError(
                "the thread's metadata has no complete 'reasoning_gym' entry; expected rows of a ReasoningGymDataset"
            )
        verifier = self._verifier(source["dataset"], source["config"])
        try:
            return as_number(verifier.score_answer(answer, source["entry"]))
        except ValueError:
            if source["dataset"] in RAISES_ON_UNPARSEABLE:
                return 0.0
            raise

    def _verifier(self, name: str, config: dict[str, Any]) -> Any:
        """The dataset object of this name and config. It is created once, since some datasets read word lists."""
        key = (name, json.dumps(config, sort_keys=True))
        # Several threads grade at once. Under the lock only the first one creates the object.
        with self._lock:
            if key not in self._verifiers:
                self._verifiers[key] = create_procedural(name, config, size=1, seed=0)
            return self._verifiers[key]
