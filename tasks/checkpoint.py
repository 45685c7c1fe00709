"""Saves a checkpoint: weights and optimizer state, manifest last. One task begins it and another finishes it, so that a
training loop can take its next step in between."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.chain.retention import KEEP_LAST_TWO, Retention, prune_checkpoints
from storage.store.artifacts import ArtifactRef
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("checkpoint", "checkpoint-{policy.step:06d}/begin")
async def begin_checkpoint(workspace: Workspace, policy: PolicyRef, *, name: str | None = None) -> None:
    """Makes the engine write the policy's checkpoint to its disk and upload it in the background. `save_checkpoint`
    waits for the upload."""
    with timed("storage"):
        await workspace.connect().begin_checkpoint(
            policy, provenance=workspace.provenance, name=name, epoch=workspace.epoch
        )


@durable_task("checkpoint", "checkpoint-{policy.step:06d}")
async def save_checkpoint(
    workspace: Workspace, policy: PolicyRef, *, name: str | None = None, retention: Retention = KEEP_LAST_TWO
) -> ArtifactRef:
    """Returns the policy's checkpoint, and writes it first if there is none. Then removes the unnamed checkpoints that
    `retention` does not keep."""
    with timed("storage"):
        ref = await workspace.connect().save_checkpoint(
            policy, provenance=workspace.provenance, name=name, epoch=workspace.epoch
        )
        # Removing checkpoints loses nothing: any policy can be computed again from the chain, only more slowly.
        prune_checkpoints(workspace.open_store(), policy, retention)
    return ref
