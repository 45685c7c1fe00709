"""Grade rollouts: one shard, every completion accounted for, committed."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef
from tasks.sampling.grading import Grading, grade_shard
from tasks.task_runs import durable_task


@durable_task("grade", "grade-{step:06d}/{shard:02d}")
async def grade_rollouts(
    workspace: Workspace, rollouts: ArtifactRef, grading: Grading, *, stage: str, step: int, shard: int
) -> ArtifactRef:
    """The grades of a shard of rollouts as a committed `graded` table: a reward, masked or ignored, each.

    Raises:
        TooManyMasked: more than `grading.max_masked_fraction` of the shard could not be graded.
    """
    return await grade_shard(workspace, rollouts, grading, stage=stage, step=step, shard=shard)
