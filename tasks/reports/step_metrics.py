"""From the committed artifacts of a step to its `StepMetrics`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import pyarrow.compute as pc

from storage.chain.records import CommitRecord, PolicyRef
from storage.errors import ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.batches.columns import gap_of
from tasks.evaluation.validation_curve import means_by_source
from tasks.reports.metrics import StepMetrics
from tasks.sampling.shards import AHEAD, read_tables
from tasks.sampling.trajectories import read_trajectories

T = TypeVar("T")


def measure_step(
    store: ObjectStore,
    record: CommitRecord,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    *,
    total_steps: int | None,
    seconds: dict[str, float],
) -> StepMetrics:
    """What a step did. Without rollouts (SFT) the reinforcement fields are None."""
    rewards, masked = _grades(store, graded) if all(ref.kind == "graded" for ref in graded) else _played(store, graded)
    mean = sum(rewards) / len(rewards) if rewards else None
    wall = sum(seconds.values())
    sampled = _each(lambda ref: _sampled(store, ref), rollouts)
    tokens = sum(shard.tokens for shard in sampled) if rollouts else int(record.metrics.get("tokens", 0))
    completions = sum(shard.completions for shard in sampled)
    prompts, gap, left_out = _batch(store, record.request.batch)
    return StepMetrics(
        step=record.request.parent.step,
        total_steps=total_steps,
        reward_mean=mean,
        reward_std=math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)) if mean is not None else None,
        by_source=means_by_source(_each(lambda ref: _sources(store, ref), graded)),
        kl_mean=record.metrics.get("kl_mean"),
        pair_accuracy=record.metrics.get("accuracy_mean"),
        pair_margin=_margin(record.metrics),
        loss=record.metrics.get("loss", math.nan),
        grad_norm=record.metrics.get("grad_norm", math.nan),
        learning_rate=record.request.optimizer.lr,
        completion_tokens=tokens,
        completion_length_mean=tokens / completions if completions else None,
        prompts=prompts,
        completions=completions or record.request.batch.rows or 0,
        masked=masked,
        dropped=left_out + sum(shard.dropped for shard in sampled),
        skipped_updates=record.skipped,
        logprob_gap=gap,
        tokens_per_second=tokens / wall if wall else 0.0,
        seconds=seconds,
    )


def _margin(metrics: Mapping[str, float]) -> float | None:
    """Of a step on pairs: how far the preferred ones were ahead."""
    if "reward_margin_mean" in metrics:
        return metrics["reward_margin_mean"]
    scores = [metrics.get(f"score_{side}_mean") for side in ("chosen", "rejected")]
    return None if scores[0] is None or scores[1] is None else scores[0] - scores[1]


def _grades(store: ObjectStore, graded: list[ArtifactRef]) -> tuple[list[float], int]:
    """The rewards that were given, and how many grades are masked."""
    rewards: list[float] = []
    masked = 0
    for table in read_tables(store, graded, ["reward", "status"]):
        rewards += table.filter(pc.equal(table["status"], "ok"))["reward"].to_pylist()
        masked += pc.sum(pc.equal(table["status"], "masked")).as_py() or 0
    return rewards, masked


def _sources(store: ObjectStore, graded: ArtifactRef) -> dict[str, list[float]]:
    """Of a shard: rewards summed by source, as the manifest says; episodes have none."""
    found = read_manifest(store, graded.key).extra.get("by_source") if graded.kind == "graded" else None
    return found or {}  # type: ignore[return-value]


def _played(store: ObjectStore, trajectories: list[ArtifactRef]) -> tuple[list[float], int]:
    """As `_grades`, of episodes: the grades of an episode's turns together are its reward."""
    played = read_trajectories(store, trajectories).values()
    masked = _each(lambda ref: int(read_manifest(store, ref.key).extra["masked"]), trajectories)  # type: ignore[arg-type]
    return [one.reward for one in played if one.grades], sum(masked)


class _Shard(NamedTuple):
    """What was sampled in a shard."""

    tokens: int
    completions: int
    dropped: int
    """Prompts."""


def _sampled(store: ObjectStore, rollouts: ArtifactRef) -> _Shard:
    """As the manifest says: the rows are as large as the tokens are many."""
    extra = read_manifest(store, rollouts.key).extra
    tokens, dropped, episodes = (extra.get(name) for name in ("completion_tokens", "dropped", "episodes"))
    if not isinstance(tokens, int):  # written before the manifest said so
        lengths = pc.list_value_length(read_table(store, rollouts, ["completion_ids"])["completion_ids"])
        tokens = pc.sum(lengths).as_py() or 0
    return _Shard(
        tokens=tokens,
        completions=episodes if isinstance(episodes, int) else rollouts.rows or 0,  # an episode may have several rows
        dropped=dropped if isinstance(dropped, int) else 0,
    )


def _batch(store: ObjectStore, batch: ArtifactRef) -> tuple[int, float | None, int]:
    """Prompts of a batch, its mean |sampler - trainer| logprob, nats per token (the health of the weight sync), and how
    many rows were dropped for their length."""
    extra = read_manifest(store, batch.key).extra
    prompts, gap, dropped = extra.get("prompts"), extra.get("logprob_gap"), extra.get("dropped")
    if isinstance(prompts, int):
        return prompts, gap if isinstance(gap, float) else None, dropped if isinstance(dropped, int) else 0
    table = read_table(store, batch, ["group", "old_logprobs", "sampler_logprobs"])  # of a hand-written loop, or older
    total, tokens = gap_of(table)
    return len(pc.unique(table["group"])), total / tokens if tokens else None, 0


def _each(call: Callable[[ArtifactRef], T], refs: list[ArtifactRef]) -> list[T]:
    """`call` of each, AHEAD at a time: requests of a few hundred bytes, whose latency adds up."""
    if len(refs) <= 1:
        return [call(ref) for ref in refs]
    with ThreadPoolExecutor(min(AHEAD, len(refs)), thread_name_prefix="shards") as pool:
        return list(pool.map(call, refs))


def write_metrics(store: ObjectStore, policy: PolicyRef, metrics: StepMetrics) -> None:
    """One object per step: object stores cannot append. A redo of a lost write replaces it."""
    store.put(keys.step_metrics(policy.run, policy.stage, metrics.step), metrics.model_dump_json().encode())


def read_metrics(store: ObjectStore, run: str, stage: str, *, steps: int) -> list[StepMetrics]:
    """The metrics of steps 0 .. steps-1, those that were written (a crash between commit and metrics loses one)."""
    found = []
    for step in range(steps):
        try:
            found.append(StepMetrics.model_validate_json(store.get(keys.step_metrics(run, stage, step))))
        except ObjectNotFound:
            continue
    return found
