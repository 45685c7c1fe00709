"""Grades one shard of rollouts and commits the grades."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef
from tasks.sampling.grading import Grading, grade_shard
from tasks.task_runs import durable_task


@durable_task("grade", "grade-{step:06d}/{shard:02d}")
async def grade_rollouts(
    workspace: Workspace, rollouts: ArtifactRef, grading: Grading, *, stage: str, step: int, shard: int
) -> ArtifactRef:
    """The committed `graded` table of a shard. It has a row per completion: with a reward, or masked or ignored.

    Raises:
        TooManyMasked: more than `grading.max_masked_fraction` of the shard could not be graded.
    """
    return await grade_shard(workspace, rollouts, grading, stage=stage, step=step, shard=shard)
