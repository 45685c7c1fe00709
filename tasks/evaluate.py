"""Measures the loss of a policy on held-out rows."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.evaluation.lm_validation import ValidationLossPlan, validation_loss
from tasks.evaluation.reward_validation import ScoreValidationPlan, score_validation
from tasks.task_runs import durable_task


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """The policy's `validation` table of losses. A second call returns the table of the first one."""
    return await validation_loss(workspace, policy, plan)


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_scores(workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan) -> ArtifactRef:
    """The `validation` table of losses of a policy with a scalar head. A second call returns the table of the first
    one."""
    return await score_validation(workspace, policy, plan)
