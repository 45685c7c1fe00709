"""From the committed artifacts of a step to its `StepMetrics`."""

from __future__ import annotations

import math
from typing import Any

from storage import keys
from storage.artifacts import ArtifactRef, read_manifest
from storage.chain import CommitRecord, PolicyRef
from storage.errors import ObjectNotFound
from storage.objects import ObjectStore
from storage.tables import read_table
from tasks.metrics import StepMetrics


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
    grades = [row for ref in graded for row in read_table(store, ref, columns=["reward", "status"]).to_pylist()]
    lengths = [
        len(ids) for ref in rollouts for ids in read_table(store, ref, ["completion_ids"])["completion_ids"].to_pylist()
    ]
    rewards = [row["reward"] for row in grades if row["status"] == "ok"]
    mean = sum(rewards) / len(rewards) if rewards else None
    wall = sum(seconds.values())
    tokens = sum(lengths) if rollouts else int(record.metrics.get("tokens", 0))
    batch = read_table(store, record.request.batch, ["group", "old_logprobs", "sampler_logprobs"]).to_pylist()
    return StepMetrics(
        step=record.request.parent.step,
        total_steps=total_steps,
        reward_mean=mean,
        reward_std=math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)) if mean is not None else None,
        kl_mean=record.metrics.get("kl_mean"),
        loss=record.metrics.get("loss", math.nan),
        grad_norm=record.metrics.get("grad_norm", math.nan),
        learning_rate=record.request.optimizer.lr,
        completion_tokens=tokens,
        completion_length_mean=tokens / len(lengths) if lengths else None,
        prompts=len({row["group"] for row in batch}),
        completions=len(lengths) or len(batch),
        masked=sum(row["status"] == "masked" for row in grades),
        dropped=sum(_dropped(store, ref) for ref in rollouts),
        skipped_updates=record.skipped,
        logprob_gap=_gap(batch),
        tokens_per_second=tokens / wall if wall else 0.0,
        seconds=seconds,
    )


def _dropped(store: ObjectStore, rollouts: ArtifactRef) -> int:
    count = read_manifest(store, rollouts.key).extra.get("dropped")
    return count if isinstance(count, int) else 0


def _gap(batch: list[dict[str, Any]]) -> float | None:
    """Mean |sampler - trainer| logprob, nats per token: the health of the weight sync."""
    gaps = [
        abs(mine - theirs)
        for row in batch
        if row["old_logprobs"] and row["sampler_logprobs"]
        for mine, theirs in zip(row["old_logprobs"], row["sampler_logprobs"], strict=True)
    ]
    return sum(gaps) / len(gaps) if gaps else None


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
