"""The tasks of a step that work on several shards at once: every shard is a task run of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.grade import grade_rollouts
from tasks.rollout import generate_rollouts, play_episodes
from tasks.sampling.completions import PromptShard
from tasks.sampling.episodes import EpisodePlan
from tasks.sampling.grading import Grading


async def generate_shards(
    workspace: Workspace, policy: PolicyRef, shards: Sequence[PromptShard], sampling: SamplingParams, *, step: int
) -> list[ArtifactRef]:
    """The rollouts of each shard: completions of its prompts, sampled from `policy`."""
    return await asyncio.gather(
        *(generate_rollouts(workspace, policy, shard, sampling, step=step) for shard in shards)
    )


async def grade_shards(
    workspace: Workspace,
    policy: PolicyRef,
    shards: Sequence[PromptShard],
    rollouts: Sequence[ArtifactRef],
    grading: Grading,
    *,
    step: int,
) -> list[ArtifactRef]:
    """The grades of each shard's rollouts. `policy` is the one that was sampled."""
    return await asyncio.gather(
        *(
            grade_rollouts(workspace, ref, grading, stage=policy.stage, step=step, shard=shard.index)
            for ref, shard in zip(rollouts, shards, strict=True)
        )
    )


async def play_shards(
    workspace: Workspace,
    policy: PolicyRef,
    shards: Sequence[PromptShard],
    sampling: SamplingParams,
    episodes: EpisodePlan,
    *,
    step: int,
) -> list[ArtifactRef]:
    """The episodes of each shard, which begin with its prompts and are graded as they are played."""
    return await asyncio.gather(
        *(play_episodes(workspace, policy, shard, sampling, episodes, step=step) for shard in shards)
    )
