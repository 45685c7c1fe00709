"""Plays the episodes of a shard of prompts and commits them as a table of rollouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from engine.errors import BadSpec
from engine.protocol import Completion, GenerateRequest, SamplingParams
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.failpoints import failpoint
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import commit_table, read_rows, table_schema
from storage.worklog import log_work
from tasks.batches.truncation import shortest
from tasks.committed import commit_once
from tasks.datasets.naming import row_name
from tasks.environments.base import EnvironmentFactory
from tasks.environments.episodes import Episode, EpisodeLimits, EpisodePlayer, EpisodeSegment, Trajectory
from tasks.environments.runner import EnvironmentRunner
from tasks.environments.spec import EnvironmentSpec, build
from tasks.plans import AgentPlan, EpisodePlan, PromptShard, TooManyMasked
from tasks.reports.clock import timed
from tasks.sampling.segments import InFlightSampler
from tasks.task_runs import durable_task

_EPISODE_COLUMNS = ("graded_turns", "grades", "status", "ending", "reason")
_POLICY_COLUMNS = ("policy_states", "policy_tokens")


@lru_cache(maxsize=8)
def _factory(spec_json: str) -> EnvironmentFactory:
    return build(EnvironmentSpec.model_validate_json(spec_json))


@durable_task("rollout", "episodes-{step:06d}/{shard.index:02d}")
async def play_episodes(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan | AgentPlan,
    *,
    step: int,
) -> ArtifactRef:
    """Episodes of `policy`, one per completion of the shard's prompts, as a committed `rollouts` table with the grades
    of their turns.

    A second call, even at the same time, returns the table that was committed first: a committed shard is not played
    again. The seeds depend on the run's seed, the stage, the step, the prompt, the completion and the turn only.

    Raises:
        TooManyMasked: more than `plan.max_masked_fraction` of the shard's episodes could not be played.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
    return await commit_once(
        workspace, key, lambda: _play_shard(workspace, policy, shard, sampling, plan, key, step), parent=policy.uri
    )


async def _play_shard(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan | AgentPlan,
    key: str,
    step: int,
) -> ArtifactRef:
    """Plays the episodes of a shard and commits them."""
    # Play the episodes. Their seeds depend on the step, so that a repeated prompt is not the same episode again.
    seeds = (policy.stage, step)
    in_flight: InFlightSampler | None = None
    if shard.segment_seconds is not None:
        in_flight = InFlightSampler(workspace, policy, step=step, seconds=shard.segment_seconds)
    episodes = await play(workspace, policy, shard, sampling, plan, seeds=seeds, where=key, in_flight=in_flight)
    log_work("shard", stage=policy.stage, step=step, shard=shard.index)

    # Commit those whose first prompt was not too long.
    played = [episode for episode in episodes if episode.ending != "too_long"]
    store = workspace.open_store()
    parents, counts = [policy.uri, shard.dataset.uri], _counts(episodes, played)
    if isinstance(plan, AgentPlan):
        counts["segments"] = sum(len(episode.segments) for episode in played)
        counts["failed_attempts"] = sum(episode.failed_attempts for episode in played)
    if in_flight is not None:
        tokens_by_policy = in_flight.tokens_by_policy
        counts |= {"policies": dict(tokens_by_policy), "min_new_tokens": sampling.min_new_tokens}
        parents += [uri for uri in tokens_by_policy if uri != policy.uri]
    with timed("storage"):
        table = commit_table(
            store,
            key,
            episode_table(renderer_of(store, shard.base), policy, played, in_flight=in_flight is not None),
            kind="rollouts",
            parents=parents,
            provenance=workspace.provenance,
            extra=counts,
        )
        # A run has too many calls to keep. A kill before this line leaves those of one shard behind.
        if isinstance(plan, AgentPlan):
            await asyncio.to_thread(_forget_calls, store, key)
    return table


def _forget_calls(store: ObjectStore, rollouts: str) -> None:
    """Deletes the records of an agent's calls, whose tokens the committed table has."""
    for info in store.list(keys.calls_prefix(rollouts)):
        store.delete(info.key)


async def play(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan | AgentPlan,
    *,
    seeds: tuple[str | int, ...],
    where: str,
    in_flight: InFlightSampler | None = None,
) -> Sequence[Trajectory]:
    """Plays the shard's episodes to their ends: with an environment in one engine batch per turn, or by agents.

    Args:
        seeds: what distinguishes these episodes from those of other steps. The seed of an answer follows from it, the
            prompt, the episode and the turn.
        where: the name of the shard in errors.
        in_flight: samples the answers if their policy may change at a token. None: all come from `policy`.

    Raises:
        TooManyMasked: more than `plan.max_masked_fraction` of the episodes could not be played.
        BadSpec: max_new_tokens leaves no room for a prompt, or truncation is left or right.
        SampleTooLong: a first prompt is too long, and truncation is error.
    """
    # Read the prompts.
    store = workspace.open_store()
    with timed("storage"):
        rows = read_rows(store, shard.dataset, shard.rows)
    played: Sequence[Trajectory]
    if isinstance(plan, AgentPlan):
        # It imports a web server, which other runs do not need.
        from tasks.sampling.agents import AgentRunner

        played = [Trajectory(row, number) for row, number in _numbered(shard, rows)]
        rollouts = where if keys.is_rollouts(where) else None
        runner = AgentRunner(
            workspace, policy, shard, sampling, plan, seeds=seeds, rollouts=rollouts, in_flight=in_flight
        )
        await runner.play(played)
    else:
        played = await _play_environments(workspace, policy, shard, sampling, plan, rows, seeds, in_flight)
    check_masked(played, plan, where=where)
    return played


async def _play_environments(
    workspace: Workspace,
    policy: PolicyRef,
    shard: PromptShard,
    sampling: SamplingParams,
    plan: EpisodePlan,
    rows: list[dict[str, Any]],
    seeds: tuple[str | int, ...],
    in_flight: InFlightSampler | None,
) -> list[Episode]:
    """Creates an episode for each completion, and plays them with their environments."""
    store, episodes = workspace.open_store(), _episodes(workspace, shard, plan, rows, seeds)

    # The player calls this once per turn, with the prompts of all episodes that have not ended.
    async def generate(prompts: list[list[int]], live: list[Episode]) -> list[Completion]:
        failpoint("trajectory.turn")
        answer_seeds = [
            workspace.seed_for(*seeds, episode.row["id"], episode.number, episode.turn) for episode in live
        ]
        request = GenerateRequest(policy, prompts, answer_seeds, sampling)
        if in_flight is None:
            with timed("rollout"):
                return await workspace.connect().generate(request, epoch=workspace.epoch)
        answers = await in_flight.sample(request)
        for episode, answer in zip(live, answers, strict=True):
            episode.current_segment.policy_states += [sampled_by.state for sampled_by in answer.policies]
            episode.current_segment.policy_tokens += answer.lengths
        return [answer.completion() for answer in answers]

    # Play all episodes.
    limits = _limits(workspace, shard, sampling, plan)
    name_row = partial(row_name, store, shard.dataset)
    player = EpisodePlayer(renderer_of(store, shard.base), limits, concurrency=plan.concurrency, name_row=name_row)
    await player.play(episodes, generate)
    return episodes


def _episodes(
    workspace: Workspace,
    shard: PromptShard,
    plan: EpisodePlan,
    rows: list[dict[str, Any]],
    seeds: tuple[str | int, ...],
) -> list[Episode]:
    """New episodes with their environments, `shard.completions` per prompt."""
    factory = _factory(plan.environment.model_dump_json())
    episodes = []
    for row, number in _numbered(shard, rows):
        seed = workspace.seed_for("environment", *seeds, row["id"], number)
        environment = EnvironmentRunner(factory, seed=seed, seconds=plan.reaction_seconds)
        episodes.append(Episode(row, number, environment=environment))
    return episodes


def _numbered(shard: PromptShard, rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """The row and the number of each episode, `shard.completions` per prompt."""
    repetitions = shard.repetitions or (0,) * len(rows)
    numbered = []
    for row, times in zip(rows, repetitions, strict=True):
        numbered += [(row, number) for number in range(times * shard.completions, (times + 1) * shard.completions)]
    return numbered


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
            f"truncation={shard.truncation!r} removes tokens, but the environment must see the same conversation "
            "as the model; use error or drop, or shorten the conversation in initialize_state"
        )
    return EpisodeLimits(
        turns=plan.max_turns,
        tokens=tokens,
        seconds=plan.episode_seconds,
        new_tokens=sampling.max_new_tokens,
        first_prompt=shard.max_prompt_tokens,
        drop_too_long=shard.truncation == "drop",
    )


def check_masked(episodes: Sequence[Trajectory], plan: EpisodePlan | AgentPlan, *, where: str) -> None:
    """Raises TooManyMasked if too many episodes of `where` could not be played."""
    # A prompt that was too long has no episode.
    begun = [episode for episode in episodes if episode.ending != "too_long"]
    masked = [episode for episode in begun if episode.status == "masked"]
    if len(masked) > plan.max_masked_fraction * len(begun):
        raise TooManyMasked(
            f"{len(masked)} of {len(begun)} episodes of {where} could not be played, at most "
            f"{plan.max_masked_fraction:.0%} may fail; the first reason: {masked[0].reason}. Correct the environment "
            "or the agent and resume, or raise max_masked_fraction"
        )


def _counts(episodes: Sequence[Trajectory], played: Sequence[Trajectory]) -> dict[str, JsonValue]:
    """Counts of a shard for the metrics of its step; `played` are the episodes whose prompt was not too long."""
    prompts = {episode.row["index"] for episode in episodes}
    played_prompts = {episode.row["index"] for episode in played}
    segments = [segment for episode in played for segment in episode.segments]
    return {
        "prompts": len(prompts),
        "dropped": len(prompts - played_prompts),
        "episodes": len(played),
        "masked": sum(episode.status == "masked" for episode in played),
        "turns": sum(episode.turn for episode in played),
        "completion_tokens": sum(sum(segment.turn_tokens) for segment in segments),
        "truncated": sum(any("length" in segment.stop_reasons for segment in episode.segments) for episode in played),
        "logprob_sum": math.fsum(chain.from_iterable(segment.tokenized.logprobs for segment in segments)),
    }


def episode_table(
    renderer: Renderer, policy: PolicyRef, episodes: Sequence[Trajectory], *, in_flight: bool = False
) -> pa.Table:
    """The rollouts table: a row per segment, with its tokens and its conversation. A masked or ignored episode is
    one row without tokens. `in_flight`: with the policies of the answers, which may have changed at a token."""
    rows = []
    for episode in episodes:
        segments: Sequence[EpisodeSegment | None] = episode.segments if episode.status == "ok" else [None]
        for index, segment in enumerate(segments):
            rows.append(_row(renderer, policy, episode, index, segment))
    columns = (*_EPISODE_COLUMNS, *(_POLICY_COLUMNS if in_flight else ()))
    return pa.Table.from_pylist(rows, schema=table_schema("rollouts", columns))


def _row(
    renderer: Renderer, policy: PolicyRef, episode: Trajectory, index: int, segment: EpisodeSegment | None
) -> dict[str, Any]:
    """Returns the row of a segment. If `segment` is None, the episode has no tokens to train."""
    row: dict[str, Any] = {
        "token_ids": [],
        "loss_mask": [],
        "logprobs": [],
        "first_turn": 0,
        "turn_tokens": [],
        "stop_reasons": [],
        "graded_turns": [],
        "grades": [],
        "policy_states": [],
        "policy_tokens": [],
    }
    if segment is not None:
        token_ids, weights = renderer.serialize(segment.tokenized)
        grades = dict(sorted(segment.grades.items()))
        row = {
            "token_ids": token_ids,
            "loss_mask": np.array(weights) > 0,
            "logprobs": segment.tokenized.logprobs,
            "first_turn": segment.first_turn,
            "turn_tokens": segment.turn_tokens,
            "stop_reasons": segment.stop_reasons,
            "graded_turns": list(grades),
            "grades": list(grades.values()),
            "policy_states": segment.policy_states,
            "policy_tokens": segment.policy_tokens,
        }
    # A masked episode has the conversation up to its failure, so that a reader can see where it stopped.
    thread = episode.row["thread"]
    last_segment = segment or (episode.segments[-1] if episode.segments else None)
    if last_segment is not None:
        thread = renderer.detokenize(last_segment.tokenized).to_json()
    return row | {
        "prompt_index": episode.row["index"],
        "prompt_id": episode.row["id"],
        "completion": episode.number,
        "segment": index,
        "status": episode.status,
        "ending": episode.ending,
        "reason": episode.reason,
        "thread": thread,
        "policy_state": segment.policy_states[0] if segment and segment.policy_states else policy.state,
    }
