"""Lets an engine continue a chain under other numerics than the ones it was made under, with a rebase record.

`storage.chain.rebase` defines the records. This module decides when the engine commits one:

- A policy that was restored from its own checkpoint has the committed bytes. Before the first step under other
  numerics, the engine commits an *exact* rebase. Nothing is redone: the chain only records where its numerics change.
- A policy that must be redone may get other bits, under other numerics or on a device that does not repeat its sums.
  engine.local.closeness measures whether rounding explains the difference. At the head of a chain, the engine writes
  the weights as a checkpoint and commits a rebase, and the chain continues from that checkpoint. The rebase says how
  far the weights are from the committed ones, and whether rounding explains it (`Rebase.proven`).
- Later policies descend from the committed bits, so a past policy cannot be rebased. It is read if rounding explains
  the difference, and otherwise refused.
- A redo with equal digests has the committed bytes, under any numerics.
- A redo that differs is an error if a second redo under the committed numerics gives the same bits again, or if the
  engine's config does not allow a rebase.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from engine.backends.protocol import TrainerBackend
from engine.errors import ReplayDiverged
from engine.local.closeness import Judgement, Redo
from engine.local.loaded_policies import LoadedPolicy
from engine.local.saving import Saver, batch_provenance, checkpoint_files, checkpoint_key, scratch, scratch_folder
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import (
    Rebase,
    RedoneStep,
    checkpoint_extra,
    commit_rebase,
    difference_texts,
    discard_checkpoint,
    rebase_manifest,
)
from storage.chain.records import Chain, CommitRecord, RebaseMark
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Attempt, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

RESUME = "Resume under the committed numerics, or from a checkpoint at or after that step"


class Rebaser:
    """Commits rebases for the loaded policies of one engine. The engine calls it from its trainer lane."""

    def __init__(self, store: ObjectStore, backend: TrainerBackend, saver: Saver, spec: LocalEngineSpec) -> None:
        self.store, self.backend, self.saver, self.spec = store, backend, saver, spec

    # -- during and after a redo -------------------------------------------------------------------------------

    def check_may_differ(self, record: CommitRecord, digest: str) -> None:
        """Raises ReplayDiverged if the engine's config demands the committed weights, and the redone step of `record`
        gave weights of another `digest`."""
        if self.spec.deterministic:
            demand = (
                "deterministic=true promises the bytes of a run without faults, so the chain is not rebased on others. "
                f"{RESUME}, or set deterministic=false"
            )
        elif self.spec.rebase == "refuse":
            demand = f"engine.rebase='refuse' goes on from no other weights. {RESUME}, or set engine.rebase='record'"
        else:
            return
        raise ReplayDiverged(f"{self._difference(record, digest)}. {demand}")

    def _difference(self, record: CommitRecord, digest: str) -> str:
        step, committed, numerics = record.policy.step, record.weights_digest, self.backend.numerics()
        return (
            f"redoing step {step} gave weights {digest[:12]}, the chain has {committed[:12]}. "
            f"Committed under {record.numerics.model_dump()}, redone under {numerics.model_dump()}"
        )

    def after_redo(self, loaded: LoadedPolicy, redo: Redo, judgement: Judgement) -> None:
        """Decides what happens after a redo whose weights differ from the committed ones. At the head of a chain, a
        rebase is committed, whether or not rounding explains the difference. A past policy is only read, and only if
        rounding does.

        Raises ReplayDiverged for a past policy otherwise, and if the device repeats."""
        difference = self._difference(redo.differing[0], redo.first_digest)
        if judgement.repeats:
            raise ReplayDiverged(f"{difference}. A second redo gave the same weights again. {RESUME}")
        chain = Chain.of(self.store, loaded.policy)
        record = redo.records[-1]
        if chain.record(loaded.policy.step + 1) is None:
            attempt = Attempt(self.store)
            checkpoint = self._write_checkpoint(loaded, attempt)
            self._commit(loaded, record, attempt, checkpoint, judgement.steps)
        elif judgement.is_close:
            log.warning("%s was redone with rounding differences: %s", loaded.policy.uri, judgement.steps[-1].title)
        else:
            step = next(step for step in judgement.steps if not step.is_close)
            raise ReplayDiverged(
                f"{difference}. Rounding does not explain it: {step.title}. Only the head of a chain can be rebased, "
                f"and steps after {loaded.policy.uri} are committed. {RESUME}"
            )

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
        if record.weights_digest != checkpoint.weights_digest:
            raise ReplayDiverged(
                f"a checkpoint of {loaded.policy.uri} holds weights {checkpoint.weights_digest[:12]}, the chain has "
                f"{record.weights_digest[:12]}; 'ostinato verify {loaded.policy.run}' says which checkpoint is "
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
        redone: tuple[RedoneStep, ...],
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
            files = checkpoint_files(self.store, self.backend.transfers, manifest, folder)
            loaded.trainer.read_checkpoint(files, optimizer=loaded.training)
        loaded.drop_sampler()  # it may hold other weights of the same state


class _Checkpoint(NamedTuple):
    ref: ArtifactRef
    weights_digest: str
