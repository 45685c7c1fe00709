"""Prepares the batch of a step (advantages, old and reference logprobs) and commits it before the step uses it."""

from __future__ import annotations

from engine.losses.spec import LossSpec
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.episode_values import episode_value_batch
from tasks.batches.episodes import trajectory_batch
from tasks.batches.pairs import preference_batch
from tasks.batches.ppo import ValuePlan, value_batch
from tasks.batches.rl import BatchPlan, rollout_batch, sft_batch
from tasks.batches.truncation import ANY_LENGTH, LengthPlan
from tasks.task_runs import durable_task


@durable_task("prepare", "batch-{step:06d}")
async def prepare_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    *,
    step: int,
) -> ArtifactRef:
    """The `batch` table of an RL step: one row per completion with a grade."""
    return await rollout_batch(workspace, policy, rollouts, graded, plan, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_trajectories(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    *,
    step: int,
) -> ArtifactRef:
    """The `batch` table of an RL step in environments: one row per segment of a graded trajectory.

    Raises:
        NotOneGrade: `plan.per_trajectory`, and a trajectory has no grade or several.
    """
    return await trajectory_batch(workspace, policy, trajectories, plan, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_ppo_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The `batch` table of a PPO step: as prepare_batch, with an advantage and a return at every token."""
    return await value_batch(workspace, policy, rollouts, graded, plan, values, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_ppo_episode_batch(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The `batch` table of a PPO step in environments: as prepare_trajectories, with an advantage and a return at every
    token."""
    return await episode_value_batch(workspace, policy, trajectories, plan, values, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_completions(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The `batch` table of an SFT step: the tokenised rows of the dataset, with weights on the assistant turns."""
    return await sft_batch(workspace, policy, base, dataset, rows, lengths=lengths, step=step)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_preferences(  # noqa: PLR0913  the arguments of a step, and its loss
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    loss: LossSpec,
    reference: PolicyRef | None,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The `batch` table of a step on pairs, with two rows per pair, or on rated conversations, as the loss needs it.
    Raises BadSpec for a rated conversation without `res` in its metadata."""
    return await preference_batch(
        workspace, policy, base, dataset, rows, loss=loss, reference=reference, lengths=lengths, step=step
    )
