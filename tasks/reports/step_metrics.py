"""Computes the `StepMetrics` of a step from its committed artifacts, and stores them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import pyarrow.compute as pc
from pydantic import JsonValue

from engine.specs.engine import spec_of_layout
from storage.chain.listing import run_chains
from storage.chain.records import CommitRecord, PolicyRef
from storage.errors import ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import AHEAD, read_step_table
from tasks.batches.columns import LogprobGap, read_grades
from tasks.datasets.load import LoadedPart
from tasks.evaluation.validation_curve import means_by_source
from tasks.reports.clock import Lap
from tasks.reports.metrics import LANES, PartMetrics, StepMetrics

CPUS = frozenset({"x86_64", "aarch64", "arm64", "AMD64"})
"""Names of the device of a step that was taken without a GPU: those of the machine."""
Item = TypeVar("Item")
T = TypeVar("T")


def measure_step(
    store: ObjectStore,
    record: CommitRecord,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    *,
    total_steps: int | None,
    lap: Lap,
    parts: Sequence[LoadedPart] = (),
) -> StepMetrics:
    """The metrics of a step. Without rollouts (SFT) the fields of reinforcement learning are None. `parts`: those of
    the mixture that the step took its rows from. `lap`: the time of the step."""
    rewards = _reward_statistics(store, graded)
    # Sampled tokens, or trained tokens if nothing is sampled.
    shards = _in_parallel(lambda ref: _shard_counts(store, ref), rollouts)
    completions = sum(shard.completions for shard in shards)
    tokens = sum(shard.tokens for shard in shards) if rollouts else int(record.metrics.get("tokens", 0))
    # The batch, which may have fewer rows than were sampled.
    extra = read_manifest(store, record.request.batch.key).extra
    prompts, gap, dropped_rows = _batch_counts(store, record.request.batch, extra)
    lag_mean, lag_max = _lag(record, shards, extra)
    return StepMetrics(
        step=record.request.parent.step,
        total_steps=total_steps,
        reward_mean=rewards.mean,
        reward_std=rewards.deviation,
        equal_groups=rewards.equal_groups,
        by_source=means_by_source(_in_parallel(lambda ref: _graded_sums(store, ref, "by_source"), graded)),
        reward_parts=means_by_source(_in_parallel(lambda ref: _graded_sums(store, ref, "reward_parts"), graded)),
        by_part=_rows_of_parts(record, parts),
        kl_mean=record.metrics.get("kl_mean"),
        teacher_kl=extra.get("teacher_kl"),
        divergence=record.metrics.get("divergence_mean"),
        pair_accuracy=record.metrics.get("accuracy_mean"),
        pair_margin=_margin(record.metrics),
        loss=record.metrics.get("loss", math.nan),
        grad_norm=record.metrics.get("grad_norm", math.nan),
        learning_rate=record.request.optimizer.lr,
        completion_tokens=tokens,
        completion_length_mean=tokens / completions if completions else None,
        prompts=prompts,
        completions=completions or record.request.batch.rows or 0,
        masked=rewards.masked,
        dropped=dropped_rows + sum(shard.dropped for shard in shards),
        skipped_updates=record.skipped,
        skipped_reasons=tuple(f"{update} (batch {record.request.batch.key})" for update in record.skipped_updates),
        entropy=_entropy(shards),
        **_per_completion_of(shards, completions),
        clip_fraction=record.metrics.get("clip_fraction_mean"),
        skipped=bool(rollouts) and record.request.batch.rows == 0,
        logprob_gap=record.metrics.get("logprob_gap_mean", gap),
        lag_mean=lag_mean,
        lag_max=lag_max,
        masked_token_fraction=record.metrics.get("masked_fraction_mean"),
        effective_sample_size=_effective_sample_size(record.metrics),
        **_of_lanes(lap, is_asynchronous=lag_mean is not None),
        tokens_per_second=tokens / lap.wall_seconds if lap.wall_seconds else 0.0,
        seconds=lap.seconds,
    )


def _per_completion_of(shards: Sequence[_ShardCounts], completions: int) -> dict[str, float | None]:
    """What is counted per shard, divided by the number of completions."""
    return {
        "truncated": _per_completion([shard.truncated for shard in shards], completions),
        "turns_mean": _per_completion([shard.turns for shard in shards], completions),
        "segments_mean": _per_completion([shard.segments for shard in shards], completions),
        "failed_attempts_mean": _per_completion([shard.failed_attempts for shard in shards], completions),
    }


def _of_lanes(lap: Lap, *, is_asynchronous: bool) -> dict[str, Any]:
    """How sampler and trainer used the time of a step. Empty where one waits for the other."""
    if not is_asynchronous:
        return {}
    lanes = {lane: lap.merged_spans(lane) for lane in LANES}
    return {"sampler_idle": lap.idle("rollout"), "trainer_idle": lap.idle("train"), "lanes": lanes}


class _Rewards(NamedTuple):
    """Statistics of the rewards of a step, one per completion or per episode. None without rewards."""

    mean: float | None = None
    deviation: float | None = None
    equal_groups: float | None = None
    masked: int = 0
    """Number of masked grades."""


def _reward_statistics(store: ObjectStore, graded: list[ArtifactRef]) -> _Rewards:
    if not graded:
        return _Rewards()
    grades = read_grades(store, graded)
    rewards = grades.rewards.tolist()
    if not rewards:
        return _Rewards(masked=grades.masked_count)
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return _Rewards(mean, deviation, grades.equal_group_share(), grades.masked_count)


def _entropy(shards: Sequence[_ShardCounts]) -> float | None:
    """Minus the mean logprob of the sampled tokens. None if a shard does not have their sum."""
    sums = [shard.logprob_sum for shard in shards if shard.logprob_sum is not None]
    tokens = sum(shard.tokens for shard in shards)
    return -math.fsum(sums) / tokens if tokens and len(sums) == len(shards) else None


def _per_completion(counts: Sequence[int | None], completions: int) -> float | None:
    """The mean of a count. None if a shard does not have it."""
    known = [count for count in counts if count is not None]
    return sum(known) / completions if completions and len(known) == len(counts) else None


def _rows_of_parts(record: CommitRecord, parts: Sequence[LoadedPart]) -> dict[str, PartMetrics]:
    before, after = record.request.cursor_in, record.request.cursor_out
    by_part = {}
    for number, part in enumerate(parts):
        drawn = after.get(f"drawn_{number}", 0)
        rows = drawn - before.get(f"drawn_{number}", 0)
        by_part[part.name] = PartMetrics(rows=rows, epoch=drawn / part.rows)
    return by_part


def _margin(metrics: Mapping[str, float]) -> float | None:
    """Mean difference between preferred and rejected answers of a step on preferences; None for other steps."""
    if "reward_margin_mean" in metrics:
        return metrics["reward_margin_mean"]
    for name in ("score", "reward"):
        chosen, rejected = metrics.get(f"{name}_chosen_mean"), metrics.get(f"{name}_rejected_mean")
        if chosen is not None and rejected is not None:
            return chosen - rejected
    return None


def _lag(
    record: CommitRecord, shards: Sequence[_ShardCounts], extra: Mapping[str, JsonValue]
) -> tuple[float | None, int | None]:
    """(mean over the sampled tokens, largest) age in steps of the policies that sampled, if the rules of the batch let
    them be older than the trained policy. `extra` is that of the batch's manifest."""
    rules = extra.get("rules")
    if not isinstance(rules, dict) or not rules.get("max_staleness") or not shards:
        return None, None
    # The number of tokens by their age.
    tokens_by_lag: Counter[int] = Counter()
    for shard in shards:
        for uri, tokens in shard.tokens_by_policy.items():
            tokens_by_lag[record.request.parent.step - PolicyRef.from_uri(uri).step] += tokens
    weighted = sum(lag * tokens for lag, tokens in tokens_by_lag.items())
    total = tokens_by_lag.total()
    return weighted / total if total else None, max(tokens_by_lag, default=None)


def _effective_sample_size(metrics: Mapping[str, float]) -> float | None:
    """(Σw)² / (N Σw²), from the means of the weights and of their squares."""
    mean, mean_of_squares = metrics.get("effective_weight_mean"), metrics.get("effective_weight_square_mean")
    if mean is None or mean_of_squares is None:
        return None
    return mean**2 / mean_of_squares if mean_of_squares > 0 else 0.0


def _graded_sums(store: ObjectStore, graded: ArtifactRef, entry: str) -> dict[str, list[float]]:
    """Data source, or part of the rewards -> [sum, number of values] of a shard, from this entry of its manifest. Empty
    for episodes."""
    if graded.kind != "graded":
        return {}
    return read_manifest(store, graded.key).extra.get(entry) or {}  # type: ignore[return-value]


class _ShardCounts(NamedTuple):
    """Numbers of what was sampled in a shard."""

    tokens: int
    completions: int
    """Completions, or episodes."""
    dropped: int
    """Prompts that were dropped for their length."""
    tokens_by_policy: dict[str, int]
    """The number of tokens that each policy sampled, by its URI."""
    truncated: int | None
    """Completions that ended at max_new_tokens, or episodes with such an answer. This and the next: None for rollouts
    of a hand-written loop."""
    logprob_sum: float | None
    """The sum of the logprobs of all sampled tokens."""
    turns: int | None
    """Answers of all episodes. None for completions."""
    segments: int | None
    """Segments of all episodes. This and the next: None unless agents played them."""
    failed_attempts: int | None
    """Attempts of agents that failed."""


def _shard_counts(store: ObjectStore, rollouts: ArtifactRef) -> _ShardCounts:
    # The counts are in the manifest. The rows need not be read, which would take as long as reading all tokens.
    manifest = read_manifest(store, rollouts.key)
    extra = manifest.extra
    # An episode may have several rows, so its shard has a count of episodes.
    # The answers of a dataset were not sampled.
    completions = 0 if extra.get("dataset_answers") else extra.get("episodes", rollouts.rows)
    tokens = int(extra["completion_tokens"])  # type: ignore[arg-type]
    # If weights were updated in flight, the manifest says which policy sampled how many tokens.
    by_policy: Any = extra.get("policies", {manifest.parents[0]: tokens})
    return _ShardCounts(
        tokens=tokens,
        completions=int(completions),  # type: ignore[arg-type]
        dropped=int(extra["dropped"]),  # type: ignore[arg-type]
        tokens_by_policy=by_policy,
        truncated=extra.get("truncated"),  # type: ignore[arg-type]
        logprob_sum=extra.get("logprob_sum"),  # type: ignore[arg-type]
        turns=extra.get("turns"),  # type: ignore[arg-type]
        segments=extra.get("segments"),  # type: ignore[arg-type]
        failed_attempts=extra.get("failed_attempts"),  # type: ignore[arg-type]
    )


def _batch_counts(
    store: ObjectStore, batch: ArtifactRef, extra: Mapping[str, JsonValue]
) -> tuple[int, float | None, int]:
    """(prompts, mean |sampler - trainer| logprob in nats per token, rows dropped for their length) of a batch. `extra`
    is that of its manifest."""
    if "prompts" in extra:
        # `dropped` is only in the manifest if a row was dropped.
        return extra["prompts"], extra.get("logprob_gap"), extra.get("dropped", 0)  # type: ignore[return-value]
    # The batch of a hand-written loop has no counts in its manifest.
    table = read_step_table(store, batch, ["group", "old_logprobs", "sampler_logprobs"])
    batch_gap = LogprobGap()
    batch_gap.add(table)
    return len(pc.unique(table["group"])), batch_gap.mean, 0


def _in_parallel(call: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """The results of `call` for each item, AHEAD at a time: the requests are small, but their latency adds up."""
    if len(items) <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(AHEAD, len(items)), thread_name_prefix="metrics") as pool:
        return list(pool.map(call, items))


def write_metrics(store: ObjectStore, policy: PolicyRef, metrics: StepMetrics) -> None:
    """Stores the metrics of a step as one object, because object stores cannot append. A repeated write replaces it."""
    store.put(keys.step_metrics(policy.run, policy.stage, metrics.step), metrics.model_dump_json().encode())


def read_metrics(store: ObjectStore, run: str, stage: str, *, steps: int, first: int = 0) -> list[StepMetrics]:
    """The metrics of steps `first` to steps - 1, read some at a time. A crash between the commit and the metrics leaves
    a step without metrics."""

    def read(step: int) -> StepMetrics | None:
        try:
            return StepMetrics.model_validate_json(store.get(keys.step_metrics(run, stage, step)))
        except ObjectNotFound:
            return None

    return [metrics for metrics in _in_parallel(read, range(first, steps)) if metrics is not None]


def trainer_gpus(store: ObjectStore, run: str, head: int) -> int:
    """GPUs of the trainer at the last step, `head`. 0: it trained on the CPU, or no step is committed."""
    chains = run_chains(store, run) if head else []
    record = chains[-1].record(min(head, chains[-1].head().step)) if chains else None
    if record is None or record.numerics.device in CPUS:
        return 0
    spec = spec_of_layout(record.numerics.layout)
    return spec.ranks if spec is not None and isinstance(spec.ranks, int) else 1
