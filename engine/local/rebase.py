"""When an engine takes a chain over under other numerics than the ones it was made under: storage.chain.rebase,
applied.

- A policy restored from its own checkpoint has the committed bytes. The first step from it under other numerics commits
  an *exact* rebase before it: nothing is redone, the chain says where its numerics change.
- A policy that must be redone may come out with other bits. Then the engine writes what it reached as a checkpoint,
  commits a rebase, and the chain goes on from there: at its head only, since what is committed after a policy descends
  from the bits it was committed with. A past policy whose redo differs is refused, for reading too.
- A redo that a committed digest confirms has the committed bytes, whatever the numerics. Where records keep no digest
  (large models: every tenth does), the steps after the last confirmed one count as changed.
- Under equal numerics a redo that differs is an error, as it is where the engine may not rebase.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.backends.protocol import TrainerBackend
from engine.errors import ReplayDiverged
from engine.local.loaded_policies import LoadedPolicy
from engine.local.saving import Saver, batch_provenance, checkpoint_key
from engine.local.scratch import scratch, scratch_folder
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import Rebase, changes, checkpoint_extra, commit_rebase, discard_checkpoint, rebase_manifest
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
class Redone:
    """What a redo on the way to `target` came to, as far as the committed digests tell."""

    target: PolicyRef
    unsure: list[int] = field(default_factory=list)
    """Steps redone under other numerics since the last digest that agreed."""
    differs: bool = False
    """Whether some digest did not agree."""


class Rebaser:
    """Rebases the slots of one engine. Called from its one compute thread."""

    def __init__(self, store: ObjectStore, backend: TrainerBackend, saver: Saver, spec: LocalEngineSpec) -> None:
        self.store, self.backend, self.saver, self.spec = store, backend, saver, spec

    # -- a redo ------------------------------------------------------------------------------------------------

    def compare(self, slot: LoadedPolicy, record: CommitRecord, redone: Redone) -> None:
        """Takes note of a step that was redone in `slot`. Raises ReplayDiverged for other weights than the committed
        ones where the chain may not go on from them."""
        step, here = record.policy.step, self.backend.numerics()
        if record.weights_digest is None:
            if redone.differs or changes(record.numerics, here):
                redone.unsure.append(step)
            return
        digest, _ = slot.trainer.weights_digest()
        if digest == record.weights_digest:
            redone.unsure.clear()
            return
        redone.unsure.append(step)
        if redone.differs:
            return  # as every digest after the first one that did
        redone.differs = True
        refusal = self._refusal(redone.target, changed=changes(record.numerics, here, everything=True))
        if refusal is not None:
            raise ReplayDiverged(
                f"redoing step {step} gave weights {digest[:12]}, the chain has {record.weights_digest[:12]}. "
                f"Committed under {record.numerics.model_dump()}, redone under {here.model_dump()}. {refusal}"
            )

    def _refusal(self, target: PolicyRef, *, changed: list[str]) -> str | None:
        """Why the chain may not be rebased at `target`, and what to do; None where it may."""
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

    def after_redo(self, slot: LoadedPolicy, redone: Redone) -> None:
        """Rebases the chain on what a redo reached, where that is not known to be what was committed. Raises
        ReplayDiverged where it may not."""
        if not redone.unsure:
            return
        chain = Chain.of(self.store, slot.policy)
        record = chain.record(slot.policy.step)
        assert record is not None  # it was redone
        changed = changes(record.numerics, self.backend.numerics(), everything=redone.differs)
        unknown = (
            f"{slot.policy.uri} was redone under other numerics ({'; '.join(changed)}), and no record says whether its "
            "weights are the committed ones"
        )
        if chain.record(slot.policy.step + 1) is not None:
            log.warning(unknown)
            return
        refusal = self._refusal(slot.policy, changed=changed or ["a step before it"])
        if refusal is not None:
            raise ReplayDiverged(f"{unknown}. {refusal}")
        attempt = Attempt(self.store)
        self._commit(slot, record, attempt, self._own_checkpoint(slot, attempt), tuple(redone.unsure))

    # -- a step ------------------------------------------------------------------------------------------------

    def before_step(self, slot: LoadedPolicy) -> None:
        """Commits an exact rebase if the step that comes next is taken under other numerics than the last one. Raises
        ReplayDiverged for a slot whose weights are not the committed ones."""
        if slot.made_under is None or not changes(slot.made_under, self.backend.numerics()):
            return
        if slot.rebase is not None and slot.rebase.step == slot.policy.step:
            return  # the chain says already that it goes on from these weights
        record = Chain.of(self.store, slot.policy).record(slot.policy.step)
        assert record is not None  # its numerics are made_under
        before, attempt = slot.rebase, Attempt(self.store)
        checkpoint = self._chains_checkpoint(slot) or self._own_checkpoint(slot, attempt)
        if record.weights_digest not in (None, checkpoint.weights_digest):
            raise ReplayDiverged(
                f"a checkpoint of {slot.policy.uri} holds weights {checkpoint.weights_digest[:12]}, the chain has "
                f"{str(record.weights_digest)[:12]}; `ostinato verify {slot.policy.run}` says which checkpoint is wrong"
            )
        self._commit(slot, record, attempt, checkpoint, ())
        if find_artifact(self.store, checkpoint.ref.key) is None:  # pruned right before the commit
            snapshot = self.saver.take(slot, scratch_folder(self.store), key=checkpoint.ref.key, rebase=before)
            self.saver.submit(snapshot, batch_provenance(self.store, slot.policy)).result()

    # -- the checkpoint and the commit -------------------------------------------------------------------------

    def _chains_checkpoint(self, slot: LoadedPolicy) -> _Checkpoint | None:
        """The chain's own checkpoint of these very weights, if there is one."""
        under_way, policy = self.saver.under_way(slot.policy), slot.policy
        if under_way is not None:
            under_way.exception()  # waits; one that failed is not there
        try:
            manifest = read_manifest(self.store, checkpoint_key(policy))
        except (ObjectNotFound, CorruptArtifact):
            return None
        digest, _ = slot.trainer.weights_digest()
        if manifest.extra != manifest.extra | checkpoint_extra(policy, slot.rebase, digest):
            return None
        return _Checkpoint(manifest.ref, digest)

    def _own_checkpoint(self, slot: LoadedPolicy, attempt: Attempt) -> _Checkpoint:
        """A checkpoint that only the rebase of this attempt names."""
        policy = slot.policy
        mark = RebaseMark(step=policy.step, attempt=attempt.id)
        key = keys.rebase_checkpoint(policy.run, policy.stage, policy.model, policy.step, attempt.id)
        snapshot = self.saver.take(slot, scratch_folder(self.store), key=key, rebase=mark)
        ref = self.saver.submit(snapshot, batch_provenance(self.store, policy)).result()
        return _Checkpoint(ref, snapshot.weights_digest)

    def _commit(
        self,
        slot: LoadedPolicy,
        record: CommitRecord,
        attempt: Attempt,
        checkpoint: _Checkpoint,
        redone: tuple[int, ...],
    ) -> None:
        """Commits the rebase; a slot whose rebase lost takes the winner's weights."""
        chain = Chain.of(self.store, slot.policy)
        mine = Rebase(
            policy=slot.policy,
            before=record.numerics,
            after=self.backend.numerics(),
            checkpoint=checkpoint.ref,
            weights_digest=checkpoint.weights_digest,
            committed_digest=record.weights_digest,
            exact=not redone,
            redone=redone,
            attempt=attempt.id,
        )
        stands = commit_rebase(chain, mine, attempt)
        who = "rebased" if stands.attempt == mine.attempt else "rebased by another engine, whose weights are taken"
        log.warning("%s/%s/%s is %s: %s", chain.run, chain.stage, chain.model, who, stands.title)
        log_work("rebase", policy=slot.policy.uri, step=slot.policy.step, exact=stands.exact, attempt=stands.attempt)
        if stands.attempt != mine.attempt:
            discard_checkpoint(chain, mine)
            if stands.checkpoint.sha256 != checkpoint.ref.sha256:
                self._adopt(slot, stands)
        slot.rebase = stands.mark

    def _adopt(self, slot: LoadedPolicy, rebase: Rebase) -> None:
        manifest = rebase_manifest(Chain.of(self.store, slot.policy), rebase)
        with scratch(self.store) as folder:
            files = materialise_files(self.store, manifest.key, folder)
            slot.trainer.read_checkpoint(files, optimizer=slot.training)
        slot.drop_sampler()  # it may hold other weights of the same state


class _Checkpoint(NamedTuple):
    ref: ArtifactRef
    weights_digest: str
