"""A grader whose `grade` runs in worker processes: a crash of the interpreter ends a worker, and not the run."""

from __future__ import annotations

import os
import sys

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderCrashed, GraderError, IgnoreGradeException
from tasks.graders.worker import WorkerDied, WorkerFailed, WorkerPool

MAX_PROCESSES = 4
TEXT_SHOWN = 40
"""Most characters of the graded text in the message of GraderCrashed."""


class GraderRaised(Exception):
    """An isolated grader raised an exception in its process. The message begins with the exception's type."""


class IsolatedGrader(BaseGrader):
    """Runs the grader of a spec (given as JSON) in up to MAX_PROCESSES processes, one grade at a time in each.

    If a process ends during a grade, the grade raises GraderCrashed, and a new process does the next one. If a grade is
    cancelled because it took too long, its process is ended, too. The processes have no engine, so a judge whose model
    is given by its key cannot be isolated.
    """

    def __init__(self, grader_key: str, spec_json: str) -> None:
        super().__init__(grader_key)
        self._workers = WorkerPool(
            "tasks.graders.isolated_worker",
            processes=min(MAX_PROCESSES, os.cpu_count() or 1),
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
