"""Reward functions written for verl, as graders."""

import inspect
from collections.abc import Mapping
from typing import Any

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, as_number, in_thread
from tasks.graders.rules import from_metadata
from tasks.import_paths import load_from_file


class VerlReward(BaseGrader):
    """`name` of the Python file at `path`: `f(data_source, solution_str, ground_truth, extra_info)`, plain or async,
    which returns a number, or a dict with the number at "score" and further numbers to log.

    A row brings `data_source_column`, `reward_model_column` (with "ground_truth" in it) and, if it has one,
    `extra_info` as metadata. `sha256` is the digest of the file when the run was declared: another one is warned about.
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
    ) -> None:
        super().__init__(grader_key)
        self.function = load_from_file(path, name, sha256=sha256, what="reward function")
        self.data_source_column, self.reward_model_column = data_source_column, reward_model_column

    async def grade(self, thread: StringThread) -> Grade:
        truth = from_metadata(thread, self.reward_model_column)
        if not isinstance(truth, Mapping) or "ground_truth" not in truth:
            raise GraderError(
                f"metadata[{self.reward_model_column!r}] is {truth!r}; a verl row has an object with 'ground_truth'"
            )
        arguments = {
            "data_source": from_metadata(thread, self.data_source_column),
            "solution_str": thread.last_content(),
            "ground_truth": truth["ground_truth"],
            "extra_info": thread.metadata.get("extra_info") or {},
        }
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(**arguments)
        else:
            found = await in_thread(self.function, **arguments)
        return Grade(value=self._score(found), grader_key=self.grader_key)

    def _score(self, found: Any) -> float:
        if not isinstance(found, Mapping):
            return as_number(found)
        if "score" not in found:
            raise GraderError(f"the reward function returned {dict(found)!r}; expected a number, or one at 'score'")
        rest = {key: value for key, value in found.items() if key != "score" and isinstance(value, int | float)}
        self.add_log({key: float(value) for key, value in rest.items()})
        return as_number(found["score"])
