"""Takes a gradient step. The engine commits it exactly once, however often the task runs."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef, StepRequest
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("train", "step-{step:06d}")
async def take_gradient_step(workspace: Workspace, request: StepRequest, *, step: int) -> PolicyRef:
    """The policy after the 0-based `step`, committed. A retry, or a second worker, gets the same ref.

    Raises:
        StepConflict: another request was committed for this step.
    """
    return await _step(workspace, request)


@durable_task("train", "value-{step:06d}")
async def take_value_step(workspace: Workspace, request: StepRequest, *, step: int) -> PolicyRef:
    """Like `take_gradient_step`, for a value model."""
    return await _step(workspace, request)


async def _step(workspace: Workspace, request: StepRequest) -> PolicyRef:
    request = request.model_copy(update={"max_tokens": workspace.max_tokens})
    with timed("train"):
        record = await workspace.connect().take_gradient_step(request, epoch=workspace.epoch)
    return record.policy
