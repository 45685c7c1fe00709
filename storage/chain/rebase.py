"""Rebases of a chain. A rebase is a record that the chain continues from a checkpoint, because its next steps are taken
under other numerics, or because its last steps could only be redone with other bits. It is not related to git's rebase.

The weights of a record depend on the numerics under which its step was taken. A redo of its steps may give other bits
if another backend, layout, device, precision or library continues a run, or if the device does not repeat its sums. A
rebase records this on the chain. It names the checkpoint (weights and moments) for all later steps, and holds the
digest of the weights that were committed before, and how far the redone updates are from the committed ones
(engine.local.closeness). A rebase is `exact` if the checkpoint has the committed bytes: then nothing was redone, and
only the numerics change.

A rebase changes no state, because a state is computed from requests and does not depend on the bytes of weights. Each
record names the last rebase that its parent's weights descend from. So the commit of step k + 1 decides whether a
rebase at step k is in effect. If another engine commits step k + 1 from the weights before the rebase, the rebase is
void, and nothing descends from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import Chain, Numerics, PolicyRef, RebaseMark
from storage.errors import AttemptTooOld, CorruptArtifact, ObjectNotFound, StorageError
from storage.failpoints import failpoint
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Attempt, Manifest, find_artifact, read_manifest
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)

DECISIVE_FIELDS = ("backend", "layout", "device", "compute_dtype")
"""Fields of Numerics. A change of these fields, or of `versions`, needs a rebase. A redo uses the recorded threads and
micro-batches, so they only matter when the weights of a redo differ."""


class RedoneStep(Frozen):
    """How far a redone step's update is from the committed one. All lengths are estimates by sketches."""

    step: int
    distance: float | None
    """Length of the difference, relative to the length of the committed update. None if it is unknown."""
    bound: float
    """Largest relative distance that rounding explains. It was measured on this step."""
    tensor: str | None = None
    """A tensor that differs by more than rounding explains. None if there is none."""

    @property
    def is_close(self) -> bool:
        """Whether rounding explains the difference."""
        return self.distance is not None and self.distance <= self.bound and self.tensor is None

    @property
    def title(self) -> str:
        """A description in one line."""
        distance = "an unknown share" if self.distance is None else f"{self.distance:.2g}"
        tensor = f", {self.tensor} by more" if self.tensor else ""
        return f"step {self.step} differs by {distance} of its update{tensor}, rounding explains {self.bound:.2g}"


class Rebase(Frozen):
    """The record runs/<run>/stages/<stage>/chains/<model>/rebases/<000040>.json. If it is in effect, all later steps
    descend from it."""

    schema_version: int = 1
    policy: PolicyRef
    before: Numerics
    """Numerics of the record that made the policy."""
    after: Numerics
    """Numerics under which the chain continues. Each later record holds the numerics of its own step."""
    checkpoint: ArtifactRef
    """Weights and moments from which the chain continues."""
    weights_digest: str
    """Digest of the checkpoint's weights."""
    committed_digest: str
    """Digest of the weights in the record of the policy."""
    exact: bool
    """Whether the checkpoint's weights are byte-equal to the committed ones."""
    redone: tuple[RedoneStep, ...] = ()
    """The redone steps whose weights are not the committed ones. Empty for an exact rebase."""
    attempt: str = Field(pattern=r"^[0-9a-f]{32}$")
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat())

    @property
    def mark(self) -> RebaseMark:
        return RebaseMark(step=self.policy.step, attempt=self.attempt)

    @property
    def proven(self) -> bool:
        """Whether the checkpoint has the committed weights, up to rounding."""
        return all(step.is_close for step in self.redone)

    @property
    def title(self) -> str:
        """A description in one line."""
        change = "; ".join(difference_texts(self.before, self.after)) or "the same numerics"
        if self.exact:
            return f"step {self.policy.step}: exact, {change}"
        steps = f"steps {self.redone[0].step} to {self.redone[-1].step} redone"
        weights = f"weights {self.weights_digest[:12]} (committed: {self.committed_digest[:12]})"
        # Name the first step that rounding does not explain, else the last one.
        shown = next((step for step in self.redone if not step.is_close), self.redone[-1])
        verdict = "rounding alone" if self.proven else "UNPROVEN"
        return f"step {self.policy.step}: {steps}, {weights}, {verdict}: {shown.title}; {change}"


def differences(before: Numerics, after: Numerics, *, everything: bool = False) -> list[tuple[str, str, str]]:
    """Returns (name, old value, new value) of the fields and package versions that differ. With `everything`, threads
    and tokens per forward pass are compared, too."""
    names = (*DECISIVE_FIELDS, "threads", "max_tokens") if everything else DECISIVE_FIELDS
    fields = []
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        fields.append((name.replace("_", " "), str(old or "none"), str(new or "none")))
    for package in sorted(before.versions.keys() | after.versions.keys()):
        fields.append((package, before.versions.get(package, "none"), after.versions.get(package, "none")))
    return [(name, old, new) for name, old, new in fields if old != new]


def difference_texts(before: Numerics, after: Numerics, *, everything: bool = False) -> list[str]:
    """Returns the `differences` as texts: `name: old -> new`."""
    return [f"{name}: {old} -> {new}" for name, old, new in differences(before, after, everything=everything)]


def rebase_at(chain: Chain, step: int) -> Rebase | None:
    """Returns the rebase committed at that step, in effect or void, or None. Raises CorruptArtifact."""
    key = keys.rebase(chain.run, chain.stage, chain.model, step)
    try:
        return read_rebase(chain.store, key)
    except ObjectNotFound:
        return None


def read_rebase(store: ObjectStore, key: str) -> Rebase:
    """Reads the rebase at that key. Raises ObjectNotFound, CorruptArtifact."""
    return _parse(store.get(key), key)


def list_rebases(chain: Chain, until: int | None = None) -> Iterator[Rebase]:
    """Yields the rebases at steps up to `until` (None: all), ascending, in effect or void."""
    listed = chain.store.list(keys.rebases_prefix(chain.run, chain.stage, chain.model))
    steps = (keys.rebase_step(info.key) for info in listed)
    for step in sorted(step for step in steps if step is not None):
        if until is not None and step > until:
            return
        rebase = rebase_at(chain, step)
        if rebase is not None:
            yield rebase


def is_in_effect(chain: Chain, rebase: Rebase) -> bool:
    """Whether the next step descends from the rebase, or is not committed yet."""
    following = chain.record(rebase.policy.step + 1)
    return following is None or following.rebase == rebase.mark


def rebases_in_effect(chain: Chain, until: int | None = None) -> list[Rebase]:
    """Returns the rebases in effect at steps up to `until`, ascending."""
    return [rebase for rebase in list_rebases(chain, until) if is_in_effect(chain, rebase)]


def rebase_in_effect(chain: Chain, step: int) -> Rebase | None:
    """Returns the rebase that the weights of policy `step` descend from: the last one in effect at or before that step.
    None if they descend from the chain's root.

    Raises CorruptArtifact if a record names a rebase that is missing.
    """
    rebase = rebase_at(chain, step)
    if rebase is not None and is_in_effect(chain, rebase):
        return rebase
    # otherwise the record of the step names the rebase
    mark = _mark_in_record(chain, step)
    if mark is None:
        return None
    rebase = rebase_at(chain, mark.step)
    if rebase is None or rebase.mark != mark:
        problem = "gone" if rebase is None else "another one"
        raise CorruptArtifact(
            f"step {step} of {chain.run}/{chain.stage}/{chain.model} descends from the rebase at step {mark.step}, "
            f"which is {problem}; restore "
            f"{keys.rebase(chain.run, chain.stage, chain.model, mark.step)} from a backup, or fork the run before it"
        )
    return rebase


def commit_rebase(chain: Chain, rebase: Rebase, attempt: Attempt) -> Rebase:
    """Commits `rebase` if its step has none, and returns the committed one. If the returned rebase is another engine's,
    continue from its checkpoint.

    The checkpoint must be committed before. `attempt` must have begun before the checkpoint was written. Raises
    AttemptTooOld, and then no rebase stays committed.
    """
    key = keys.rebase(chain.run, chain.stage, chain.model, rebase.policy.step)
    if attempt.too_old:
        raise AttemptTooOld(_too_old_message(key, attempt))
    failpoint("rebase.before_commit")
    put = chain.store.put_if_absent(key, canonical_json(rebase))
    failpoint("rebase.after_commit")
    if not put.won:
        return _parse(put.data, key)
    if attempt.too_old and find_artifact(chain.store, rebase.checkpoint.key) != rebase.checkpoint:
        # the process was suspended right before the commit, and its checkpoint was collected meanwhile
        chain.store.delete(key)
        raise AttemptTooOld(_too_old_message(key, attempt))
    return rebase


def _too_old_message(key: str, attempt: Attempt) -> str:
    return (
        f"the attempt to make {key} began {attempt.age_seconds() / 3600:.1f} h ago: its checkpoint may be collected as "
        "garbage; call again"
    )


def discard_checkpoint(chain: Chain, rebase: Rebase) -> None:
    """Deletes the checkpoint of a `rebase` that was not committed, unless it is one of the chain's own checkpoints.

    If that fails, the rest is left for garbage collection.
    """
    if keys.rebase_of_checkpoint(rebase.checkpoint.key) is None:
        return
    with suppress(StorageError):
        # the manifest first, so that no reader follows it to deleted data
        manifest = read_manifest(chain.store, rebase.checkpoint.key)
        chain.store.delete(keys.manifest_of_files(manifest.key))
        for entry in manifest.files:
            chain.store.delete(entry.key)


def checkpoint_extra(policy: PolicyRef, rebase: RebaseMark | None, weights_digest: str) -> dict[str, str | None]:
    """Returns the fields about the weights in a checkpoint's manifest, which `checkpoints_up_to` reads."""
    return {
        "state": policy.state,
        "weights_digest": weights_digest,
        "rebase": _attempt_of(rebase),
    }


def checkpoints_up_to(chain: Chain, step: int) -> Iterator[Manifest]:
    """Yields the complete checkpoints at or before `step` from which policy `step` can be redone, the nearest first.

    Checkpoints before the last rebase in effect, and checkpoints with replaced weights, are left out. For a rebased
    policy, the last one is the checkpoint of the rebase. Raises CorruptArtifact if that one is gone.
    """
    last_rebase = rebase_in_effect(chain, step)
    rebase_step = last_rebase.policy.step if last_rebase else -1
    # the chain's own checkpoints after the last rebase
    for checkpoint_step in reversed(stored_checkpoint_steps(chain)):
        if not rebase_step < checkpoint_step <= step:
            continue
        key = keys.checkpoint(chain.run, chain.stage, chain.model, checkpoint_step)
        try:
            manifest = read_manifest(chain.store, key)
        except (ObjectNotFound, CorruptArtifact) as error:  # pruned after it was listed, or damaged
            log.warning("the checkpoint %s is skipped, the redo will be longer: %s", key, error)
            continue
        state = chain.policy(checkpoint_step).state
        if manifest.extra.get("state") == state and manifest.extra.get("rebase") == _attempt_of(last_rebase):
            yield manifest
    # then the checkpoint of the rebase
    if last_rebase is not None:
        yield rebase_manifest(chain, last_rebase)


def step_of_checkpoint(checkpoint: Manifest) -> int:
    """Returns the step of the policy in a checkpoint of a chain or of a rebase."""
    rebase_parts = keys.rebase_of_checkpoint(checkpoint.key)
    if rebase_parts is not None:
        _run, _stage, _model, rebase_step, _attempt = rebase_parts
        return rebase_step
    step = keys.checkpoint_step(keys.manifest_of_files(checkpoint.key))
    assert step is not None  # every checkpoint has a key of one of these forms
    return step


def has_current_weights(chain: Chain, checkpoint: Manifest) -> bool:
    """Whether this checkpoint of the chain has the weights that the chain uses now, and not weights that a rebase at or
    before its step replaced."""
    step = step_of_checkpoint(checkpoint)
    if checkpoint.extra.get("state") != chain.policy(step).state:
        return False
    last_rebase = rebase_in_effect(chain, step)
    if last_rebase is not None and last_rebase.policy.step == step and last_rebase.exact:
        # an exact rebase keeps the committed weights, which descend from the rebase that the record names
        return checkpoint.extra.get("rebase") == _attempt_of(_mark_in_record(chain, step))
    return checkpoint.extra.get("rebase") == _attempt_of(last_rebase)


def rebase_manifest(chain: Chain, rebase: Rebase) -> Manifest:
    """Reads the manifest of the rebase's checkpoint.

    Raises CorruptArtifact if it is gone or is another artifact: then later policies can be redone only from later
    checkpoints.
    """
    problem: str
    try:
        manifest = read_manifest(chain.store, rebase.checkpoint.key)
        if manifest.sha256 == rebase.checkpoint.sha256:
            return manifest
        problem = f"is {manifest.sha256[:12]}, not {rebase.checkpoint.sha256[:12]}"
    except ObjectNotFound:
        problem = "is gone"
    raise CorruptArtifact(
        f"{rebase.checkpoint.key} {problem}, and the chain continues from it after step {rebase.policy.step}; "
        "restore it from a backup, or fork the run before that step"
    )


def _mark_in_record(chain: Chain, step: int) -> RebaseMark | None:
    """Returns the rebase that the record of a step names. None for step 0, which has no record."""
    if step == 0:
        return None
    record = chain.record(step)
    return record.rebase if record else None


def _attempt_of(rebase: Rebase | RebaseMark | None) -> str | None:
    return rebase.attempt if rebase else None


def _parse(data: bytes, key: str) -> Rebase:
    try:
        return Rebase.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable rebase: {error}") from error
