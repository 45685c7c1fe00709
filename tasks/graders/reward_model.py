"""A model with a scalar head as a grader."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from engine.handles import Model
from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.running.workspace import grading_workspace


@runtime_checkable
class ScoringModel(Protocol):
    """A model that scores whole conversations: the scalar head at the last token."""

    async def score_last_token(self, thread: StringThread) -> float: ...


class RewardModelGrader(BaseGrader):
    """The reward model's score of the thread, times `scale`, plus `shift`, and within ±`clip` if one is given.

    `model`: a spawned scoring model, or the key of one (trained by RewardModelling) that setup spawns.
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
        self._named = model if isinstance(model, str) else None

    async def setup(self) -> None:
        """Spawns the model if it was given by its key."""
        if isinstance(self.model, str):
            workspace = grading_workspace(f"grader {self.grader_key!r}, reward model {self.model!r}")
            self.model = await _spawn(self.model, workspace)

    async def teardown(self) -> None:
        """Lets go of a model that setup spawned."""
        self.model = self._named or self.model

    async def grade(self, thread: StringThread) -> Grade:
        if isinstance(self.model, str):
            raise GraderError(f"grader {self.grader_key!r}: {self.model!r} is not spawned; await setup() first")
        score = await self.model.score_last_token(thread)
        value = score * self.scale + self.shift
        if self.clip is not None and not math.isnan(value):
            value = max(-self.clip, min(self.clip, value))
        return Grade(value=value, grader_key=self.grader_key, reasoning=f"score {score:.4f}")


async def _spawn(key: str, workspace: Any) -> ScoringModel:
    ctx = _Context(workspace)
    builder: Any = await Model(key).to_builder(ctx)
    model = await builder.into_scoring_model().spawn_inference("reward-model")
    if not isinstance(model, ScoringModel):
        raise GraderError(f"the model {key!r} has no scalar head; expected one that RewardModelling trained")
    return model


class _Context:
    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
