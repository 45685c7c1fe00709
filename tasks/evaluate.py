"""Evaluates a policy on held-out data: samples and grades completions, plays episodes, or computes a loss."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.evaluation.completions import EvaluationPlan, evaluate
from tasks.evaluation.episodes import EpisodeEvaluationPlan, evaluate_episodes
from tasks.evaluation.lm_validation import ValidationLossPlan, validation_loss
from tasks.task_runs import durable_task


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_policy(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan) -> ArtifactRef:
    """The policy's `evaluation` table of graded completions. A second call returns the table of the first one."""
    return await evaluate(workspace, policy, plan)


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_in_environment(
    workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan
) -> ArtifactRef:
    """The policy's `evaluation` table of episodes. A second call returns the table of the first one."""
    return await evaluate_episodes(workspace, policy, plan)


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """The policy's `validation` table of losses. A second call returns the table of the first one."""
    return await validation_loss(workspace, policy, plan)
