"""The tasks of a step that work on several shards at once: every shard is a task run of its own."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.iteration import async_map
from tasks.grade import grade_rollouts
from tasks.rollout import generate_rollouts, play_episodes
from tasks.sampling.completions import PromptShard
from tasks.sampling.episodes import EpisodePlan
from tasks.sampling.grading import Grading


async def sample_and_grade_shards(
    workspace: Workspace,
    policy: PolicyRef,
    shards: Sequence[PromptShard],
    sampling: SamplingParams,
    grading: Grading,
    *,
    step: int,
) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
    """The rollouts of each shard, completions of its prompts sampled from `policy`, and their grades.

    A shard is graded as soon as it is sampled, while the engine samples other shards. The first error cancels the work
    on the other shards and is raised.
    """

    async def sample_and_grade(shard: PromptShard) -> tuple[ArtifactRef, ArtifactRef]:
        rollouts = await generate_rollouts(workspace, policy, shard, sampling, step=step)
        graded = await grade_rollouts(workspace, rollouts, grading, stage=policy.stage, step=step, shard=shard.index)
        return rollouts, graded

    of_shards = await async_map(sample_and_grade, shards)
    return [rollouts for rollouts, _ in of_shards], [graded for _, graded in of_shards]


async def play_shards(
    workspace: Workspace,
    policy: PolicyRef,
    shards: Sequence[PromptShard],
    sampling: SamplingParams,
    episodes: EpisodePlan,
    *,
    step: int,
) -> list[ArtifactRef]:
    """The episodes of each shard, which begin with its prompts and are graded as they are played. The first error
    cancels the work on the other shards and is raised."""

    async def play(shard: PromptShard) -> ArtifactRef:
        return await play_episodes(workspace, policy, shard, sampling, episodes, step=step)

    return await async_map(play, shards)
