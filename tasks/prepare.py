"""Prepares the batch of a step on pairs or ratings, and commits it before the step uses it."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.pairs import pair_batch, rating_batch
from tasks.batches.truncation import ANY_LENGTH, LengthPlan
from tasks.task_runs import durable_task


@durable_task("prepare", "batch-{step:06d}")
async def prepare_pairs(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    reference: PolicyRef | None,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The `batch` table of a step on pairs, with two rows per pair. Each row has the reference's logprobs; without a
    reference, for a scalar model, each row is a conversation that is scored as a whole."""
    return await pair_batch(workspace, policy, base, dataset, rows, reference=reference, lengths=lengths, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_ratings(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The `batch` table of a step on rated conversations, for a scalar model. Raises BadSpec for a conversation without
    `res` in its metadata."""
    return await rating_batch(workspace, policy, base, dataset, rows, lengths=lengths, step=step)
