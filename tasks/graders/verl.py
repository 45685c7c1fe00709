"""A grader that calls a reward function written for verl."""

import inspect
from collections.abc import Mapping
from typing import Any

from engine.import_paths import load_from_file
from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GradePart, GraderError, as_number, in_thread
from tasks.graders.rules import from_metadata


class VerlReward(BaseGrader):
    """The reward of the function `name` in the Python file at `path`.

    The function is `f(data_source, solution_str, ground_truth, extra_info)`, plain or async. It returns a number, or a
    dict with the number at "score" and further numbers, which are logged.

    The metadata of a row has `data_source_column`, `reward_model_column` (an object with "ground_truth") and optionally
    `extra_info`. `parts` are weights of numbers in the dict, by their names: the parts of the reward that
    advantage_estimator='gdpo' normalises. `sha256` is the digest of the file when the run was declared; another digest
    is logged as a warning.
    """

    def __init__(
        self,
        grader_key: str = "verl",
        *,
        path: str,
        name: str = "compute_score",
        sha256: str | None = None,
        data_source_column: str = "data_source",
        reward_model_column: str = "reward_model",
        parts: dict[str, float] | None = None,
    ) -> None:
        super().__init__(grader_key)
        self.function = load_from_file(path, name, sha256=sha256, what="reward function")
        self.parts = parts or {}
        self.data_source_column, self.reward_model_column = data_source_column, reward_model_column

    async def grade(self, thread: StringThread) -> Grade:
        truth = from_metadata(thread, self.reward_model_column)
        if not isinstance(truth, Mapping) or "ground_truth" not in truth:
            raise GraderError(
                f"metadata[{self.reward_model_column!r}] is {truth!r}; expected an object with "
                "'ground_truth', as in the rows of verl"
            )
        # The arguments have verl's names and are passed by keyword, as verl does.
        arguments = {
            "data_source": from_metadata(thread, self.data_source_column),
            "solution_str": thread.last_content(),
            "ground_truth": truth["ground_truth"],
            "extra_info": thread.metadata.get("extra_info") or {},
        }
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**arguments)
        else:
            result = await in_thread(self.function, **arguments)
        # verl's own majority vote also reads "pred"
        answer = result.get("pred") if isinstance(result, Mapping) else None
        return Grade(
            value=self._score(result),
            grader_key=self.grader_key,
            answer=None if answer is None else str(answer),
            parts=self._parts(result),
        )

    def _parts(self, result: Any) -> tuple[GradePart, ...]:
        """The parts of the reward in the function's result."""
        numbers = result if isinstance(result, Mapping) else {}
        missing = [name for name in self.parts if name not in numbers]
        if missing:
            raise GraderError(
                f"the reward function returned {result!r:.500} without {missing}; expected a dict with the parts "
                f"{list(self.parts)} and 'score'"
            )
        return tuple(
            GradePart(name=name, value=as_number(numbers[name]), weight=weight) for name, weight in self.parts.items()
        )

    def _score(self, result: Any) -> float:
        """The score in the function's result. Further numbers in it are logged."""
        if not isinstance(result, Mapping):
            return as_number(result)
        if "score" not in result:
            raise GraderError(
                f"the reward function returned {dict(result)!r}; expected a number, or a dict with a number at 'score'"
            )
        # Texts and lists in the result have no statistics, and are dropped.
        logs: dict[str, float] = {}
        for key, value in result.items():
            if key != "score" and isinstance(value, int | float):
                logs[key] = float(value)
        self.add_log(logs)
        return as_number(result["score"])
