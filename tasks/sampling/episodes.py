"""Plain code behind the episodes task: from prompts to a table of trajectories."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from pydantic import Field

from engine.errors import BadSpec
from engine.protocol import Completion, GenerateRequest, SamplingParams
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.failpoints import failpoint
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import SCHEMAS, commit_table, read_rows
from storage.worklog import log_work
from tasks.batches.truncation import shortest
from tasks.datasets.naming import row_name
from tasks.environments.base import EnvironmentFactory
from tasks.environments.episodes import Episode, EpisodeLimits, EpisodePlayer, EpisodeSegment
from tasks.environments.runner import EnvironmentRunner
from tasks.environments.spec import EnvironmentSpec, build
from tasks.reports.clock import timed
from tasks.sampling.completions import PromptShard
from tasks.sampling.grading import TooManyMasked


class EpisodePlan(Frozen):
    """Which environment, how long an episode may be, and how patiently it is played."""

    environment: EnvironmentSpec
    max_turns: int = Field(8, ge=1)
    """Answers of one episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of one segment: prompt, answers and what the environment says. None: the model's context."""
    episode_seconds: float | None = Field(None, gt=0)
    """What an episode's environment may take altogether; a run in which this acts cannot be repeated to the byte."""
    reaction_seconds: float = Field(60.0, gt=0)
    """What one reaction may take; longer ones are failures."""
    concurrency: int = Field(64, ge=1)
    """Environments that react at a time."""
    max_masked_fraction: float = Field(0.2, ge=0, le=1)
    """The run fails when more of a shard's episodes than this could not be played."""


@lru_cache(maxsize=8)
def _factory(spec_json: str) -> EnvironmentFactory:
    return build(EnvironmentSpec.model_validate_json(spec_json))


async def play_shard(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed trajectories of a shard, played now if nobody did before."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "trajectories", shard.index)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
    seeds = (policy.stage, step)
    episodes = await play(workspace, policy, shard, sampling, plan, seeds=seeds, where=key)
    log_work("shard", stage=policy.stage, step=step, shard=shard.index)
    played = [episode for episode in episodes if episode.ending != "too_long"]
    with timed("storage"):
        committed = commit_table(
            store,
            key,
            trajectory_table(renderer_of(store, shard.base), policy, played),
            kind="trajectories",
            parents=(policy.uri, shard.dataset.uri),
            provenance=workspace.provenance,
            extra=_counts(episodes, played),
        )
    return require_parent(committed, policy.uri)


async def play(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan,
    *,
    seeds: tuple[str | int, ...],
    where: str,
) -> list[Episode]:
    """The shard's episodes, played to their ends: one batch of the engine per turn. `seeds` tell them from those of
    other steps; the seed of an answer is of them, the prompt, the episode and the turn. Raises TooManyMasked."""
    store = workspace.open_store()
    with timed("storage"):
        rows = read_rows(store, shard.dataset, shard.rows)
    episodes = _episodes(workspace, shard, plan, rows, seeds)

    async def generate(prompts: list[list[int]], live: list[Episode]) -> list[Completion]:
        failpoint("trajectory.turn")
        drawn = [workspace.seed_for(*seeds, one.row["id"], one.number, one.turn) for one in live]
        with timed("rollout"):
            request = GenerateRequest(policy, prompts, drawn, sampling)
            return await workspace.connect().generate(request, epoch=workspace.epoch)

    limits = _limits(workspace, shard, sampling, plan)
    name_row = partial(row_name, store, shard.dataset)
    players = EpisodePlayer(renderer_of(store, shard.base), limits, concurrency=plan.concurrency, name_row=name_row)
    await players.play(episodes, generate)
    check_masked(episodes, plan, where=where)
    return episodes


def _episodes(
    workspace: Workspace,
    shard: PromptShard,
    plan: EpisodePlan,
    rows: list[dict[str, Any]],
    seeds: tuple[str | int, ...],
) -> list[Episode]:
    factory = _factory(plan.environment.model_dump_json())
    earlier = shard.repetitions or (0,) * len(rows)
    episodes = []
    for row, times in zip(rows, earlier, strict=True):
        for number in range(times * shard.completions, (times + 1) * shard.completions):
            seed = workspace.seed_for("environment", *seeds, row["id"], number)
            environment = EnvironmentRunner(factory, seed=seed, seconds=plan.reaction_seconds)
            episodes.append(Episode(row, number, environment))
    return episodes


def _limits(workspace: Workspace, shard: PromptShard, sampling: SamplingParams, plan: EpisodePlan) -> EpisodeLimits:
    context = context_length_of(workspace.open_store(), shard.base)
    tokens = shortest(context, plan.max_tokens, workspace.max_tokens)
    if tokens is not None and tokens <= sampling.max_new_tokens:
        raise BadSpec(
            f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in {tokens} tokens (max_tokens="
            f"{plan.max_tokens}, max_batch_size={workspace.max_tokens}, the model's context is {context}); lower it"
        )
    if shard.truncation in ("left", "right"):
        raise BadSpec(
            f"truncation={shard.truncation!r} cuts token ids, but an environment must see what the model sees; use "
            "error or drop, or shorten the conversation in initialize_state"
        )
    return EpisodeLimits(
        turns=plan.max_turns,
        tokens=tokens,
        seconds=plan.episode_seconds,
        new_tokens=sampling.max_new_tokens,
        first_prompt=shard.max_prompt_tokens,
        drop_too_long=shard.truncation == "drop",
    )


def check_masked(episodes: list[Episode], plan: EpisodePlan, *, where: str) -> None:
    """Raises TooManyMasked."""
    masked = [episode for episode in episodes if episode.status == "masked"]
    if len(masked) > plan.max_masked_fraction * len(episodes):
        raise TooManyMasked(
            f"{len(masked)} of {len(episodes)} episodes of {where} could not be played, at most "
            f"{plan.max_masked_fraction:.0%} may fail; the first reason: {masked[0].reason}. Mend the environment, or "
            "raise max_masked_fraction"
        )


def _counts(episodes: list[Episode], played: list[Episode]) -> dict[str, int]:
    """What the metrics of a step ask of a shard."""
    prompts = {episode.row["index"] for episode in episodes}
    return {
        "prompts": len(prompts),
        "dropped": len(prompts - {episode.row["index"] for episode in played}),
        "episodes": len(played),
        "masked": sum(episode.status == "masked" for episode in played),
        "turns": sum(episode.turn for episode in played),
        "completion_tokens": sum(sum(part.turn_tokens) for episode in played for part in episode.segments),
    }


def trajectory_table(renderer: Renderer, policy: PolicyRef, episodes: list[Episode]) -> pa.Table:
    """One row per segment, readable as it is: the conversation stands beside the tokens. A masked or ignored episode
    is one row without tokens."""
    rows = [
        _row(renderer, policy, episode, index, segment)
        for episode in episodes
        for index, segment in enumerate(episode.segments if episode.status == "ok" else [None])
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMAS["trajectories"])


def _row(
    renderer: Renderer, policy: PolicyRef, episode: Episode, index: int, segment: EpisodeSegment | None
) -> dict[str, Any]:
    ids, weights = ([], []) if segment is None else renderer.serialize(segment.tokenized)
    shown = segment or (episode.segments[-1] if episode.segments else None)
    grades = {} if segment is None else dict(sorted(segment.grades.items()))
    return {
        "prompt_index": episode.row["index"],
        "prompt_id": episode.row["id"],
        "completion": episode.number,
        "segment": index,
        "token_ids": ids,
        "weights": weights,
        "logprobs": [] if segment is None else segment.tokenized.logprobs,
        "first_turn": 0 if segment is None else segment.first_turn,
        "turn_tokens": [] if segment is None else segment.turn_tokens,
        "graded_turns": list(grades),
        "grades": list(grades.values()),
        "status": episode.status,
        "ending": episode.ending,
        "reason": episode.reason,
        "thread": episode.row["thread"] if shown is None else renderer.detokenize(shown.tokenized).to_json(),
        "policy_state": policy.state,
    }
