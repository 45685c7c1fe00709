"""Rebases: where a chain goes on from a checkpoint, because from there its steps are taken under other numerics.

A record's weights are those of its batch *under its numerics*. When another backend, layout, device, precision or
library takes a run over, what it redoes may come out with other bits. A rebase says so on the chain: it names the
weights and moments from which everything after it descends, and what they were before. It is `exact` when those are
the committed bytes (nothing was redone: only the numerics change from here).

States do not change: they name requests, not bits. Which weights a state has is told by the records: each one names the
last rebase that its parent's weights descend from, so the commit of step k + 1 decides, in one put, whether a rebase at
k *stands*. One that another engine overtook by a step from the weights before it is void, and nothing descends from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from storage.chain.records import Chain, Numerics, PolicyRef, RebaseMark
from storage.errors import AttemptTooOld, CorruptArtifact, ObjectNotFound, StorageError
from storage.failpoints import failpoint
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Attempt, Manifest, find_artifact, read_manifest
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)

DECIDING = ("backend", "layout", "device", "compute_dtype")
"""Fields of Numerics that always make them others; `versions` does too. Threads and micro-batches are taken over by
whoever redoes a step, so they count only where the weights came out different."""


class Rebase(Frozen):
    """runs/<run>/stages/<stage>/chains/<policy>/rebases/<000040>.json: what follows that step descends from it."""

    schema_version: int = 1
    policy: PolicyRef
    before: Numerics
    """Of the record that made the policy."""
    after: Numerics
    """Under which the chain goes on. The records after it say what each was really taken under."""
    checkpoint: ArtifactRef
    """Weights and moments."""
    weights_digest: str
    """Of the checkpoint's weights."""
    committed_digest: str | None
    """Of the weights that the record was committed with; None where it keeps no digest."""
    exact: bool
    """Whether the checkpoint's weights are the committed ones, to the byte."""
    redone: tuple[int, ...] = ()
    """Steps redone under `after` to reach the policy; none of an exact rebase."""
    attempt: str = Field(pattern=r"^[0-9a-f]{32}$")
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat())

    @property
    def mark(self) -> RebaseMark:
        return RebaseMark(step=self.policy.step, attempt=self.attempt)

    @property
    def title(self) -> str:
        """In one line."""
        change = "; ".join(changes(self.before, self.after)) or "the same numerics"
        if self.exact:
            return f"step {self.policy.step}: exact, {change}"
        was = self.committed_digest[:12] if self.committed_digest else "not recorded"
        again = f"steps {self.redone[0]} to {self.redone[-1]} redone, " if self.redone else ""
        return f"step {self.policy.step}: {again}weights {self.weights_digest[:12]} (committed: {was}), {change}"


def differences(before: Numerics, after: Numerics, *, everything: bool = False) -> list[tuple[str, str, str]]:
    """(name, was, is) of what differs between two numerics. `everything`: threads and tokens per forward too."""
    names = (*DECIDING, "threads", "max_tokens") if everything else DECIDING
    pairs = [
        (name.replace("_", " "), str(getattr(before, name) or "none"), str(getattr(after, name) or "none"))
        for name in names
    ] + [
        (package, before.versions.get(package, "none"), after.versions.get(package, "none"))
        for package in sorted(before.versions.keys() | after.versions.keys())
    ]
    return [(name, was, now) for name, was, now in pairs if was != now]


def changes(before: Numerics, after: Numerics, *, everything: bool = False) -> list[str]:
    """The same, each as `name: was -> is`."""
    return [f"{name}: {was} -> {now}" for name, was, now in differences(before, after, everything=everything)]


def rebase_at(chain: Chain, step: int) -> Rebase | None:
    """The rebase committed at that step, whether or not it stands. Raises CorruptArtifact."""
    key = keys.rebase(chain.run, chain.stage, chain.model, step)
    try:
        return read_rebase(chain.store, key)
    except ObjectNotFound:
        return None


def read_rebase(store: ObjectStore, key: str) -> Rebase:
    """The rebase at that key. Raises ObjectNotFound, CorruptArtifact."""
    return _parse(store.get(key), key)


def rebases(chain: Chain, until: int | None = None) -> Iterator[Rebase]:
    """Those committed at steps up to `until` (None: all), ascending, whether or not they stand."""
    listed = chain.store.list(keys.rebases_prefix(chain.run, chain.stage, chain.model))
    steps = (keys.rebase_step(info.key) for info in listed)
    for step in sorted(step for step in steps if step is not None and (until is None or step <= until)):
        if (found := rebase_at(chain, step)) is not None:
            yield found


def is_in_effect(chain: Chain, rebase: Rebase) -> bool:
    """Whether what comes after its step descends from it, or nothing comes after it yet."""
    following = chain.record(rebase.policy.step + 1)
    return following is None or following.rebase == rebase.mark


def rebases_in_effect(chain: Chain, until: int | None = None) -> list[Rebase]:
    """The rebases that stand at steps up to `until`, ascending."""
    return [rebase for rebase in rebases(chain, until) if is_in_effect(chain, rebase)]


def rebase_in_effect(chain: Chain, step: int) -> Rebase | None:
    """The rebase that the weights of policy `step` descend from: at that step or the last one before it. None when they
    descend from the chain's root. Raises CorruptArtifact when a record names one that is not there."""
    here = rebase_at(chain, step)
    if here is not None and is_in_effect(chain, here):
        return here
    record = chain.record(step) if step else None
    mark = record.rebase if record else None
    if mark is None:
        return None
    found = rebase_at(chain, mark.step)
    if found is None or found.mark != mark:
        raise CorruptArtifact(
            f"step {step} of {chain.run}/{chain.stage}/{chain.model} descends from the rebase at step {mark.step}, "
            f"which is {'gone' if found is None else 'another one'}; restore "
            f"{keys.rebase(chain.run, chain.stage, chain.model, mark.step)} from a backup, or fork the run before it"
        )
    return found


def commit_rebase(chain: Chain, rebase: Rebase, attempt: Attempt) -> Rebase:
    """Commits `rebase`, whose checkpoint is committed already; returns the one that stands at that step: another's, if
    that came first, and then weights come from its checkpoint. `attempt` began before the checkpoint was written.

    Raises AttemptTooOld, and then nothing was committed.
    """
    key = keys.rebase(chain.run, chain.stage, chain.model, rebase.policy.step)
    if attempt.too_old:
        raise AttemptTooOld(_too_old(key, attempt))
    failpoint("rebase.before_commit")
    put = chain.store.put_if_absent(key, canonical_json(rebase))
    failpoint("rebase.after_commit")
    if not put.won:
        return _parse(put.data, key)
    if attempt.too_old and find_artifact(chain.store, rebase.checkpoint.key) != rebase.checkpoint:
        chain.store.delete(key)  # frozen right before its commit, it woke up after its checkpoint was collected
        raise AttemptTooOld(_too_old(key, attempt))
    return rebase


def _too_old(key: str, attempt: Attempt) -> str:
    return (
        f"the attempt to make {key} began {attempt.age_seconds() / 3600:.1f} h ago: its checkpoint may be collected as "
        "garbage; call again"
    )


def discard_checkpoint(chain: Chain, rebase: Rebase) -> None:
    """Removes what only `rebase`, which lost, would have gone on from. What stays is left for garbage collection."""
    if keys.rebase_of_checkpoint(rebase.checkpoint.key) is None:
        return  # a checkpoint of the chain
    with suppress(StorageError):
        manifest = read_manifest(chain.store, rebase.checkpoint.key)
        chain.store.delete(keys.manifest_of_files(manifest.key))
        for entry in manifest.files:
            chain.store.delete(entry.key)


def checkpoint_extra(policy: PolicyRef, rebase: RebaseMark | None, weights_digest: str) -> dict[str, str | None]:
    """What a checkpoint's manifest says about the weights in it; `checkpoints_before` reads it."""
    return {
        "state": policy.state,
        "weights_digest": weights_digest,
        "rebase": rebase.attempt if rebase else None,
    }


def checkpoints_before(chain: Chain, step: int) -> Iterator[Manifest]:
    """The complete checkpoints from which policy `step` can be reached, the nearest first: none across a rebase that
    stands, and none of weights that the chain does not go on from. The last one of a rebased policy is the rebase's.

    Raises CorruptArtifact when all that a rebased policy could be reached from is gone.
    """
    base = rebase_in_effect(chain, step)
    attempt, floor = (base.attempt, base.policy.step) if base else (None, -1)
    prefix = keys.checkpoints_prefix(chain.run, chain.stage, chain.model)
    listed = (keys.checkpoint_step(info.key) for info in chain.store.list(prefix))
    for found in sorted({n for n in listed if n is not None and floor < n <= step}, reverse=True):
        key = keys.checkpoint(chain.run, chain.stage, chain.model, found)
        try:
            manifest = read_manifest(chain.store, key)
        except (ObjectNotFound, CorruptArtifact) as error:  # pruned since it was listed, or damaged
            log.warning("the checkpoint %s is passed over, the redo will be longer: %s", key, error)
            continue
        state = chain.policy(found).state
        if manifest.extra.get("state") == state and manifest.extra.get("rebase") == attempt:
            yield manifest
    if base is not None:
        yield rebase_manifest(chain, base)


def step_of_checkpoint(checkpoint: Manifest) -> int:
    """The step whose policy a checkpoint holds, the chain's or a rebase's."""
    rebased = keys.rebase_of_checkpoint(checkpoint.key)
    step = rebased[3] if rebased else keys.checkpoint_step(keys.manifest_of_files(checkpoint.key))
    assert step is not None  # the manifest was found by such a key
    return step


def is_checkpoint_of(chain: Chain, checkpoint: Manifest) -> bool:
    """Whether the chain's own checkpoint holds what it says: the policy of that step, and not weights of it that the
    chain left for a rebase at or before it."""
    step = step_of_checkpoint(checkpoint)
    if checkpoint.extra.get("state") != chain.policy(step).state:
        return False
    base = rebase_in_effect(chain, step)
    if base is not None and base.policy.step == step and base.exact:
        record = chain.record(step)  # the committed weights, which descend from what the record says
        return checkpoint.extra.get("rebase") == (record.rebase.attempt if record and record.rebase else None)
    return checkpoint.extra.get("rebase") == (base.attempt if base else None)


def rebase_manifest(chain: Chain, rebase: Rebase) -> Manifest:
    """The manifest of the rebase's checkpoint. Raises CorruptArtifact when it is gone or another one: nothing after
    the rebase can be reached without it, but from later checkpoints."""
    problem: str
    try:
        manifest = read_manifest(chain.store, rebase.checkpoint.key)
        if manifest.sha256 == rebase.checkpoint.sha256:
            return manifest
        problem = f"is {manifest.sha256[:12]}, not {rebase.checkpoint.sha256[:12]}"
    except ObjectNotFound:
        problem = "is gone"
    raise CorruptArtifact(
        f"{rebase.checkpoint.key} {problem}, and the chain goes on from it after step {rebase.policy.step}; restore it "
        "from a backup, or fork the run before that step"
    )


def _parse(data: bytes, key: str) -> Rebase:
    try:
        return Rebase.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable rebase: {error}") from error
