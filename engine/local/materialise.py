"""Materialise: bring weights to any committed policy, from the nearest checkpoint plus the steps after it.

A database calls this a checkpoint plus a redo log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.backends.protocol import Sampler, SamplerBackend, Trainer, TrainerBackend
from engine.backends.torch.shared_base import SharedBase
from engine.errors import BadSpec, PermanentEngineError, UnknownPolicy
from engine.local.apply import apply_request
from engine.local.chains import check_committed, check_same_part
from engine.local.loaded_policies import LoadedPolicies, LoadedPolicy
from engine.local.rebase import Rebaser, Redone
from engine.local.scratch import scratch
from engine.models.size import parameter_count
from engine.specs.adapters import LoraSpec, parse_trainable
from storage.chain.rebase import checkpoints_before, rebase_in_effect, step_of_checkpoint
from storage.chain.records import Chain, CommitRecord, PolicyRef, Root, base_model_of
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

ADAPTER_SHARE = 0.05
"""Room set aside for an adapter before it is there, as a share of its base's parameters; then its true size counts."""


class Materialiser:
    """Brings slots to policies. Not thread-safe: the engine calls it from its one compute thread."""

    def __init__(
        self,
        store: ObjectStore,
        backend: TrainerBackend,
        samplers: SamplerBackend,
        slots: LoadedPolicies,
        *,
        rebaser: Rebaser,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called after each micro-batch of a redo; what it raises ends that."""
        self.store, self.backend, self.samplers, self.loaded_policies = store, backend, samplers, slots
        self.rebaser, self.check = rebaser, check

    # -- which slot --------------------------------------------------------------------------------------------

    def for_training(self, policy: PolicyRef) -> LoadedPolicy:
        """The chain's training slot, at exactly `policy`, moments included."""
        check_committed(self.store, policy)
        slot = self.loaded_policies.training(policy)
        if slot is None or slot.policy.state != policy.state:
            slot = self._bring(slot, policy)
        return self.loaded_policies.use(slot)

    def for_reading(self, policy: PolicyRef) -> LoadedPolicy:
        """A slot that holds `policy`'s weights. The head of a chain moves its training slot along; a past policy
        or a reference gets a frozen slot, so that training need not be undone for it."""
        slot = self.loaded_policies.holding(policy.state)
        if slot is not None and (slot.policy == policy or self._answers(slot, policy)):
            return self.loaded_policies.use(slot)
        check_committed(self.store, policy)
        own = self.loaded_policies.training(policy)
        is_ahead = own is None or policy.step > own.policy.step
        chain = Chain.of(self.store, policy)
        if is_ahead and chain.record(policy.step + 1) is None:
            return self.for_training(policy)
        slot = self._adapter_off(chain, policy) or self._bring(None, policy, training=False)
        slot.trainer.reset_optimizer()  # a frozen policy is only read: its moments would be dead weight
        return self.loaded_policies.use(slot)

    def _answers(self, slot: LoadedPolicy, policy: PolicyRef) -> bool:
        """Whether weights of the same state that are in memory under another name are this policy's: it is committed,
        and descends from the same rebase."""
        check_committed(self.store, policy)
        base = rebase_in_effect(Chain.of(self.store, policy), policy.step)
        return slot.rebase == (base.mark if base else None)

    def _adapter_off(self, chain: Chain, policy: PolicyRef) -> LoadedPolicy | None:
        """Policy 0 of an adapter's chain is its base model, which is there once for all of them; but not with a scalar
        head, which is the adapter's own."""
        root = chain.root()
        if policy.step or root is None or root.base is None:
            return None
        spec = parse_trainable(root.trainable)
        if spec.kind != "lora" or spec.head != "lm":
            return None
        base = self._shared_base(root.base, run=policy.run)
        return LoadedPolicy(policy, self.backend.adapter_off(base), training=False)

    # -- bring it there ----------------------------------------------------------------------------------------

    def _bring(self, slot: LoadedPolicy | None, policy: PolicyRef, *, training: bool = True) -> LoadedPolicy:
        """Moves `slot` (or a new one) to `policy` by the shortest way: redo from where it is, or restore and redo."""
        chain = Chain.of(self.store, policy)
        self.rebaser.saver.settle(policy)
        try:
            if slot is None or not self._leads_to(slot, chain, policy):
                slot = self._restore(chain, policy.step, into=slot.trainer if slot else None, training=training)
            slot.training, redone = training, Redone(policy)
            for record in chain.records(after=slot.policy.step, until=policy.step):
                self.redo(slot, record)
                self.rebaser.compare(slot, record, redone)
            self.rebaser.after_redo(slot, redone)
        except BaseException:
            held = self.loaded_policies.training(policy)
            if held is not None and slot is not None and held.trainer is slot.trainer:
                self.loaded_policies.drop(policy)  # half-way weights must not pass for a policy
            raise
        return slot

    @staticmethod
    def _leads_to(slot: LoadedPolicy, chain: Chain, policy: PolicyRef) -> bool:
        """Whether a redo from where the slot is leads to the policy, and from no farther than a restore would."""
        nearest = next((step_of_checkpoint(manifest) for manifest in checkpoints_before(chain, policy.step)), 0)
        if not nearest <= slot.policy.step <= policy.step:
            return False
        base = rebase_in_effect(chain, policy.step)
        on_chain = chain.policy(slot.policy.step).state == slot.policy.state
        return on_chain and slot.rebase == (base.mark if base else None)

    def _restore(self, chain: Chain, step: int, *, into: Trainer | None, training: bool) -> LoadedPolicy:
        """The last checkpoint at or before `step` that can be read, else the root of the chain. A checkpoint is a
        cache: one that is damaged or gone makes the redo longer, and nothing else; but the one that a rebase goes on
        from is all there is. Raises CorruptArtifact."""
        base = rebase_in_effect(chain, step)
        for manifest in checkpoints_before(chain, step):
            saved = step_of_checkpoint(manifest)
            moments = training or saved < step  # a redo needs them, whatever the slot is for
            try:
                with scratch(self.store) as folder:
                    files = materialise_files(self.store, manifest.key, folder)
                    trainer = into or self._new_trainer(chain, moments=moments)
                    trainer.read_checkpoint(files, optimizer=moments)
            except (ObjectNotFound, CorruptArtifact) as error:
                if base is not None and manifest.key == base.checkpoint.key:
                    raise
                log.warning("the checkpoint %s is passed over, the redo will be longer: %s", manifest.key, error)
                continue
            log_work("restore", policy=chain.policy(saved).uri, step=saved)
            record = chain.record(saved) if saved else None
            return LoadedPolicy(
                chain.policy(saved),
                trainer,
                made_under=record.numerics if record else None,
                rebase=base.mark if base else None,
                saved_step=saved,
            )
        return self._start_of(chain, moments=training or step > 0)

    def _start_of(self, chain: Chain, *, moments: bool) -> LoadedPolicy:
        """Policy 0 of a chain with fresh moments, from the base model or the stage before."""
        root = self._root(chain)
        if root.start is None:
            trainer = self._new_trainer(chain, moments=moments)
        else:
            check_same_part(root, self._root(Chain.of(self.store, root.start)))
            trainer = self._bring(None, root.start, training=moments).trainer
            trainer.reset_optimizer()
        log_work("restore", policy=chain.policy(0).uri, step=0)
        return LoadedPolicy(chain.policy(0), trainer)

    def _root(self, chain: Chain) -> Root:
        root = chain.root()
        if root is None:
            raise UnknownPolicy(f"there is no chain {chain.run}/{chain.stage}/{chain.model}")
        return root

    def _new_trainer(self, chain: Chain, *, moments: bool) -> Trainer:
        base = base_model_of(self.store, chain.policy(0))
        return self.load(self._root(chain), base, run=chain.run, moments=moments)

    def load(self, root: Root, base: ArtifactRef, *, run: str, moments: bool) -> Trainer:
        """The registered model that a chain descends from, and what of it the chain's root trains; with `moments`, room
        is made for gradients and moments too."""
        spec = parse_trainable(root.trainable)
        count = parameter_count(self.store, base)
        master = self.backend.master_dtype.itemsize
        if isinstance(spec, LoraSpec):
            shared = self._shared_base(base, run=run)
            need = int(ADAPTER_SHARE * count * master * (4 if moments else 1))
            self.loaded_policies.make_room(need, run=run, what=f"an adapter on {base.key}", keep=shared)
            return self.backend.adapter(shared, spec, init_seed=root.init_seed)
        need = count * master * (4 if moments else 1)  # weights; gradients and two moments
        self.loaded_policies.make_room(need, run=run, what=f"{'training' if moments else 'reading'} {base.key}")
        with self.model_folder(base) as folder:
            return self.backend.load(folder, head=spec.head, init_seed=root.init_seed)

    def _shared_base(self, base: ArtifactRef, *, run: str) -> SharedBase:
        def load() -> SharedBase:
            need = parameter_count(self.store, base) * self.backend.compute_dtype.itemsize
            self.loaded_policies.make_room(need, run=run, what=f"the base model {base.key}")
            with self.model_folder(base) as folder:
                return self.backend.load_base(folder, key=base.key)

        return self.loaded_policies.base(base.sha256, load)

    def redo(self, slot: LoadedPolicy, record: CommitRecord) -> None:
        """One committed step again, under its recorded micro-batching and threads."""
        limits = record.numerics.max_tokens_of_updates or record.numerics.max_tokens
        with self.backend.threads_of(record.numerics):
            apply_request(slot.trainer, record.request, self.store, max_tokens=limits, check=self.check)
        log_work("redo", policy=record.policy.uri, step=record.policy.step)
        slot.policy, slot.made_under = record.policy, record.numerics

    # -- sampling ----------------------------------------------------------------------------------------------

    def sampler_for(self, slot: LoadedPolicy, policy: PolicyRef, *, tensor_parallel: int | None = None) -> Sampler:
        """The slot's sampler, holding the slot's weights, which are `policy`'s. Raises BadSpec for a scalar head."""
        if slot.trainer.scalar:
            raise BadSpec(
                f"{policy.uri} has a scalar head, which gives values and draws no tokens; generate with a causal "
                "language model"
            )
        if slot.sampler is None or slot.tensor_parallel != tensor_parallel:
            slot.drop_sampler()
            need = self.samplers.new_bytes(slot.trainer)
            if need:
                self.loaded_policies.make_room(need, run=policy.run, what="the sampler's copy of a model", keep=slot)
            slot.sampler = self.samplers.sampler(slot.trainer, tensor_parallel=tensor_parallel)
            slot.tensor_parallel = tensor_parallel
        if slot.sampler.holds != policy.state:
            slot.sampler.sync(slot.trainer, policy.state)
            log_work("sync", policy=policy.uri, step=policy.step)
        return slot.sampler

    # -- files -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def model_folder(self, base: ArtifactRef) -> Iterator[Path]:
        """A registered model as a local folder: the stored one where storage is local, else a download."""
        with scratch(self.store) as folder:
            names = [entry.name for entry in read_manifest(self.store, base.key).files if "/" not in entry.name]
            files = materialise_files(self.store, base.key, folder, names=names)
            folders = {path.parent for path in files.values()}
            if len(folders) != 1:
                raise PermanentEngineError(f"{base.key} does not lie in one folder; publish the model again")
            yield folders.pop()
