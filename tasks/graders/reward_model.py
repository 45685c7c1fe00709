"""A grader that asks a reward model: a model with a scalar head."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from engine.handles import Model
from engine.text.threads import StringThread
from engine.workspace import Workspace
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.setting import WorkspaceContext, grading_workspace


@runtime_checkable
class ScoringModel(Protocol):
    """A model that scores a whole conversation by its scalar head at the last token."""

    async def score_last_token(self, thread: StringThread) -> float: ...


class RewardModelGrader(BaseGrader):
    """The score of a reward model for the thread, times `scale`, plus `shift`, limited to ±`clip` if it is given.

    `model` is a spawned scoring model, or the key of a model trained by RewardModelling, which setup spawns.
    """

    def __init__(
        self,
        grader_key: str,
        model: ScoringModel | str,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        clip: float | None = None,
    ) -> None:
        super().__init__(grader_key)
        if not (math.isfinite(scale) and math.isfinite(shift)) or (clip is not None and not clip > 0):
            raise ValueError(f"given scale={scale}, shift={shift}, clip={clip}; expected finite numbers, clip above 0")
        self.model, self.scale, self.shift, self.clip = model, scale, shift, clip
        self._key = model if isinstance(model, str) else None

    async def setup(self) -> None:
        """Spawn the model if it was given by its key."""
        if isinstance(self.model, str):
            workspace = grading_workspace(f"grader {self.grader_key!r}, reward model {self.model!r}")
            self.model = await _spawn(self.model, workspace)

    async def teardown(self) -> None:
        """Drop the model that setup spawned."""
        self.model = self._key or self.model

    async def grade(self, thread: StringThread) -> Grade:
        if isinstance(self.model, str):
            raise GraderError(f"grader {self.grader_key!r}: {self.model!r} is not spawned; await setup() first")
        score = await self.model.score_last_token(thread)
        value = score * self.scale + self.shift
        # Clipping NaN would give a number, and hide that the model is broken. NaN is masked.
        if self.clip is not None and not math.isnan(value):
            value = max(-self.clip, min(self.clip, value))
        return Grade(value=value, grader_key=self.grader_key, reasoning=f"score {score:.4f}")


async def _spawn(key: str, workspace: Workspace) -> ScoringModel:
    builder: Any = await Model(key).to_builder(WorkspaceContext(workspace))
    model = await builder.into_scoring_model().spawn_inference("reward-model")
    if not isinstance(model, ScoringModel):
        raise GraderError(f"the model {key!r} has no scalar head; expected a model that RewardModelling trained")
    return model
