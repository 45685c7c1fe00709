"""A grader whose `grade` runs in worker processes, so that one that crashes the interpreter does not end the run."""

from __future__ import annotations

import os
import sys

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderCrashed, GraderError, IgnoreGradeException
from tasks.graders.worker import WorkerDied, WorkerFailed, WorkerPool

MOST_PROCESSES = 4
TEXT_SHOWN = 40


class GraderRaised(Exception):
    """An isolated grader raised an exception in its process. The message begins with the exception's type."""


class IsolatedGrader(BaseGrader):
    """The grader of a spec (as JSON) in up to four processes, one grade at a time in each.

    A process that ends during a grade raises GraderCrashed; the next grade has a new process. A grade that is
    cancelled, because it took too long, ends its process, too. The workers know no engine: a judge that is named by a
    key cannot be isolated.
    """

    def __init__(self, grader_key: str, spec_json: str) -> None:
        super().__init__(grader_key)
        self._workers = WorkerPool(
            "tasks.graders.isolated_worker",
            processes=min(MOST_PROCESSES, os.cpu_count() or 1),
            configuration={"spec": spec_json, "sys_path": sys.path},
            quiet=False,
        )

    async def setup(self) -> None:
        """Starts a process, which sets the grader up."""
        try:
            await self._workers.start()
        except WorkerFailed as error:
            raise GraderError(f"grader {self.grader_key!r} cannot be isolated: {error}") from error

    async def teardown(self) -> None:
        await self._workers.close()

    async def grade(self, thread: StringThread) -> Grade:
        try:
            answer = await self._workers.call({"thread": thread.to_json()}, timeout_seconds=None)
        except WorkerDied as died:
            text = thread.last_content()
            shown = text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}…"
            raise GraderCrashed(f"the process of grader {self.grader_key!r} on {shown!r} {died}") from died
        for values in answer["logs"]:
            self.add_log(values)
        if "grade" in answer:
            return Grade.model_validate(answer["grade"])
        if "ignored" in answer:
            raise IgnoreGradeException(answer["ignored"])
        if "permanent" in answer:
            raise GraderError(answer["permanent"])
        raise GraderRaised(answer["raised"])
