"""A grader whose `grade` runs in worker processes, on this machine or on every machine of a Ray cluster.

A crash of the interpreter ends a worker process, and not the run.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine.cluster.connection import require_ray
from engine.cluster.workers import ClusterWorkers
from engine.errors import WorkerDied
from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderCrashed, GraderError, IgnoreGradeException
from tasks.graders.running.worker_pool import WorkerFailed, WorkerPool, WorkerProcessDied
from tasks.graders.setting import grading_cluster

MAX_PROCESSES = 4
"""Worker processes on this machine. On a cluster, each machine has as many as it has CPUs."""
MAX_TEXT_LETTERS = 40
"""Length to which the graded text is cut in the message of GraderCrashed."""


class GraderRaised(Exception):
    """An isolated grader raised an exception in its process. The message begins with the exception's type."""


class IsolatedGrader(BaseGrader):
    """Runs the grader of a spec (given as JSON) in worker processes, one grade at a time in each.

    If a process ends during a grade, the grade raises GraderCrashed, and the next grade runs in a new process. Grades
    on a lost machine of the cluster raise it, too. If a grade is cancelled because it took too long, its process is
    killed. The processes have no engine, so a judge whose model is given by its key cannot be used.
    """

    def __init__(self, grader_key: str, spec_json: str, *, on_cluster: bool = False) -> None:
        """Raises BadSpec for `on_cluster` if Ray is not installed."""
        super().__init__(grader_key)
        # The workers get this process's sys.path, so that they can import the grader's module from the same folders.
        arguments: dict[str, Any] = {
            "module": "tasks.graders.running.isolated_worker",
            "configuration": {"spec": spec_json, "sys_path": sys.path},
            "quiet": False,
        }
        self._workers: WorkerPool | ClusterWorkers
        if on_cluster:
            require_ray()
            self._workers = ClusterWorkers(WorkerPool, arguments, spec=grading_cluster)
        else:
            self._workers = WorkerPool(**arguments, processes=min(MAX_PROCESSES, os.cpu_count() or 1))

    async def setup(self) -> None:
        """Start one process, or one on each machine of a cluster, which sets the grader up."""
        try:
            await self._workers.start()
        except WorkerFailed as error:
            raise GraderError(f"grader {self.grader_key!r} cannot grade in worker processes: {error}") from error

    async def teardown(self) -> None:
        await self._workers.close()

    async def grade(self, thread: StringThread) -> Grade:
        try:
            answer = await self._workers.call({"thread": thread.to_json()}, timeout_seconds=None)
        except (WorkerProcessDied, WorkerDied) as died:
            # Part of the completion is in the message: the crash may depend on it.
            text = thread.last_content()
            shown = text if len(text) <= MAX_TEXT_LETTERS else f"{text[:MAX_TEXT_LETTERS]}…"
            raise GraderCrashed(f"the process of grader {self.grader_key!r} on {shown!r} {died}") from died
        # The statistics of the logs are kept here, since each worker process sees only some of the threads.
        for values in answer["logs"]:
            self.add_log(values)
        # Raise here what the grader raised there, so that the caller treats it as if the grader ran in this process.
        if "grade" in answer:
            return Grade.model_validate(answer["grade"])
        if "ignored" in answer:
            raise IgnoreGradeException(answer["ignored"])
        if "permanent" in answer:
            raise GraderError(answer["permanent"])
        raise GraderRaised(answer["raised"])
