"""Checks of worlds whose samplers run ahead of the trainer, and counts of the tokens that their faults cost."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.workspace import segment_seed
from storage.chain.records import Chain
from storage.inspect.accounting import step_inputs
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tests.chaos.world import MODEL, STAGE, World

PROMPTS_PER_STEP = 2
Position = tuple[int, int]
"""The place of a token: (seed of its completion, number of the token in the completion)."""


@dataclass(frozen=True)
class Shard:
    """The completions of a shard that a step trained on."""

    run: int
    step: int
    """Steps that its trainer had made before."""
    ref: ArtifactRef
    rows: list[dict[str, Any]]
    segments: list[str]
    """Keys of the committed segments that the completions went on from."""


@dataclass(frozen=True)
class SampledTokens:
    """What the samplers of a world did, by its store and its work log."""

    segments: int = 0
    mixed: int = 0
    """Completions with tokens of several policies."""
    trained: int = 0
    """Tokens of the completions that were trained."""
    again: int = 0
    """Tokens that were sampled again."""


def epoch_seconds(iso_time: str) -> float:
    return datetime.fromisoformat(iso_time).timestamp()


def shards_of(world: World, store: ObjectStore) -> Iterator[Shard]:
    for run in range(world.mode.runs):
        for record in Chain(store, world.run_key(run), STAGE, MODEL).records(after=0, until=world.mode.steps):
            for ref in step_inputs(store, record).rollouts:
                parents = [uri.partition("#")[0] for uri in ref.parents]
                segments = [key for key in parents if keys.is_segment(key)]
                yield Shard(run, record.request.parent.step, ref, read_table(store, ref).to_pylist(), segments)


def broken_staleness(world: World, store: ObjectStore) -> list[str]:
    """Prompts that were not trained as often as others, and tokens that are too old. The audit compares each step with
    the rules that it names; this compares the run with its config."""
    broken_promises = []
    runs = range(world.mode.runs)
    steps_by_state = []
    for run in runs:
        chain = Chain(store, world.run_key(run), STAGE, MODEL)
        steps_by_state.append({chain.policy(step).state: step for step in range(world.mode.steps + 1)})
    trained = [Counter[int]() for _ in runs]
    for shard in shards_of(world, store):
        trained[shard.run].update({row["prompt_index"] for row in shard.rows})
        for row in shard.rows:
            states = row.get("policy_states") or [row["policy_state"]]
            lag = shard.step - min(steps_by_state[shard.run][state] for state in states)
            if lag > world.mode.max_staleness:
                broken_promises.append(f"{shard.ref.key} has a token that is {lag} steps old")
    for run, prompts in enumerate(trained):
        # each epoch has every prompt once
        times = prompts.values()
        if max(times) - min(times) > 1 or sum(times) != world.mode.steps * PROMPTS_PER_STEP:
            broken_promises.append(f"{world.run_key(run)} trained its prompts this often: {sorted(prompts.items())}")
    return broken_promises


def count_tokens(world: World, store: ObjectStore) -> SampledTokens:
    """Counts the tokens that were sampled again, also for each fault of the world. They count for the last fault before
    they were sampled again."""
    committed_at: dict[Position, float] = {}
    part_of_seed: dict[int, Position] = {}
    segments = mixed = 0
    for shard in shards_of(world, store):
        segments += len(shard.segments)
        for row in shard.rows:
            mixed += len(set(row.get("policy_states") or ())) > 1
            # a completion may go on from each of its tokens, each time with another seed
            for start in range(world.mode.run["sampling"]["max_new_tokens"]):
                part_of_seed[segment_seed(row["seed"], start)] = (row["seed"], start)
        for key in shard.segments:
            manifest = read_manifest(store, key)
            for row in read_table(store, manifest.ref).to_pylist():
                completion, start = part_of_seed[row["seed"]]
                for number in range(start, start + len(row["token_ids"])):
                    committed_at[completion, number] = epoch_seconds(manifest.created)
        created = epoch_seconds(read_manifest(store, shard.ref.key).created)
        for row in shard.rows:
            for number in range(row["turn_tokens"][0]):
                committed_at.setdefault((row["seed"], number), created)

    # What was sampled, in the order of time, and which fault came before.
    times = [happening.time for happening in world.happenings]
    sampled_at: dict[Position, float] = {}
    again = Counter[int]()
    for token in sorted(world.tokens, key=lambda token: token["time"]):
        completion, start = part_of_seed[token["seed"]]
        position = (completion, start + token["number"])
        if position in sampled_at:
            again[bisect_right(times, token["time"]) - 1] += 1
        sampled_at.setdefault(position, token["time"])
    for event in world.log:
        if event["event"] == "restart":
            again[bisect_right(times, event["time"]) - 1] += event["tokens"]
    for number, happening in enumerate(world.happenings):
        happening.sampled_again = again[number]
        happening.tokens_in_flight = sum(
            at <= happening.time < committed_at.get(position, float("inf")) for position, at in sampled_at.items()
        )
    return SampledTokens(segments, mixed, len(committed_at), again.total())
