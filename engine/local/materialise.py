"""Loads the weights of any committed policy: restores the nearest checkpoint and redoes the steps after it.

A database recovers in the same way from a checkpoint and a redo log. docs/glossary.md explains the terms: a policy's
`state` is a hash of its history, and a `rebase` records that a chain continues under other numerics.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.backends.protocol import FrozenBase, Sampler, SamplerBackend, Trainer, TrainerBackend, sync
from engine.errors import BadSpec, PermanentEngineError, StepConflict, UnknownPolicy
from engine.local.apply import apply_request
from engine.local.closeness import Judgement, Redo, judge_redo
from engine.local.loaded_policies import LoadedPolicies, LoadedPolicy
from engine.local.rebase import Rebaser
from engine.local.sampling import LaneSampler
from engine.local.saving import checkpoint_files, scratch
from engine.models.folder import base_nbytes, parameter_count
from engine.models.scores import check_head
from engine.protocol import PolicySpec
from engine.specs.adapters import LoraSpec, parse_trainable
from engine.text.stored_models import tokenizer_of
from storage.chain.rebase import checkpoints_up_to, rebase_in_effect, step_of_checkpoint
from storage.chain.records import Chain, CommitRecord, PolicyRef, Root, base_model_of
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.store.artifacts import ArtifactRef, Manifest, find_artifact, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

ADAPTER_SHARE_ESTIMATE = 0.05
"""Estimated size of an adapter, as a share of its base model's parameters. Memory is reserved for it before the adapter
is created. Once it exists, its true size counts."""


class Materialiser:
    """Loads policies and creates their samplers. Not thread-safe: the engine calls it from its trainer lane."""

    def __init__(
        self,
        store: ObjectStore,
        backend: TrainerBackend,
        samplers: SamplerBackend,
        loaded_policies: LoadedPolicies,
        *,
        rebaser: Rebaser,
        stop_check: Callable[[], None] = lambda: None,
        add_sampler: Callable[[Sampler, int | None], LaneSampler] = LaneSampler,
    ) -> None:
        """`stop_check` is called after each micro-batch of a redo, and may raise an error to stop the redo.
        `add_sampler` is called with each new sampler and its number of devices (`SamplerLane.add`)."""
        self.store, self.backend, self.samplers = store, backend, samplers
        self.loaded_policies, self._add_sampler = loaded_policies, add_sampler
        self.rebaser, self.stop_check = rebaser, stop_check

    # -- loaded policies ---------------------------------------------------------------------------------------

    def for_training(self, policy: PolicyRef) -> LoadedPolicy:
        """The chain's training policy, moved to exactly `policy`, with its moments."""
        check_committed(self.store, policy)
        loaded = self.loaded_policies.training_policy_of(policy)
        # Compare states, not steps: a loaded policy of the same step may have another history.
        if loaded is None or loaded.policy.state != policy.state:
            loaded = self._load_at(policy, reuse=loaded)
        return self.loaded_policies.add_or_touch(loaded)

    def for_reading(self, policy: PolicyRef) -> LoadedPolicy:
        """A loaded policy with the weights of `policy`.

        Reading the head of a chain loads the chain's training policy, or moves it forward. An older policy is loaded as
        a separate frozen policy, and the training policy stays where it is."""
        # Use weights that are in memory, also those of another run with the same history.
        loaded = self.loaded_policies.find_by_state(policy.state)
        if loaded is not None and (loaded.policy == policy or self._has_same_rebase(loaded, policy)):
            return self.loaded_policies.add_or_touch(loaded)

        # The head of a chain is read just before it is trained further, so move the training policy there.
        check_committed(self.store, policy)
        chain = Chain.of(self.store, policy)
        training = self.loaded_policies.training_policy_of(policy)
        is_newer_than_training = training is None or policy.step > training.policy.step
        is_head = chain.record(policy.step + 1) is None
        if is_newer_than_training and is_head:
            return self.for_training(policy)

        # Any other policy becomes a frozen one.
        loaded = self._base_as_policy(chain, policy) or self._load_at(policy, reuse=None, training=False)
        loaded.trainer.reset_optimizer()  # a frozen policy needs no moments
        return self.loaded_policies.add_or_touch(loaded)

    def _has_same_rebase(self, loaded: LoadedPolicy, policy: PolicyRef) -> bool:
        """Whether `loaded`, which has the same state as `policy`, descends from the same rebase.

        Then it has the weights of `policy`. Raises UnknownPolicy if `policy` is not committed."""
        check_committed(self.store, policy)
        rebase = rebase_in_effect(Chain.of(self.store, policy), policy.step)
        return loaded.rebase == (rebase.mark if rebase else None)

    def _base_as_policy(self, chain: Chain, policy: PolicyRef) -> LoadedPolicy | None:
        """The shared base model as policy 0 of a LoRA chain, which has the weights of the base model.

        None for other policies. An adapter may contain a new scalar head; policy 0 of its chain then differs from the
        base model."""
        root = chain.root()
        if policy.step or root is None or root.base is None:
            return None
        spec = parse_trainable(root.trainable)
        if spec.kind != "lora" or spec.head != "lm":
            return None
        base = self._shared_base(root.base, spec, run=policy.run)
        return LoadedPolicy(policy, self.backend.adapter_off(base), training=False)

    # -- restore and redo --------------------------------------------------------------------------------------

    def _load_at(self, policy: PolicyRef, *, reuse: LoadedPolicy | None, training: bool = True) -> LoadedPolicy:
        """Loads `policy` by a redo from the step of `reuse`, or by a restore and a redo.

        The redo changes `reuse` itself. A restore returns another LoadedPolicy, which takes over its trainer if there
        is a checkpoint."""
        chain = Chain.of(self.store, policy)
        self.rebaser.saver.wait_for_chain(policy)
        loaded = reuse
        try:
            # A checkpoint is read into the old trainer, since memory may not hold a second one.
            if loaded is None or not self._should_redo_from(loaded, chain, policy):
                old_trainer = loaded.trainer if loaded else None
                loaded, reuse = self._restore(chain, policy.step, into=old_trainer, training=training), None
            redo = self._redo_until(loaded, chain, policy)
            if redo.differing and reuse is not None:
                # Start again from the checkpoint, whose bytes are certain.
                loaded = self._restore(chain, policy.step, into=loaded.trainer, training=training)
                redo = self._redo_until(loaded, chain, policy)
        except BaseException:
            self._drop_training_policy(policy, loaded)
            raise
        loaded.training = training

        # After a redo that differs, the weights are those of the policy only if the rebaser agrees.
        if redo.differing:
            self._drop_training_policy(policy, loaded)
            judgement = self._judge(loaded, chain, redo)
            self.rebaser.after_redo(loaded, redo, judgement)
        return loaded

    def _drop_training_policy(self, policy: PolicyRef, loaded: LoadedPolicy | None) -> None:
        """Forgets the chain's training policy if `loaded` has its trainer, whose weights are now those of no policy."""
        training_policy = self.loaded_policies.training_policy_of(policy)
        if training_policy is not None and loaded is not None and training_policy.trainer is loaded.trainer:
            self.loaded_policies.drop(policy)

    def _redo_until(self, loaded: LoadedPolicy, chain: Chain, policy: PolicyRef) -> Redo:
        """Redoes the steps after `loaded` up to `policy`, and compares each with its record.

        Raises ReplayDiverged if they differ and the engine's config demands equal bytes."""
        redo = Redo()
        for record in chain.records(after=loaded.policy.step, until=policy.step):
            before = loaded.sketch_before_update()
            self.redo(loaded, record)
            digest, tensor_digests = loaded.trainer.weights_digest()
            redo.add(record, loaded.update_since(before), digest, tensor_digests)
            if digest != record.weights_digest:
                self.rebaser.check_may_differ(record, digest)
        return redo

    def _judge(self, loaded: LoadedPolicy, chain: Chain, redo: Redo) -> Judgement:
        """Whether the differences of `redo`, which led to `loaded`, are rounding. The steps are redone again in the
        memory of `loaded`, which gets its weights back."""
        with scratch(self.store) as folder:
            files = loaded.trainer.write_checkpoint(folder)
            loaded.drop_sampler()
            trainers = [loaded.trainer]
            del loaded.trainer  # memory may not hold a second one

            def restart() -> Trainer:
                # Only a checkpoint can be read into the old trainer. Otherwise it is freed before a new one is loaded.
                has_checkpoint = next(checkpoints_up_to(chain, loaded.policy.step), None) is not None
                old = trainers.pop()
                into = old if has_checkpoint else None
                del old
                trainers.append(self._restore(chain, loaded.policy.step, into=into, training=True).trainer)
                return trainers[0]

            judgement = judge_redo(redo, self.backend.numerics(), restart=restart, redo_step=self._redo_record)
            loaded.trainer = trainers.pop()
            loaded.trainer.read_checkpoint(files, optimizer=True)
        return judgement

    @staticmethod
    def _should_redo_from(loaded: LoadedPolicy, chain: Chain, policy: PolicyRef) -> bool:
        """Whether a redo from the loaded step leads to `policy`, and is not longer than one from a checkpoint."""
        checkpoint_steps = (step_of_checkpoint(manifest) for manifest in checkpoints_up_to(chain, policy.step))
        nearest = next(checkpoint_steps, 0)
        if not nearest <= loaded.policy.step <= policy.step:
            return False
        rebase = rebase_in_effect(chain, policy.step)
        on_chain = chain.policy(loaded.policy.step).state == loaded.policy.state
        return on_chain and loaded.rebase == (rebase.mark if rebase else None)

    def _restore(self, chain: Chain, step: int, *, into: Trainer | None, training: bool) -> LoadedPolicy:
        """Restores the last readable checkpoint at or before `step`, or policy 0 if there is none.

        A checkpoint is a cache: a damaged or missing one only makes the redo longer. The exception is the checkpoint of
        a rebase, which cannot be rebuilt. Raises CorruptArtifact or ObjectNotFound for that one."""
        rebase = rebase_in_effect(chain, step)
        for manifest in checkpoints_up_to(chain, step):
            saved_step = step_of_checkpoint(manifest)
            # A redo needs the moments, even for a frozen policy.
            with_moments = training or saved_step < step
            try:
                trainer = self._trainer_from_checkpoint(chain, manifest, into=into, with_moments=with_moments)
            except (ObjectNotFound, CorruptArtifact) as error:
                if rebase is not None and manifest.key == rebase.checkpoint.key:
                    raise
                log.warning(
                    "the checkpoint %s cannot be read, so an earlier one is used and the redo takes longer: %s",
                    manifest.key,
                    error,
                )
                continue
            log_work("restore", policy=chain.policy(saved_step).uri, step=saved_step)
            record = chain.record(saved_step) if saved_step else None
            return LoadedPolicy(
                chain.policy(saved_step),
                trainer,
                committed_numerics=record.numerics if record else None,
                rebase=rebase.mark if rebase else None,
                saved_step=saved_step,
            )
        return self._policy_zero(chain, with_moments=training or step > 0)

    def _trainer_from_checkpoint(
        self, chain: Chain, manifest: Manifest, *, into: Trainer | None, with_moments: bool
    ) -> Trainer:
        """Reads a checkpoint into a trainer: `into` if it is given, else a new one."""
        with scratch(self.store) as folder:
            files = checkpoint_files(self.store, self.backend.transfers, manifest, folder)
            trainer = into or self._new_trainer(chain, with_moments=with_moments)
            trainer.read_checkpoint(files, optimizer=with_moments)
        return trainer

    def _policy_zero(self, chain: Chain, *, with_moments: bool) -> LoadedPolicy:
        """Policy 0 of a chain with fresh moments: the base model, or the last policy of the previous stage."""
        root = self._root(chain)
        if root.start is None:
            trainer = self._new_trainer(chain, with_moments=with_moments)
        else:
            # The new stage continues with the weights of the previous one, but with fresh moments.
            check_same_trainable(root, self._root(Chain.of(self.store, root.start)))
            trainer = self._load_at(root.start, reuse=None, training=with_moments).trainer
            trainer.reset_optimizer()
        log_work("restore", policy=chain.policy(0).uri, step=0)
        return LoadedPolicy(chain.policy(0), trainer)

    def _root(self, chain: Chain) -> Root:
        root = chain.root()
        if root is None:
            raise UnknownPolicy(f"there is no chain {chain.run}/{chain.stage}/{chain.model}")
        return root

    def redo(self, loaded: LoadedPolicy, record: CommitRecord) -> None:
        """Redoes one committed step with its recorded micro-batches and thread count."""
        self._redo_record(loaded.trainer, record)
        loaded.policy, loaded.committed_numerics = record.policy, record.numerics

    def _redo_record(self, trainer: Trainer, record: CommitRecord) -> None:
        # Micro-batches and threads decide the order of sums, so other ones would give other bits.
        max_tokens = record.numerics.max_tokens_of_updates or record.numerics.max_tokens
        with self.backend.threads_of(record.numerics):
            apply_request(trainer, record.request, self.store, max_tokens=max_tokens, check=self.stop_check)
        log_work("redo", policy=record.policy.uri, step=record.policy.step)

    # -- new trainers ------------------------------------------------------------------------------------------

    def _new_trainer(self, chain: Chain, *, with_moments: bool) -> Trainer:
        base = base_model_of(self.store, chain.policy(0))
        return self.load_trainer(self._root(chain), base, run=chain.run, with_moments=with_moments)

    def load_trainer(self, root: Root, base: ArtifactRef, *, run: str, with_moments: bool) -> Trainer:
        """Loads the base model with the trainable part that `root` asks for.

        Frees memory for the weights first; with `with_moments`, also for gradients and moments."""
        spec = parse_trainable(root.trainable)
        copies = 4 if with_moments else 1  # the weights, and with moments also gradients and two moments
        weights_bytes = parameter_count(self.store, base) * self.backend.master_dtype.itemsize

        # An adapter adds little to its base model, which several chains may share.
        if isinstance(spec, LoraSpec):
            shared = self._shared_base(base, spec, run=run)
            need = int(ADAPTER_SHARE_ESTIMATE * weights_bytes * copies)
            self.loaded_policies.make_room(need, run=run, what=f"an adapter on {base.key}", keep=shared)
            return self.backend.adapter(shared, spec, init_seed=root.init_seed)

        # A fully trained policy shares no weights with other policies.
        purpose = "training" if with_moments else "reading"
        self.loaded_policies.make_room(weights_bytes * copies, run=run, what=f"{purpose} {base.key}")
        with self.model_folder(base) as folder:
            return self.backend.load(folder, head=spec.head, init_seed=root.init_seed)

    def _shared_base(self, base: ArtifactRef, spec: LoraSpec, *, run: str) -> FrozenBase:
        def load() -> FrozenBase:
            need = base_nbytes(
                self.store,
                base,
                compute_bytes=self.backend.compute_dtype.itemsize,
                master_bytes=self.backend.master_dtype.itemsize,
                load_in_4bit=spec.load_in_4bit,
            )
            self.loaded_policies.make_room(need, run=run, what=f"the base model {base.key}")
            with self.model_folder(base) as folder:
                return self.backend.load_base(folder, key=base.key, load_in_4bit=spec.load_in_4bit)

        name = f"{base.sha256} in 4 bits" if spec.load_in_4bit else base.sha256
        return self.loaded_policies.shared_base(name, load)

    @contextlib.contextmanager
    def model_folder(self, base: ArtifactRef) -> Iterator[Path]:
        """A registered model as a local folder: the stored folder if the store is local, else a download."""
        with scratch(self.store) as folder:
            # Files in subfolders, such as an adapter for peft, are not part of the model.
            entries = read_manifest(self.store, base.key).files
            names = [entry.name for entry in entries if "/" not in entry.name]
            files = materialise_files(self.store, base.key, folder, names=names)
            folders = {path.parent for path in files.values()}
            if len(folders) != 1:
                raise PermanentEngineError(f"{base.key} does not lie in one folder; publish the model again")
            yield folders.pop()

    # -- sampling ----------------------------------------------------------------------------------------------

    def sampler_for(
        self, loaded: LoadedPolicy, policy: PolicyRef, *, tensor_parallel: int | None = None
    ) -> LaneSampler:
        """Returns the sampler of `loaded`, which may hold other weights. `policy` may be another name for the same
        weights.

        Raises BadSpec for a policy with a scalar head."""
        if loaded.trainer.scalar:
            raise BadSpec(
                f"{policy.uri} has a scalar head, which gives values and draws no tokens; generate with a causal "
                "language model"
            )

        # Create a sampler for this split over devices. It may hold a copy of the weights, which needs memory.
        if loaded.sampler is None or loaded.tensor_parallel != tensor_parallel:
            loaded.drop_sampler()
            need = self.samplers.added_bytes(loaded.trainer)
            if need:
                what = "the sampler's copy of a model"
                self.loaded_policies.make_room(need, run=policy.run, what=what, keep=loaded)
            tokenizer = tokenizer_of(self.store, base_model_of(self.store, policy))
            sampler = self.samplers.new_sampler(loaded.trainer, tensor_parallel=tensor_parallel, tokenizer=tokenizer)
            loaded.sampler = self._add_sampler(sampler, tensor_parallel)
            loaded.tensor_parallel = tensor_parallel
        return loaded.sampler

    def synced(self, sampler: LaneSampler, loaded: LoadedPolicy, policy: PolicyRef) -> Sampler:
        """The sampler, which shares the trainer of `loaded`, with the weights of `policy`."""
        # Sync only after a step: between two steps all generations share one sync.
        if sampler.sampler.loaded_state != policy.state:
            sync(sampler.sampler, loaded.trainer, policy.state)
            log_work("sync", policy=policy.uri, step=policy.step)
        return sampler.sampler


def check_committed(store: ObjectStore, policy: PolicyRef) -> None:
    """Raises UnknownPolicy unless the chain has committed this step with this state."""
    try:
        committed = Chain.of(store, policy).policy(policy.step)
    except ObjectNotFound as error:
        raise UnknownPolicy(f"{error}; take the steps before it, or check run, stage and model") from error
    if committed.state != policy.state:
        raise UnknownPolicy(
            f"{policy.run}/{policy.stage}/{policy.model}@{policy.step} is committed as "
            f"{committed.state[:12]}, not as {policy.state[:12]}; the reference belongs to another history"
        )


def create_chain(store: ObjectStore, spec: PolicySpec) -> PolicyRef:
    """Commits the root of a chain if it has none, and returns policy 0.

    Raises:
        BadSpec, UnknownPolicy: the root is invalid (see `check_root`). Nothing was committed.
        StepConflict: the chain already has a different root.
    """
    chain = Chain(store, spec.run, spec.stage, spec.model)
    committed_root = chain.root()
    if committed_root is None:
        check_root(store, spec.root)
        committed_root = chain.create_root(spec.root)
    # Another process may have committed its root first, so compare even after create_root.
    if committed_root.state() != spec.root.state():
        raise StepConflict(
            f"the chain {spec.run}/{spec.stage}/{spec.model} starts from {committed_root.base_digest[:12]}, but "
            f"{spec.root.base_digest[:12]} was given: the base model, the trainable part or the seed changed; "
            "use another run key"
        )
    return chain.policy(0)


def check_root(store: ObjectStore, root: Root) -> None:
    """Checks the root of a new chain without loading a model.

    Raises:
        BadSpec: the trainable part is unknown, or the base model does not exist, has another digest, or lacks the head
            to be trained.
        UnknownPolicy: the policy to start from was never committed.
    """
    # A root starts either from a registered model or from a policy of an earlier stage.
    trainable = parse_trainable(root.trainable)
    if root.base is not None and root.start is None:
        _check_base(store, root.base, root.base_digest)
        check_head(store, root.base, trainable.head)
    elif root.start is not None and root.base is None:
        _check_start(store, root, root.start)
    else:
        raise BadSpec("a chain starts from a base model or from an earlier policy; give exactly one of base and start")


def check_same_trainable(root: Root, previous: Root) -> None:
    """Raises BadSpec unless the stage of `root` trains the same part of the model as the previous stage."""
    if previous.trainable != root.trainable:
        assert root.start is not None
        raise BadSpec(
            f"the new stage trains {root.trainable}, but it starts from {root.start.uri}, which trained "
            f"{previous.trainable}; publish that policy as a model and start from it, or train the same part"
        )


def _check_base(store: ObjectStore, base: ArtifactRef, base_digest: str) -> None:
    registered = find_artifact(store, base.key)
    if registered is None or registered.kind != "model":
        raise BadSpec(f"there is no model {base.key} in {store.url}; import the model, and give the reference returned")
    if not registered.sha256 == base.sha256 == base_digest:
        raise BadSpec(
            f"{base.key} has the digest {registered.sha256[:12]}, but the root says {base.sha256[:12]} in base and "
            f"{base_digest[:12]} in base_digest; give the digest of the registered model in both"
        )


def _check_start(store: ObjectStore, root: Root, start: PolicyRef) -> None:
    check_committed(store, start)
    if root.base_digest != start.state:
        raise BadSpec(
            f"the root starts from the state {start.state[:12]}, but gives base_digest={root.base_digest[:12]}; give "
            "the state of the policy as base_digest"
        )
    previous = Chain.of(store, start).root()
    assert previous is not None  # the policy is committed, so its chain has a root
    check_same_trainable(root, previous)
