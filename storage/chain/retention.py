"""Retention of checkpoints. They are caches: the chain rebuilds any policy without them, only slower.

Batches and records are never pruned, so a pruned checkpoint costs time and nothing else. The checkpoint that a rebase
goes on from is no cache: no redo makes it again, and it is never pruned.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Literal

from storage.chain.checkpoint_uses import checkpoint_uses
from storage.chain.rebase import is_in_effect, rebase_at, rebases_in_effect
from storage.chain.records import Chain, PolicyRef
from storage.errors import CheckpointInUse, ObjectNotFound, PermanentStorageError
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)


class Retention(Frozen):
    """Which checkpoints are kept: what any of these asks for. See prune_checkpoints."""

    keep_last: int = 2
    keep_named: int | None = None
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
    keep_named: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    best: Literal["min", "max"] = "max",
) -> list[int]:
    """Deletes the checkpoints of a chain that none of these keeps; returns the steps removed.

    Args:
        keep_last: The latest so many unnamed ones.
        keep_named: The latest so many named ones; None: all. Older ones stay where something refers to them
            (`checkpoint_uses`), and where keep_every or keep_best asks for them.
        keep_every: Those of every so many steps.
        keep_best: So many with the best `metric` of the record that made them; `best` says which way. Equal ones: the
            earlier. A record without it, or with a value that is not finite, is not among the best.

    A checkpoint that a rebase goes on from always stays. Named ones stay, with a warning, where another run or model of
    the store is damaged, so that it is unknown what refers to them. The manifest goes first: a reader never follows one
    to data that is gone. Raises ValueError when `metric` is in none of the records, naming those that are.
    """
    chain = Chain.of(store, policy)
    needed = {rebase.checkpoint.key for rebase in rebases_in_effect(chain)}
    free = {step: manifest for step, manifest in _checkpoints(store, policy).items() if manifest.key not in needed}
    named = sorted(step for step, manifest in free.items() if _named(store, manifest))
    unnamed = sorted(free.keys() - set(named))
    too_old = [] if keep_named is None else named[: max(0, len(named) - keep_named)]

    steps = sorted([*unnamed, *too_old])
    kept = set(unnamed[-keep_last:]) if keep_last else set()
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    if keep_best is not None:
        if metric is None:
            raise ValueError(f"keep_best={keep_best} was given without a metric; name one of the records' metrics")
        kept |= set(_best(store, policy, steps, metric, best)[:keep_best])
    try:
        uses = checkpoint_uses(store, {chain.policy(step) for step in too_old if step not in kept})
        kept |= {used.step for used in uses}
    except PermanentStorageError as error:  # of any run or model of the store, which must not end this one's
        log.warning("named checkpoints beyond keep_named=%s stay, their uses are unknown: %s", keep_named, error)
        kept |= set(too_old)
    return [step for step in steps if step not in kept and _remove(store, policy, step, free[step])]


def remove_checkpoints(store: ObjectStore, policies: Collection[PolicyRef], *, dry_run: bool = False) -> list[Manifest]:
    """Deletes the checkpoints of these policies, named or not; returns those that were there. With `dry_run` they stay.
    The chain stays whole: a policy without a checkpoint is redone from an earlier one.

    Raises CheckpointInUse when something refers to one of them (`checkpoint_uses`), and then none is deleted.
    """
    uses = checkpoint_uses(store, policies)
    if uses:
        listed = "\n".join(f"  {policy.uri.partition('#')[0]}: {'; '.join(uses[policy])}" for policy in uses)
        raise CheckpointInUse(f"nothing was removed, because these checkpoints are in use:\n{listed}")
    removed = []
    for policy in policies:
        try:
            manifest = read_manifest(store, keys.checkpoint(policy.run, policy.stage, policy.model, policy.step))
        except ObjectNotFound:
            continue  # somebody else removed it meanwhile
        if not dry_run and not _remove(store, policy, policy.step, manifest):
            raise CheckpointInUse(f"{policy.uri} was not removed: its run was rebased there a moment ago")
        removed.append(manifest)
    return removed


def _remove(store: ObjectStore, policy: PolicyRef, step: int, manifest: Manifest) -> bool:
    """False when a rebase came to go on from it meanwhile: whoever rebases looks for the manifest after its commit, and
    this looks for the rebase after the manifest went, so one of the two sees the other and brings it back."""
    key = keys.manifest_of_files(manifest.key)
    store.delete(key)
    chain = Chain.of(store, policy)
    rebase = rebase_at(chain, step)
    if rebase is not None and rebase.checkpoint.key == manifest.key and is_in_effect(chain, rebase):
        store.put_if_absent(key, canonical_json(manifest.model_dump(mode="json")))
        return False
    store.delete(keys.checkpoint_name(manifest.key))
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
