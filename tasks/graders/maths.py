"""A grader that compares mathematical answers by value with math-verify: 1/2, 0.5 and \\frac{1}{2} are equal."""

from __future__ import annotations

import importlib.util

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.rules import from_metadata
from tasks.graders.running.worker_pool import WorkerPool, WorkerTimeout

MARGIN_SECONDS = 2.0
"""Time between the alarm inside a worker and its kill, which is for a worker that computes in C and gets no signal."""


class MathsGrader(BaseGrader):
    """1.0 if the completion's final answer equals metadata[answer_key] as mathematics, else 0.0.

    math-verify finds the answer: the last \\boxed{…} (boxes joined by a comma or "and" are one set), else LaTeX, else a
    plain expression. A completion without an answer is wrong, and so is one whose comparison takes longer than
    `timeout_seconds`. SymPy runs in up to `processes` separate processes, since it never ends for some expressions.
    """

    def __init__(
        self,
        grader_key: str = "maths",
        *,
        answer_key: str = "answer",
        timeout_seconds: float = 5.0,
        processes: int = 1,
    ) -> None:
        super().__init__(grader_key)
        if not timeout_seconds > 0 or processes < 1:
            raise ValueError(
                f"given timeout_seconds={timeout_seconds}, processes={processes}; "
                "expected timeout_seconds > 0, processes >= 1"
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathsGrader needs math-verify; install ostinato[maths]")
        self.answer_key, self.timeout_seconds = answer_key, timeout_seconds
        self._workers = WorkerPool("tasks.graders.running.maths_worker", processes=processes)

    async def setup(self) -> None:
        """Start a process. Its imports take seconds, which would otherwise count towards the first grade."""
        await self._workers.start()

    async def teardown(self) -> None:
        await self._workers.close()

    async def grade(self, thread: StringThread) -> Grade:
        # The worker stops itself after `timeout_seconds`. The pool kills it if that does not work.
        expected = str(from_metadata(thread, self.answer_key))
        request = {"expected": expected, "given": thread.last_content(), "seconds": self.timeout_seconds}
        try:
            answer = await self._workers.call(request, timeout_seconds=self.timeout_seconds + MARGIN_SECONDS)
        except WorkerTimeout:
            return Grade(value=0.0, grader_key=self.grader_key, reasoning="no comparison in time")
        # The dataset is wrong and not the completion, so this must not become a reward of 0.
        if "bad_expected" in answer:
            raise GraderError(f"metadata[{self.answer_key!r}] is {expected!r:.80}; expected a mathematical answer")
        value = float(answer["right"])
        return Grade(
            value=value, grader_key=self.grader_key, reasoning=answer["found"], answer=answer.get("answer")
        )
