"""Deletes checkpoints. They are caches: the chain rebuilds any policy without them, only more slowly.

Batches and records are never deleted, so a deleted checkpoint only costs time. The checkpoint of a rebase in effect is
an exception: the chain cannot rebuild it, and it is never deleted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Literal

from storage.chain.checkpoint_uses import reasons_to_keep
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.rebase import is_in_effect, rebase_at, rebases_in_effect
from storage.chain.records import Chain, PolicyRef
from storage.errors import CheckpointInUse, ObjectNotFound, PermanentStorageError
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)


class Retention(Frozen):
    """Rules for the checkpoints to keep. A checkpoint stays if any rule asks for it. See prune_checkpoints."""

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
    """Deletes the checkpoints of a chain that no rule keeps, and returns their steps.

    Args:
        keep_last: Keep this many of the latest unnamed checkpoints.
        keep_named: Keep this many of the latest named checkpoints; None keeps all. An older one stays if something
            refers to it (`reasons_to_keep`), or if keep_every or keep_best keeps it.
        keep_every: Keep the checkpoints whose step is a multiple of this.
        keep_best: Keep this many checkpoints with the best `metric` in the record of their step. `best` says whether
            larger or smaller is better. Of equal values, the earlier is better. A record without the metric, or with a
            value that is not finite, does not count.

    The checkpoint of a rebase in effect always stays. If another run or model of the store is damaged, so that the uses
    of named checkpoints are unknown, all named checkpoints stay, with a warning. Raises ValueError when no record has
    `metric`. The message lists the metrics of the records.
    """
    chain = Chain.of(store, policy)
    # sort the checkpoints that may be deleted into unnamed ones and named ones beyond keep_named
    rebase_checkpoints = {rebase.checkpoint.key for rebase in rebases_in_effect(chain)}
    manifests: dict[int, Manifest] = {}
    named: list[int] = []
    unnamed: list[int] = []
    for step, manifest in _read_checkpoints(store, policy).items():
        if manifest.key in rebase_checkpoints:
            continue
        manifests[step] = manifest
        if _is_named(store, manifest):
            named.append(step)
        else:
            unnamed.append(step)
    old_named = [] if keep_named is None else named[: max(0, len(named) - keep_named)]

    # apply the rules
    steps = sorted([*unnamed, *old_named])
    steps_to_keep = set(unnamed[-keep_last:]) if keep_last else set()
    if keep_every is not None:
        steps_to_keep |= {step for step in steps if step % keep_every == 0}
    if keep_best is not None:
        if metric is None:
            raise ValueError(f"keep_best={keep_best} was given without a metric; name one of the records' metrics")
        steps_to_keep |= set(_rank_by_metric(store, policy, steps, metric, best)[:keep_best])

    steps_to_keep |= _steps_in_use(chain, [step for step in old_named if step not in steps_to_keep])

    removed = []
    for step in steps:
        if step not in steps_to_keep and _remove(store, policy, step, manifests[step]):
            removed.append(step)
    return removed


def remove_checkpoints(store: ObjectStore, policies: Collection[PolicyRef], *, dry_run: bool = False) -> list[Manifest]:
    """Deletes the checkpoints of these policies, named or not, and returns the manifests of those that existed.

    With `dry_run` nothing is deleted. The chain stays complete: a policy without a checkpoint is redone from an earlier
    one. Raises CheckpointInUse if something refers to one of them (`reasons_to_keep`); then none is deleted.
    """
    uses = reasons_to_keep(store, policies)
    if uses:
        lines = [f"  {policy.uri.partition('#')[0]}: {'; '.join(sentences)}" for policy, sentences in uses.items()]
        listed = "\n".join(lines)
        raise CheckpointInUse(f"nothing was removed, because these checkpoints are in use:\n{listed}")
    removed = []
    for policy in policies:
        try:
            manifest = read_manifest(store, keys.checkpoint(policy.run, policy.stage, policy.model, policy.step))
        except ObjectNotFound:
            continue  # another process removed it meanwhile
        if not dry_run and not _remove(store, policy, policy.step, manifest):
            raise CheckpointInUse(f"{policy.uri} was not removed: its run was rebased there a moment ago")
        removed.append(manifest)
    return removed


def _remove(store: ObjectStore, policy: PolicyRef, step: int, manifest: Manifest) -> bool:
    """Deletes a checkpoint. Returns False, and restores its manifest, if a rebase on it was committed meanwhile.

    A process that rebases checks for the manifest after its commit. This function checks for the rebase after the
    manifest is deleted. So at least one of the two notices the other.
    """
    # the manifest first, so that no reader follows it to deleted data
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


def _steps_in_use(chain: Chain, steps: list[int]) -> set[int]:
    """Returns the steps of named checkpoints that are in use, or all `steps` if the uses cannot be read."""
    try:
        uses = reasons_to_keep(chain.store, {chain.policy(step) for step in steps})
    except PermanentStorageError as error:
        # damage in another run or model must not end this run
        log.warning("the old named checkpoints of steps %s stay, their uses are unknown: %s", steps, error)
        return set(steps)
    return {policy.step for policy in uses}


def _read_checkpoints(store: ObjectStore, policy: PolicyRef) -> dict[int, Manifest]:
    """Returns the manifests of the chain's checkpoints by step."""
    manifests = {}
    for step in stored_checkpoint_steps(Chain.of(store, policy)):
        try:
            manifests[step] = read_manifest(store, keys.checkpoint(policy.run, policy.stage, policy.model, step))
        except ObjectNotFound:
            continue  # another process pruned it meanwhile
    return manifests


def _is_named(store: ObjectStore, manifest: Manifest) -> bool:
    return manifest.extra.get("name") is not None or store.exists(keys.checkpoint_name(manifest.key))


def _rank_by_metric(
    store: ObjectStore, policy: PolicyRef, steps: list[int], metric: str, best: Literal["min", "max"]
) -> list[int]:
    """Returns the steps whose records have a finite value of the metric, the best first."""
    # read the metrics of the steps; step 0 has no record
    chain = Chain.of(store, policy)
    records = [chain.record(step) for step in steps if step]
    metrics = {record.policy.step: record.metrics for record in records if record is not None}
    known_names: set[str] = set().union(*metrics.values())
    if known_names and metric not in known_names:
        names = ", ".join(sorted(known_names))
        raise ValueError(f"no record of {policy.uri} has the metric {metric!r}; they have {names}")

    # sort by value, then by step
    values = {}
    for step, step_metrics in metrics.items():
        value = step_metrics.get(metric, math.nan)
        if math.isfinite(value):
            values[step] = value
    sign = -1 if best == "max" else 1
    return sorted(values, key=lambda step: (sign * values[step], step))
