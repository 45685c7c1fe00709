"""Deletes checkpoints. They are caches: the chain rebuilds any policy without them, only more slowly.

Batches and records stay, so a deleted checkpoint only costs time. The checkpoint of a rebase in effect is an exception:
the chain cannot rebuild it, and it is never deleted.

A finished chain needs one checkpoint with the optimizer's moments, the last, from which a fork continues at once, or
none, if its steps are quickly redone (`drop_final_checkpoint`). `verify` needs none: it begins at the root. The names
of deleted checkpoints of shares of the run stay, so that a later stage can still start there.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple, Self

from storage.chain.checkpoint_names import is_share_name, name_step, share_name, stored_names
from storage.chain.fork import read_fork
from storage.chain.leases import is_held
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.rebase import is_in_effect, rebase_at, rebases_in_effect
from storage.chain.records import Chain, PolicyRef
from storage.chain.run_record import find_run
from storage.errors import CheckpointInUse, ObjectNotFound, PermanentStorageError
from storage.failpoints import failpoint
from storage.registry.decisions import champion_of
from storage.serialization import Frozen, canonical_json
from storage.store import key_patterns, keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.index import check_index, users_of
from storage.store.objects import ObjectStore


def reasons_to_keep(store: ObjectStore, policies: Collection[PolicyRef]) -> dict[PolicyRef, list[str]]:
    """Returns sentences that say what refers to the checkpoint of each policy. Policies without references are left
    out.

    It reads what uses the runs of the policies, which the index of the store names, and no other run. Raises
    CorruptArtifact, IndexIncomplete.
    """
    uses: dict[PolicyRef, list[str]] = {}
    if not policies:
        return uses
    check_index(store)
    all_uses = list(_rebase_uses(store, policies))
    for run in sorted({policy.run for policy in policies}):
        for user in users_of(store, keys.run_prefix(run)):
            all_uses += _uses_of_object(store, user, policies)
    for policy, use in all_uses:
        if policy in policies:
            uses.setdefault(policy, []).append(use)
    return uses


def _rebase_uses(store: ObjectStore, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    chains = {(policy.run, policy.stage, policy.model): Chain.of(store, policy) for policy in policies}
    for chain in chains.values():
        for rebase in rebases_in_effect(chain):
            yield rebase.policy, f"run {chain.run!r} was rebased there and continues from it"


def _uses_of_object(store: ObjectStore, user: str, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    """Yields the policies that one object of the index uses: those at which a run was forked, at which a stage of a run
    in progress began, and from which a champion was made. An object that does not exist uses nothing."""
    run, chain_name, model = keys.run_of(user), keys.chain_of(user), key_patterns.artifact_of_manifest(user)
    if chain_name is not None:
        root = Chain(store, *chain_name).root()
        run, stage, _ = chain_name
        if root is not None and root.start is not None and _is_in_progress(store, run):
            yield root.start, f"stage {stage} of run {run!r} began there, and the run is not finished"
    elif run is not None:
        fork = read_fork(store, run)
        for policy in fork.shared if fork else ():
            yield policy, f"run {run!r} was forked there"
    elif model is not None:
        _, name, version = model.split("/", 2)
        champion = champion_of(store, name)
        if champion is not None and champion.version == version:
            parents = set(read_manifest(store, model).parents)
            for policy in policies:
                # the parents in a model's manifest are URIs
                if policy.uri in parents:
                    yield policy, f"{name}@{version}, the champion of {name}, was made from it"


def _is_in_progress(store: ObjectStore, run: str) -> bool:
    """Whether the run's lease is held and it has no result. A killed process keeps its lease, so its run counts."""
    return is_held(store, run) and not store.exists(keys.result_json(run))


log = logging.getLogger(__name__)


class Retention(Frozen):
    """Rules for the checkpoints to keep. A checkpoint stays if any rule asks for it."""

    keep_last: int = 2
    """Keep this many of the latest unnamed checkpoints."""
    keep_named: int | None = None
    """Keep this many of the latest named checkpoints; None keeps all. An older one stays if something refers to it
    (`reasons_to_keep`), or if keep_every or keep_best keeps it."""
    keep_every: int | None = None
    """Keep the checkpoints whose step is a multiple of this."""
    keep_best: int | None = None
    """Keep this many checkpoints with the best `metric` in the record of their step. Of equal values, the earlier is
    better. A record without the metric, or with a value that is not finite, does not count."""
    metric: str | None = None
    """Metric of keep_best."""
    best: Literal["min", "max"] = "max"
    """Whether the largest or the smallest values of the metric are best."""
    finished: bool = False
    """The chain has taken its last step. Keep its last checkpoint instead of `keep_last`, and delete those of shares of
    the run as well, unless keep_named is given or something refers to them. Their names stay."""

    keep_final: bool = True
    """Of a finished chain: keep its last checkpoint."""

    def of_finished(self) -> Self:
        """Returns the rules for the same chain after its last step."""
        return self.model_copy(update={"finished": True})


KEEP_LAST_TWO = Retention()


class Removal(NamedTuple):
    """A checkpoint that no rule keeps."""

    step: int
    manifest: Manifest
    kept_name: str | None = None
    """The name that the step keeps without its checkpoint."""


def prune_checkpoints(store: ObjectStore, policy: PolicyRef, rules: Retention) -> list[int]:
    """Deletes the checkpoints of a chain that no rule keeps, and returns their steps.

    The checkpoint of a rebase in effect always stays. If another run or model of the store is damaged, so that the uses
    of named checkpoints are unknown, all named checkpoints stay, with a warning. Raises ValueError when no record has
    the metric of the rules. The message lists the metrics of the records.
    """
    return [removal.step for removal in plan_pruning(store, policy, rules) if remove(store, policy, removal)]


def drop_final_checkpoint(store: ObjectStore, policy: PolicyRef, rules: Retention) -> bool:
    """Deletes the last checkpoint of a finished chain, unless a rule or a reference keeps it. Returns whether it did.

    The chain redoes its steps where its last policy is needed again."""
    last = max(_read_checkpoints(store, policy), default=None)
    plan = plan_pruning(store, policy, rules.of_finished().model_copy(update={"keep_final": False}))
    return any(remove(store, policy, removal) for removal in plan if removal.step == last)


def plan_pruning(store: ObjectStore, policy: PolicyRef, rules: Retention) -> list[Removal]:
    """Returns the checkpoints of a chain that `rules` do not keep, ascending. See prune_checkpoints."""
    chain = Chain.of(store, policy)
    # sort the checkpoints that may be deleted: unnamed ones, named ones, and named ones of shares of the run
    rebase_checkpoints = {rebase.checkpoint.key for rebase in rebases_in_effect(chain)}
    manifests = _read_checkpoints(store, policy)
    named: list[int] = []
    unnamed: list[int] = []
    share_names: dict[int, str] = {}
    final = list(manifests)[-1:] if rules.finished and not rules.keep_final else []
    for step, manifest in manifests.items():
        if manifest.key in rebase_checkpoints:
            continue
        names = stored_names(store, manifest.key, manifest)
        if not names:
            unnamed.append(step)
        elif rules.finished and rules.keep_named is None and len(names) == 1 and (
            is_share_name(names[0], policy.model) or (step in final and names[0] == share_name(policy.model, 1))
        ):
            share_names[step] = names[0]
        else:
            named.append(step)
    old_named = [] if rules.keep_named is None else named[: max(0, len(named) - rules.keep_named)]

    # apply the rules
    steps = sorted([*unnamed, *old_named, *share_names])
    if rules.finished:
        steps_to_keep = set(list(manifests)[-1:]) - set(final)
    else:
        steps_to_keep = set(unnamed[-rules.keep_last :]) if rules.keep_last else set()
    if rules.keep_every is not None:
        steps_to_keep |= {step for step in steps if step % rules.keep_every == 0}
    if rules.keep_best is not None:
        if rules.metric is None:
            raise ValueError(
                f"keep_best={rules.keep_best} was given without a metric; name one of the records' metrics"
            )
        ranked_steps = _rank_by_metric(store, policy, steps, rules.metric, rules.best)
        steps_to_keep |= set(ranked_steps[: rules.keep_best])
    in_question = {*old_named, *share_names, *final} & set(steps)
    steps_to_keep |= _steps_in_use(chain, sorted(in_question - steps_to_keep))
    return [Removal(step, manifests[step], share_names.get(step)) for step in steps if step not in steps_to_keep]


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
            # only its name is stored, or another process removed it meanwhile
            if not dry_run:
                key = keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)
                store.delete(keys.checkpoint_name(key))
            continue
        if not dry_run and not remove(store, policy, Removal(policy.step, manifest)):
            raise CheckpointInUse(f"{policy.uri} was not removed: its run was rebased there a moment ago")
        removed.append(manifest)
    return removed


def remove(store: ObjectStore, policy: PolicyRef, removal: Removal) -> bool:
    """Deletes a checkpoint of the policy's chain. Returns False, and restores its manifest, if a rebase on it was
    committed meanwhile.

    A process that rebases checks for the manifest after its commit. This function checks for the rebase after the
    manifest is deleted. So at least one of the two notices the other.
    """
    step, manifest, kept_name = removal
    if kept_name is not None:
        # before the manifest, which may be the only object with the name
        name_step(store, policy.model_copy(update={"step": step}), kept_name)
        failpoint("retention.named")
    # the manifest before the data, so that no reader follows it to deleted data
    key = keys.manifest_of_files(manifest.key)
    store.delete(key)
    failpoint("retention.unlisted")
    chain = Chain.of(store, policy)
    rebase = rebase_at(chain, step)
    if rebase is not None and rebase.checkpoint.key == manifest.key and is_in_effect(chain, rebase):
        store.put_if_absent(key, canonical_json(manifest.model_dump(mode="json")))
        return False
    if kept_name is None:
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


class Surplus(NamedTuple):
    """A checkpoint that a finished run does not need."""

    policy: PolicyRef
    """A policy of the checkpoint's chain."""
    removal: Removal


def surplus_checkpoints(store: ObjectStore, listed_keys: Iterable[str]) -> dict[str, Surplus]:
    """Returns the checkpoints that the finished runs of the store do not need, by their logical keys.

    Args:
        listed_keys: The keys of all objects. A run is finished if it has a result.

    The rules are those of the run's config (`checkpoints.keep_*`). Of a run without a config, such as a recipe, only
    checkpoints of shares of the run are returned. What cannot be read is kept, with a warning.
    """
    # the chains of finished runs with more than one checkpoint: the last one always stays
    finished_runs: set[str] = set()
    checkpoints: Counter[tuple[str, str, str]] = Counter()
    for key in listed_keys:
        run = keys.run_of(key)
        if run is not None and key == keys.result_json(run):
            finished_runs.add(run)
        elif keys.checkpoint_step(key) is not None:
            checkpoints[keys.checkpoint_chain(key.rpartition("/")[0])] += 1

    surplus = {}
    for name, count in sorted(checkpoints.items()):
        chain = Chain(store, *name)
        if count < 2 or chain.run not in finished_runs:
            continue
        try:
            policy = chain.policy(0)
            removals = _removals(store, policy)
        except (PermanentStorageError, ValueError) as error:
            log.warning("the checkpoints of %s/%s/%s stay: %s", *name, error)
            continue
        for removal in removals:
            surplus[removal.manifest.key] = Surplus(policy, removal)
    return surplus


def _removals(store: ObjectStore, policy: PolicyRef) -> list[Removal]:
    info = find_run(store, policy.run)
    recorded = info.other.get("checkpoints") if info else None
    if not isinstance(recorded, dict):
        removals = plan_pruning(store, policy, Retention().of_finished())
        return [removal for removal in removals if removal.kept_name is not None]
    rules = Retention.model_validate({name: recorded[name] for name in Retention.model_fields if name in recorded})
    return plan_pruning(store, policy, rules.of_finished())
