"""Computes the `StepMetrics` of a step from its committed artifacts, and stores them."""

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
from tasks.batches.columns import LogprobGap
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
    """The metrics of a step. Without rollouts (SFT) the fields of reinforcement learning are None."""
    # rewards
    if all(ref.kind == "graded" for ref in graded):
        rewards, masked = _grades(store, graded)
    else:
        rewards, masked = _episode_rewards(store, graded)
    mean = sum(rewards) / len(rewards) if rewards else None
    deviation = None
    if mean is not None:
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    # sampled tokens, or trained tokens if nothing is sampled
    shards = _for_each_shard(lambda ref: _sampled(store, ref), rollouts)
    completions = sum(shard.completions for shard in shards)
    tokens = sum(shard.tokens for shard in shards) if rollouts else int(record.metrics.get("tokens", 0))
    # the batch
    prompts, gap, dropped_rows = _batch(store, record.request.batch)
    wall_seconds = sum(seconds.values())
    return StepMetrics(
        step=record.request.parent.step,
        total_steps=total_steps,
        reward_mean=mean,
        reward_std=deviation,
        by_source=means_by_source(_for_each_shard(lambda ref: _sources(store, ref), graded)),
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
        dropped=dropped_rows + sum(shard.dropped for shard in shards),
        skipped_updates=record.skipped,
        logprob_gap=gap,
        tokens_per_second=tokens / wall_seconds if wall_seconds else 0.0,
        seconds=seconds,
    )


def _margin(metrics: Mapping[str, float]) -> float | None:
    """Mean difference between preferred and rejected answers of a step on pairs; None for other steps."""
    if "reward_margin_mean" in metrics:
        return metrics["reward_margin_mean"]
    chosen, rejected = metrics.get("score_chosen_mean"), metrics.get("score_rejected_mean")
    if chosen is None or rejected is None:
        return None
    return chosen - rejected


def _grades(store: ObjectStore, graded: list[ArtifactRef]) -> tuple[list[float], int]:
    """(rewards, number of masked grades)."""
    rewards: list[float] = []
    masked = 0
    for table in read_tables(store, graded, ["reward", "status"]):
        rewards += table.filter(pc.equal(table["status"], "ok"))["reward"].to_pylist()
        masked += pc.sum(pc.equal(table["status"], "masked")).as_py() or 0
    return rewards, masked


def _sources(store: ObjectStore, graded: ArtifactRef) -> dict[str, list[float]]:
    """Rewards of a shard summed by data source, from its manifest; episodes have none."""
    if graded.kind != "graded":
        return {}
    return read_manifest(store, graded.key).extra.get("by_source") or {}  # type: ignore[return-value]


def _episode_rewards(store: ObjectStore, trajectories: list[ArtifactRef]) -> tuple[list[float], int]:
    """Like `_grades`, for episodes: the reward of an episode is the sum of its turns' grades."""
    episodes = read_trajectories(store, trajectories).values()
    rewards = [episode.reward for episode in episodes if episode.grades]
    masked = _for_each_shard(lambda ref: int(read_manifest(store, ref.key).extra["masked"]), trajectories)  # type: ignore[arg-type]
    return rewards, sum(masked)


class _Shard(NamedTuple):
    """Counts of what was sampled in a shard."""

    tokens: int
    completions: int
    dropped: int
    """Prompts."""


def _sampled(store: ObjectStore, rollouts: ArtifactRef) -> _Shard:
    """The counts of a shard, from its manifest: reading the rows would cost as much as the tokens need."""
    extra = read_manifest(store, rollouts.key).extra
    tokens, dropped, episodes = (extra.get(name) for name in ("completion_tokens", "dropped", "episodes"))
    if not isinstance(tokens, int):  # a manifest without the count
        lengths = pc.list_value_length(read_table(store, rollouts, ["completion_ids"])["completion_ids"])
        tokens = pc.sum(lengths).as_py() or 0
    return _Shard(
        tokens=tokens,
        completions=episodes if isinstance(episodes, int) else rollouts.rows or 0,  # an episode may have several rows
        dropped=dropped if isinstance(dropped, int) else 0,
    )


def _batch(store: ObjectStore, batch: ArtifactRef) -> tuple[int, float | None, int]:
    """(prompts, mean |sampler - trainer| logprob in nats per token, rows dropped for their length) of a batch."""
    extra = read_manifest(store, batch.key).extra
    prompts, gap, dropped = extra.get("prompts"), extra.get("logprob_gap"), extra.get("dropped")
    if isinstance(prompts, int):
        return prompts, gap if isinstance(gap, float) else None, dropped if isinstance(dropped, int) else 0
    # the batch of a hand-written loop has no such manifest
    table = read_table(store, batch, ["group", "old_logprobs", "sampler_logprobs"])
    batch_gap = LogprobGap()
    batch_gap.add(table)
    return len(pc.unique(table["group"])), batch_gap.mean, 0


def _for_each_shard(call: Callable[[ArtifactRef], T], refs: list[ArtifactRef]) -> list[T]:
    """The results of `call` for each shard, AHEAD at a time: the requests are small, but their latency adds up."""
    if len(refs) <= 1:
        return [call(ref) for ref in refs]
    with ThreadPoolExecutor(min(AHEAD, len(refs)), thread_name_prefix="shards") as pool:
        return list(pool.map(call, refs))


def write_metrics(store: ObjectStore, policy: PolicyRef, metrics: StepMetrics) -> None:
    """Stores the metrics of a step as one object, because object stores cannot append. A repeated write replaces it."""
    store.put(keys.step_metrics(policy.run, policy.stage, metrics.step), metrics.model_dump_json().encode())


def read_metrics(store: ObjectStore, run: str, stage: str, *, steps: int) -> list[StepMetrics]:
    """The metrics of steps 0 to steps - 1. A crash between the commit and the metrics leaves a step without metrics."""
    metrics = []
    for step in range(steps):
        try:
            data = store.get(keys.step_metrics(run, stage, step))
        except ObjectNotFound:
            continue
        metrics.append(StepMetrics.model_validate_json(data))
    return metrics
