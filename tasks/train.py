"""Asks the engine for a gradient step, a checkpoint (weights and optimizer state) and a published model.

The engine commits a step exactly once, however often the task runs. One task begins a checkpoint and another finishes
it, so that a training loop can take its next step in between.
"""

from __future__ import annotations

import asyncio

from engine.protocol import PublishDtype
from engine.workspace import Workspace
from storage.chain.records import PolicyRef, StepRequest
from storage.chain.retention import KEEP_LAST_TWO, Retention, prune_checkpoints
from storage.store.artifacts import ArtifactRef
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("train", "step-{step:06d}")
async def take_gradient_step(
    workspace: Workspace,
    request: StepRequest,
    *,
    step: int,
    sampled_later: bool = False,
    sampled_next: bool = False,
) -> PolicyRef:
    """The policy after the 0-based `step`, committed. A retry, or a second worker, gets the same ref. With
    `sampled_later`, rollouts are sampled from the step's parent while or after the step is taken. With `sampled_next`,
    completions that are being sampled go on under the new policy at once.

    Raises:
        StepConflict: another request was committed for this step.
    """
    if sampled_later:
        # Otherwise the samplers' weights of the parent would have to be restored from a checkpoint.
        with timed("sync"):
            await workspace.connect().stage_policy(request.parent, epoch=workspace.epoch)
    policy = await _step(workspace, request)
    if sampled_next:
        with timed("sync"):
            await workspace.connect().stage_policy(policy, epoch=workspace.epoch)
    return policy


@durable_task("train", "value-{step:06d}")
async def take_value_step(workspace: Workspace, request: StepRequest, *, step: int) -> PolicyRef:
    """Like `take_gradient_step`, for a value model."""
    return await _step(workspace, request)


async def _step(workspace: Workspace, request: StepRequest) -> PolicyRef:
    request = request.model_copy(update={"max_tokens": workspace.max_tokens})
    with timed("train"):
        record = await workspace.connect().take_gradient_step(request, epoch=workspace.epoch)
    return record.policy


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
        await asyncio.to_thread(prune_checkpoints, workspace.open_store(), policy, retention)
    return ref


@durable_task("publish", "publish-{model_name}")
async def publish_model(
    workspace: Workspace, policy: PolicyRef, model_name: str, dtype: PublishDtype = "base"
) -> ArtifactRef:
    """The registry's artifact of this policy under `model_name`. The alias "latest" then points to it."""
    with timed("storage"):
        return await workspace.connect().export_model(
            policy, model_name, provenance=workspace.provenance, dtype=dtype, epoch=workspace.epoch
        )
