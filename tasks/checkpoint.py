"""Save a checkpoint: weights and moments, manifest last. Begun by one task, seen through to the end by another, so that
a loop can take its next step in between."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.chain.retention import KEEP_LAST_TWO, Retention, prune_checkpoints
from storage.store.artifacts import ArtifactRef
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("checkpoint", "checkpoint-{policy.step:06d}/begin")
async def begin_checkpoint(workspace: Workspace, policy: PolicyRef, *, name: str | None = None) -> None:
    """The engine holds the policy's checkpoint from now on, wherever it stands itself."""
    with timed("storage"):
        await workspace.connect().begin_checkpoint(
            policy, provenance=workspace.provenance, name=name, epoch=workspace.epoch
        )


@durable_task("checkpoint", "checkpoint-{policy.step:06d}")
async def save_checkpoint(
    workspace: Workspace, policy: PolicyRef, *, name: str | None = None, retention: Retention = KEEP_LAST_TWO
) -> ArtifactRef:
    """The policy's checkpoint, written now if it was not. Unnamed ones that `retention` does not keep are
    removed: they only shorten a redo, the chain can do without any."""
    with timed("storage"):
        ref = await workspace.connect().save_checkpoint(
            policy, provenance=workspace.provenance, name=name, epoch=workspace.epoch
        )
        prune_checkpoints(workspace.open_store(), policy, **retention.model_dump())
    return ref
