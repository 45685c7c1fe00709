"""Retention of checkpoints. They are caches: the chain rebuilds any policy without them, only slower.

Batches and records are never pruned, so a pruned checkpoint costs time and nothing else.
"""

from __future__ import annotations

import math
from typing import Literal

from storage import keys
from storage.artifacts import Manifest, read_manifest
from storage.chain import Chain, PolicyRef
from storage.errors import ObjectNotFound
from storage.models import Frozen
from storage.objects import ObjectStore


class Retention(Frozen):
    """Which unnamed checkpoints are kept: what any of these asks for. See prune_checkpoints."""

    keep_last: int = 2
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    best: Literal["min", "max"] = "max"


KEEP_LAST_TWO = Retention()


def prune_checkpoints(
    store: ObjectStore,
    policy: PolicyRef,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    best: Literal["min", "max"] = "max",
) -> list[int]:
    """Deletes the chain's unnamed checkpoints but those that one of these keeps; returns the steps removed.

    Args:
        keep_last: The latest so many.
        keep_every: Those of every so many steps.
        keep_best: So many with the best `metric` of the record that made them; `best` says which way. Equal ones: the
            earlier. A record without it, or with a value that is not finite, is not among the best.

    The manifest goes first: a reader never follows one to data that is gone. Raises ValueError when `metric` is in none
    of the records, naming those that are.
    """
    unnamed = {step: manifest for step, manifest in _checkpoints(store, policy).items() if not _named(store, manifest)}
    steps = sorted(unnamed)
    kept = set(steps[-keep_last:]) if keep_last else set()
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    if keep_best is not None:
        if metric is None:
            raise ValueError(f"keep_best={keep_best} was given without a metric; name one of the records' metrics")
        kept |= set(_best(store, policy, steps, metric, best)[:keep_best])
    removed = [step for step in steps if step not in kept]
    for step in removed:
        store.delete(keys.manifest_of_files(unnamed[step].key))
        for entry in unnamed[step].files:
            store.delete(entry.key)
    return removed


def _checkpoints(store: ObjectStore, policy: PolicyRef) -> dict[int, Manifest]:
    found = {}
    prefix = keys.checkpoints_prefix(policy.run, policy.stage, policy.model)
    for info in store.list(prefix):
        step = keys.checkpoint_step(info.key)
        if step is not None:
            try:
                found[step] = read_manifest(store, keys.checkpoint(policy.run, policy.stage, policy.model, step))
            except ObjectNotFound:
                continue  # another pruner was here first
    return found


def _named(store: ObjectStore, manifest: Manifest) -> bool:
    return manifest.extra.get("name") is not None or store.exists(keys.checkpoint_name(manifest.key))


def _best(
    store: ObjectStore, policy: PolicyRef, steps: list[int], metric: str, best: Literal["min", "max"]
) -> list[int]:
    """The steps whose records have the metric, the best first."""
    chain = Chain.of(store, policy)
    metrics = {step: record.metrics for step in steps if step and (record := chain.record(step)) is not None}
    known = {name for values in metrics.values() for name in values}
    if known and metric not in known:
        raise ValueError(f"no record of {policy.uri} has the metric {metric!r}; they have {', '.join(sorted(known))}")
    values = {step: found[metric] for step, found in metrics.items() if math.isfinite(found.get(metric, math.nan))}
    sign = -1 if best == "max" else 1
    return sorted(values, key=lambda step: (sign * values[step], step))
