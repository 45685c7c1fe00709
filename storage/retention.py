"""Retention of checkpoints. They are caches: the chain rebuilds any policy without them, only slower.

Batches and records are never pruned, so a pruned checkpoint costs time and nothing else. The checkpoint that a rebase
goes on from is no cache: no redo makes it again, and it is never pruned.
"""

from __future__ import annotations

import math
from typing import Literal

from storage import keys
from storage.artifacts import Manifest, read_manifest
from storage.chain import Chain, PolicyRef
from storage.errors import ObjectNotFound
from storage.models import Frozen, canonical_json
from storage.objects import ObjectStore
from storage.rebase import rebase_at, standing, stands


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
    """Deletes the chain's unnamed checkpoints but those that one of these keeps, or that a rebase goes on from; returns
    the steps removed.

    Args:
        keep_last: The latest so many.
        keep_every: Those of every so many steps.
        keep_best: So many with the best `metric` of the record that made them; `best` says which way. Equal ones: the
            earlier. A record without it, or with a value that is not finite, is not among the best.

    The manifest goes first: a reader never follows one to data that is gone. Raises ValueError when `metric` is in none
    of the records, naming those that are.
    """
    needed = {rebase.checkpoint.key for rebase in standing(Chain.of(store, policy))}
    unnamed = {
        step: manifest
        for step, manifest in _checkpoints(store, policy).items()
        if manifest.key not in needed and not _named(store, manifest)
    }
    steps = sorted(unnamed)
    kept = set(steps[-keep_last:]) if keep_last else set()
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    if keep_best is not None:
        if metric is None:
            raise ValueError(f"keep_best={keep_best} was given without a metric; name one of the records' metrics")
        kept |= set(_best(store, policy, steps, metric, best)[:keep_best])
    return [step for step in steps if step not in kept and _remove(store, policy, step, unnamed[step])]


def _remove(store: ObjectStore, policy: PolicyRef, step: int, manifest: Manifest) -> bool:
    """False when a rebase came to go on from it meanwhile: whoever rebases looks for the manifest after its commit, and
    this looks for the rebase after the manifest went, so one of the two sees the other and brings it back."""
    key = keys.manifest_of_files(manifest.key)
    store.delete(key)
    chain = Chain.of(store, policy)
    rebase = rebase_at(chain, step)
    if rebase is not None and rebase.checkpoint.key == manifest.key and stands(chain, rebase):
        store.put_if_absent(key, canonical_json(manifest.model_dump(mode="json")))
        return False
    for entry in manifest.files:
        store.delete(entry.key)
    return True


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
