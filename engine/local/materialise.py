"""Materialise: bring weights to any committed policy, from the nearest checkpoint plus the steps after it.

A database calls this a checkpoint plus a redo log. A *slot* holds one policy's weights. There is one training slot
per chain, which moves forward with it, and a few frozen ones for references and past policies.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.backends.torch_backend import TorchBackend
from engine.backends.torch_sampler import TorchSampler
from engine.backends.torch_trainer import TorchTrainer
from engine.errors import PermanentEngineError, ReplayDiverged, UnknownPolicy
from engine.local.apply import apply_request
from storage import keys
from storage.artifacts import ArtifactRef, materialise_files, read_manifest
from storage.backends.protocol import HIDDEN
from storage.chain import Chain, CommitRecord, PolicyRef, Root
from storage.errors import ObjectNotFound
from storage.objects import ObjectStore
from storage.worklog import log_work

ChainName = tuple[str, str, str]


@dataclass(slots=True)
class Slot:
    """Weights in memory and the policy they are."""

    policy: PolicyRef
    trainer: TorchTrainer
    sampler: TorchSampler | None = None
    synced: str | None = field(default=None)
    """State that the sampler holds."""


def chain_name(policy: PolicyRef) -> ChainName:
    return policy.run, policy.stage, policy.model


class Materialiser:
    """The slots of one engine. Not thread-safe: the engine calls it from its one compute thread."""

    def __init__(self, store: ObjectStore, backend: TorchBackend, *, frozen_policies: int) -> None:
        self.store, self.backend = store, backend
        self._training: dict[ChainName, Slot] = {}
        self._frozen: OrderedDict[str, Slot] = OrderedDict()
        self._frozen_policies = frozen_policies

    # -- which slot --------------------------------------------------------------------------------------------

    def for_training(self, policy: PolicyRef) -> Slot:
        """The chain's training slot, at exactly `policy`, moments included."""
        self.check_committed(policy)
        slot = self._training.get(chain_name(policy))
        if slot is None or slot.policy.state != policy.state:
            slot = self._bring(slot, policy)
        self._training[chain_name(policy)] = slot
        return slot

    def for_reading(self, policy: PolicyRef) -> Slot:
        """A slot that holds `policy`'s weights. The head of a chain moves its training slot along; a past policy
        or a reference gets a frozen slot, so that training need not be undone for it."""
        slot = self._training.get(chain_name(policy))
        if slot is not None and slot.policy.state == policy.state:
            return slot
        if policy.state in self._frozen:
            self._frozen.move_to_end(policy.state)
            return self._frozen[policy.state]
        self.check_committed(policy)
        is_ahead = slot is None or policy.step > slot.policy.step
        if is_ahead and Chain.of(self.store, policy).record(policy.step + 1) is None:
            return self.for_training(policy)
        slot = self._bring(None, policy)
        slot.trainer.reset_optimizer()  # a frozen policy is only read: its moments would be dead weight
        self._frozen[policy.state] = slot
        if len(self._frozen) > self._frozen_policies:
            self._frozen.popitem(last=False)
        return slot

    def drop(self, policy: PolicyRef) -> None:
        """Forgets the chain's training slot: its weights are not those of any committed policy."""
        self._training.pop(chain_name(policy), None)

    def check_committed(self, policy: PolicyRef) -> None:
        """Raises UnknownPolicy unless the chain has this very policy."""
        try:
            found = Chain.of(self.store, policy).policy(policy.step)
        except ObjectNotFound as error:
            raise UnknownPolicy(f"{error}; take the steps before it, or check run, stage and model") from error
        if found.state != policy.state:
            raise UnknownPolicy(
                f"step {policy.step} of {policy.run}/{policy.stage}/{policy.model} is committed as "
                f"{found.state[:12]}, not as {policy.state[:12]}; the ref is of another history"
            )

    # -- bring it there ----------------------------------------------------------------------------------------

    def _bring(self, slot: Slot | None, policy: PolicyRef) -> Slot:
        """Moves `slot` (or a new one) to `policy` by the shortest way: redo from where it is, or restore and redo."""
        chain = Chain.of(self.store, policy)
        checkpoint = self._nearest_checkpoint(chain, policy.step)
        anchor = checkpoint[0].step if checkpoint else 0
        try:
            if slot is None or not anchor <= slot.policy.step <= policy.step or not self._on_chain(chain, slot.policy):
                slot = self._restore(slot, chain, checkpoint)
            for record in chain.records(after=slot.policy.step, until=policy.step):
                self._redo(slot, record)
        except BaseException:
            held = self._training.get(chain_name(policy))
            if held is not None and slot is not None and held.trainer is slot.trainer:
                self.drop(policy)  # half-way weights must not pass for a policy
            raise
        return slot

    @staticmethod
    def _on_chain(chain: Chain, policy: PolicyRef) -> bool:
        return chain.policy(policy.step).state == policy.state

    def _nearest_checkpoint(self, chain: Chain, step: int) -> tuple[PolicyRef, str] | None:
        """The last complete checkpoint at or before `step`: its policy and the key of its artifact."""
        prefix = keys.checkpoints_prefix(chain.run, chain.stage, chain.model)
        steps = (keys.checkpoint_step(info.key) for info in self.store.list(prefix))
        for found in sorted({s for s in steps if s is not None and s <= step}, reverse=True):
            policy = chain.policy(found)
            key = keys.checkpoint(chain.run, chain.stage, chain.model, found)
            if read_manifest(self.store, key).extra.get("state") == policy.state:
                return policy, key
        return None

    def _restore(self, slot: Slot | None, chain: Chain, checkpoint: tuple[PolicyRef, str] | None) -> Slot:
        """The checkpoint, or without one the root of the chain."""
        root = chain.root()
        if root is None:
            raise UnknownPolicy(f"there is no chain {chain.run}/{chain.stage}/{chain.model}")
        if checkpoint is None:
            trainer = self._start(root)
            policy = chain.policy(0)
        else:
            policy, key = checkpoint
            trainer = slot.trainer if slot else self._load_base(root)
            with self.scratch() as folder:
                trainer.read_checkpoint(materialise_files(self.store, key, folder), optimizer=True)
        log_work("restore", policy=policy.uri, step=policy.step)
        return Slot(policy, trainer)

    def _start(self, root: Root) -> TorchTrainer:
        """Policy 0 of a chain, with fresh moments."""
        if root.start is None:
            return self._load_base(root)
        trainer = self._bring(None, root.start).trainer
        trainer.reset_optimizer()
        return trainer

    def _load_base(self, root: Root) -> TorchTrainer:
        """The architecture (and first weights) that a chain descends from."""
        while root.start is not None:
            before = Chain.of(self.store, root.start).root()
            if before is None:
                raise UnknownPolicy(f"the stage before, {root.start.run}/{root.start.stage}, has no chain")
            root = before
        assert root.base is not None  # a root has a base or a start: Root is only made by create_policy
        with self.model_folder(root.base) as folder:
            return self.backend.load(folder)

    def _redo(self, slot: Slot, record: CommitRecord) -> None:
        """One committed step again, under its recorded micro-batching and threads; the weights must come out as
        committed."""
        with self.backend.threads_of(record.numerics):
            apply_request(slot.trainer, record.request, self.store, max_tokens=record.numerics.max_tokens)
        log_work("redo", policy=record.policy.uri, step=record.policy.step)
        slot.policy = record.policy
        if record.weights_digest is None:
            return
        digest, _ = slot.trainer.weights_digest()
        if digest != record.weights_digest:
            raise ReplayDiverged(
                f"redoing step {record.policy.step} gave weights {digest[:12]}, the chain has "
                f"{record.weights_digest[:12]}. Committed under {record.numerics.model_dump()}, redone under "
                f"{self.backend.numerics().model_dump()}. Resume under the committed numerics, or from a checkpoint "
                "at or after that step"
            )

    # -- files -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def model_folder(self, base: ArtifactRef) -> Iterator[Path]:
        """A registered model as a local folder: the stored one where storage is local, else a download."""
        with self.scratch() as scratch:
            files = materialise_files(self.store, base.key, scratch)
            folders = {path.parent for path in files.values()}
            if len(folders) != 1:
                raise PermanentEngineError(f"{base.key} does not lie in one folder; publish the model again")
            yield folders.pop()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        # on the store's own disk where it has one: a checkpoint is then renamed into place, not copied; the hidden
        # name keeps what a kill leaves behind out of every listing
        inside = self.store.local_path("scratch")
        parent = None if inside is None else inside.parent
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{HIDDEN}scratch-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
