"""Evaluate a policy on fixed prompts."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.artifacts import ArtifactRef
from storage.chain import PolicyRef
from tasks.episode_evaluations import EpisodeEvaluationPlan, evaluate_episodes
from tasks.evaluations import EvaluationPlan, evaluate
from tasks.task_runs import durable_task
from tasks.validation_losses import ValidationLossPlan, validation_loss
from tasks.validation_scores import ScoreValidationPlan, score_validation


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_policy(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan) -> ArtifactRef:
    """The policy's `evaluation` table under `plan`; a second call returns the first one's."""
    return await evaluate(workspace, policy, plan)


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_in_environment(
    workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan
) -> ArtifactRef:
    """The policy's `evaluation` table of episodes under `plan`; a second call returns the first one's."""
    return await evaluate_episodes(workspace, policy, plan)


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """The policy's `validation` table under `plan`; a second call returns the first one's."""
    return await validation_loss(workspace, policy, plan)


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_scores(workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan) -> ArtifactRef:
    """The `validation` table of a policy with a scalar head under `plan`; a second call returns the first one's."""
    return await score_validation(workspace, policy, plan)
