"""Generates the rollouts of one shard of prompts, by sampling completions or by playing episodes, and commits them."""

from __future__ import annotations

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.sampling.completions import PromptShard, sample_shard
from tasks.sampling.episodes import EpisodePlan, play_shard
from tasks.task_runs import durable_task


@durable_task("rollout", "rollout-{step:06d}/{shard.index:02d}")
async def generate_rollouts(
    workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
) -> ArtifactRef:
    """Completions of the shard's prompts by `policy`, as a committed `rollouts` table.

    A second call, even at the same time, returns the same table: a committed shard is not sampled again, and the seeds
    depend on the run's seed, the stage, the step, the prompt and the completion only.
    """
    return await sample_shard(workspace, policy, shard, sampling, step=step)


@durable_task("rollout", "episodes-{step:06d}/{shard.index:02d}")
async def play_episodes(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan,
    *,
    step: int,
) -> ArtifactRef:
    """Episodes of `policy`, one per completion of the shard's prompts, as a committed `trajectories` table with the
    grades of their turns.

    A second call, even at the same time, returns the table that was committed first: a committed shard is not played
    again. The seeds depend on the run's seed, the stage, the step, the prompt, the completion and the turn only.

    Raises:
        TooManyMasked: more than `plan.max_masked_fraction` of the shard's episodes could not be played.
    """
    return await play_shard(workspace, policy, shard, sampling, plan, step=step)
