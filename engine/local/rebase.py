"""Lets an engine continue a chain under other numerics than the ones it was made under, with a rebase record.

`storage.chain.rebase` defines the records. This module decides when the engine commits one:

- A policy that was restored from its own checkpoint has the committed bytes. Before the first step under other
  numerics, the engine commits an *exact* rebase. Nothing is redone: the chain only records where its numerics change.
- A policy that must be redone may get other bits. The engine then writes its weights as a checkpoint and commits a
  rebase, and the chain continues from that checkpoint. This is possible only at the head of a chain, because later
  policies descend from the committed bits. A past policy whose redo differs is refused, even for reading.
- A redo that a committed digest confirms has the committed bytes, under any numerics. Records of large models hold a
  digest at every tenth step. The steps after the last confirmed one count as changed.
- A redo that differs is an error if the numerics are equal, or if the engine's config does not allow a rebase.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.backends.protocol import TrainerBackend
from engine.errors import ReplayDiverged
from engine.local.loaded_policies import LoadedPolicy
from engine.local.saving import Saver, batch_provenance, checkpoint_key, scratch, scratch_folder
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import (
    Rebase,
    checkpoint_extra,
    commit_rebase,
    difference_texts,
    discard_checkpoint,
    rebase_manifest,
)
from storage.chain.records import Chain, CommitRecord, PolicyRef, RebaseMark
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Attempt, find_artifact, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

RESUME = "Resume under the committed numerics, or from a checkpoint at or after that step"


@dataclass
class RedoStatus:
    """What is known about the weights of a redo that leads to the policy `target`."""

    target: PolicyRef
    unconfirmed: list[int] = field(default_factory=list)
    """Steps redone under other numerics since the last digest that agreed."""
    differs: bool = False
    """Whether the weights differed from a committed digest."""


class Rebaser:
    """Commits rebases for the loaded policies of one engine. The engine calls it from its compute thread."""

    def __init__(self, store: ObjectStore, backend: TrainerBackend, saver: Saver, spec: LocalEngineSpec) -> None:
        self.store, self.backend, self.saver, self.spec = store, backend, saver, spec

    # -- during and after a redo -------------------------------------------------------------------------------

    def compare(self, loaded: LoadedPolicy, record: CommitRecord, status: RedoStatus) -> None:
        """Compares the weights of a step that was redone with its record, and updates `status`.

        Raises ReplayDiverged if they differ and the chain may not continue from them."""
        step, numerics = record.policy.step, self.backend.numerics()

        # Without a digest, assume that equal numerics give equal bits, and other numerics other bits.
        if record.weights_digest is None:
            if status.differs or difference_texts(record.numerics, numerics):
                status.unconfirmed.append(step)
            return

        # An equal digest confirms this step and all steps before it.
        digest, _ = loaded.trainer.weights_digest()
        if digest == record.weights_digest:
            status.unconfirmed.clear()
            return

        # Judge only the first difference: every later digest differs, too.
        status.unconfirmed.append(step)
        if status.differs:
            return
        status.differs = True
        refusal = self._refusal(status.target, changed=difference_texts(record.numerics, numerics, everything=True))
        if refusal is not None:
            raise ReplayDiverged(
                f"redoing step {step} gave weights {digest[:12]}, the chain has {record.weights_digest[:12]}. "
                f"Committed under {record.numerics.model_dump()}, redone under {numerics.model_dump()}. {refusal}"
            )

    def _refusal(self, target: PolicyRef, *, changed: list[str]) -> str | None:
        """The reason why the chain may not be rebased at `target`, and the remedy. None if it may be rebased."""
        if not changed:
            return RESUME
        if self.spec.deterministic:
            return (
                "deterministic=true promises the bytes of a run without faults, so the chain is not rebased on others. "
                f"{RESUME}, or set deterministic=false"
            )
        if self.spec.rebase == "refuse":
            return f"engine.rebase='refuse' goes on from no other weights. {RESUME}, or set engine.rebase='record'"
        if Chain.of(self.store, target).record(target.step + 1) is not None:
            return f"Only the head of a chain can be rebased, and steps after {target.uri} are committed. {RESUME}"
        return None

    def after_redo(self, loaded: LoadedPolicy, status: RedoStatus) -> None:
        """Rebases the chain on the redone weights, unless a digest confirmed them.

        Raises ReplayDiverged if the chain may not be rebased."""
        if not status.unconfirmed:
            return

        # A past policy is only read, so no step will descend from these weights. A warning is enough.
        chain = Chain.of(self.store, loaded.policy)
        record = chain.record(loaded.policy.step)
        assert record is not None  # it was redone
        changed = difference_texts(record.numerics, self.backend.numerics(), everything=status.differs)
        problem = (
            f"{loaded.policy.uri} was redone under other numerics ({'; '.join(changed)}), and no record says whether "
            "its weights are the committed ones"
        )
        if chain.record(loaded.policy.step + 1) is not None:
            log.warning(problem)
            return

        # The head of the chain: later steps descend from these weights, so a rebase must record them.
        refusal = self._refusal(loaded.policy, changed=changed or ["a step before it"])
        if refusal is not None:
            raise ReplayDiverged(f"{problem}. {refusal}")
        attempt = Attempt(self.store)
        checkpoint = self._write_checkpoint(loaded, attempt)
        self._commit(loaded, record, attempt, checkpoint, tuple(status.unconfirmed))

    # -- before a step -----------------------------------------------------------------------------------------

    def before_step(self, loaded: LoadedPolicy) -> None:
        """Commits an exact rebase if the next step is taken under other numerics than the last one.

        Raises ReplayDiverged if the weights are not the committed ones."""
        # Return if the numerics did not change, or if a rebase at this step already records the change.
        committed = loaded.committed_numerics
        if committed is None or not difference_texts(committed, self.backend.numerics()):
            return
        if loaded.rebase is not None and loaded.rebase.step == loaded.policy.step:
            return

        # Use the chain's own checkpoint if it holds these weights, else write one.
        record = Chain.of(self.store, loaded.policy).record(loaded.policy.step)
        assert record is not None  # committed_numerics are those of this record
        previous_rebase, attempt = loaded.rebase, Attempt(self.store)
        checkpoint = self._chain_checkpoint(loaded) or self._write_checkpoint(loaded, attempt)
        if record.weights_digest not in (None, checkpoint.weights_digest):
            raise ReplayDiverged(
                f"a checkpoint of {loaded.policy.uri} holds weights {checkpoint.weights_digest[:12]}, the chain has "
                f"{str(record.weights_digest)[:12]}; 'ostinato verify {loaded.policy.run}' says which checkpoint is "
                "wrong"
            )
        self._commit(loaded, record, attempt, checkpoint, ())

        # Retention may have deleted the chain's checkpoint just before the commit. Then write it again.
        if find_artifact(self.store, checkpoint.ref.key) is None:
            snapshot = self.saver.write_snapshot(
                loaded, scratch_folder(self.store), key=checkpoint.ref.key, rebase=previous_rebase
            )
            self.saver.submit(snapshot, batch_provenance(self.store, loaded.policy)).result()

    # -- the checkpoint and the commit -------------------------------------------------------------------------

    def _chain_checkpoint(self, loaded: LoadedPolicy) -> _Checkpoint | None:
        """The chain's own checkpoint of this policy, if it holds exactly these weights."""
        policy = loaded.policy
        upload = self.saver.pending_upload(policy)
        if upload is not None:
            upload.exception()  # waits for the upload, and ignores its failure: the manifest is then missing
        try:
            manifest = read_manifest(self.store, checkpoint_key(policy))
        except (ObjectNotFound, CorruptArtifact):
            return None

        # A checkpoint of the same step may belong to another rebase, or hold other weights.
        digest, _ = loaded.trainer.weights_digest()
        expected = checkpoint_extra(policy, loaded.rebase, digest)
        if manifest.extra != manifest.extra | expected:
            return None
        return _Checkpoint(manifest.ref, digest)

    def _write_checkpoint(self, loaded: LoadedPolicy, attempt: Attempt) -> _Checkpoint:
        """Writes a checkpoint under a key that only the rebase of this attempt refers to."""
        policy = loaded.policy
        mark = RebaseMark(step=policy.step, attempt=attempt.id)
        key = keys.rebase_checkpoint(policy.run, policy.stage, policy.model, policy.step, attempt.id)
        snapshot = self.saver.write_snapshot(loaded, scratch_folder(self.store), key=key, rebase=mark)
        ref = self.saver.submit(snapshot, batch_provenance(self.store, policy)).result()
        return _Checkpoint(ref, snapshot.weights_digest)

    def _commit(
        self,
        loaded: LoadedPolicy,
        record: CommitRecord,
        attempt: Attempt,
        checkpoint: _Checkpoint,
        redone: tuple[int, ...],
    ) -> None:
        """Commits the rebase. If another engine committed one first, its weights are loaded instead."""
        chain = Chain.of(self.store, loaded.policy)
        rebase = Rebase(
            policy=loaded.policy,
            before=record.numerics,
            after=self.backend.numerics(),
            checkpoint=checkpoint.ref,
            weights_digest=checkpoint.weights_digest,
            committed_digest=record.weights_digest,
            exact=not redone,
            redone=redone,
            attempt=attempt.id,
        )
        committed = commit_rebase(chain, rebase, attempt)
        is_own = committed.attempt == rebase.attempt

        # Report the rebase that was committed.
        outcome = "rebased" if is_own else "rebased by another engine, whose weights are taken"
        log.warning("%s/%s/%s is %s: %s", chain.run, chain.stage, chain.model, outcome, committed.title)
        log_work(
            "rebase",
            policy=loaded.policy.uri,
            step=loaded.policy.step,
            exact=committed.exact,
            attempt=committed.attempt,
        )

        # Take over the other engine's weights.
        if not is_own:
            discard_checkpoint(chain, rebase)
            if committed.checkpoint.sha256 != checkpoint.ref.sha256:
                self._load_checkpoint_of(committed, loaded)
        loaded.rebase = committed.mark

    def _load_checkpoint_of(self, rebase: Rebase, loaded: LoadedPolicy) -> None:
        manifest = rebase_manifest(Chain.of(self.store, loaded.policy), rebase)
        with scratch(self.store) as folder:
            files = materialise_files(self.store, manifest.key, folder)
            loaded.trainer.read_checkpoint(files, optimizer=loaded.training)
        loaded.drop_sampler()  # it may hold other weights of the same state


class _Checkpoint(NamedTuple):
    ref: ArtifactRef
    weights_digest: str
