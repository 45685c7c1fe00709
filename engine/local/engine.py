"""`LocalEngine`: the embedded engine. Every call runs in one compute thread; runs take turns (`engine.local.queue`)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from engine.backends.factory import create_sampler_backend, create_trainer_backend
from engine.backends.protocol import OnToken
from engine.backends.torch.shared_base import AdapterTrainer
from engine.cluster.connection import require_ray
from engine.cluster.inventory import cluster_info
from engine.errors import EngineBusy, EngineError, Fenced
from engine.local.apply import StepEffect, apply_request, require_same_request
from engine.local.chains import check_committed, create_chain
from engine.local.generation_batcher import GenerationBatcher, PendingGeneration, draw
from engine.local.loaded_policies import LoadedPolicies, LoadedPolicy, NoRoomYet
from engine.local.materialise import Materialiser
from engine.local.queue import FairQueue
from engine.local.rebase import Rebaser
from engine.local.saving import Saver, batch_provenance, find_policy_checkpoint
from engine.local.scratch import scratch, scratch_folder
from engine.local.weights import checked_parameter_count
from engine.models.folder import ModelFolder, local_folder, registered_model, registry_version
from engine.models.images import check_images_accepted
from engine.protocol import Completion, EngineInfo, GenerateRequest, LogprobsRequest, PolicySpec
from engine.specs.engine import LocalEngineSpec
from engine.text.tokenizers import TOKENIZER_FILES, load_tokenizer
from storage.chain.leases import current_epoch
from storage.chain.records import Chain, CommitRecord, PolicyRef, StepRequest, base_model_of
from storage.errors import StorageError, VersionConflict
from storage.failpoints import failpoint
from storage.registry.models import find_model, find_published, publish_model
from storage.serialization import canonical_json, digest
from storage.store.artifacts import ArtifactRef, Provenance, digest_of, file_entries
from storage.store.download import materialise_files
from storage.store.identity import store_id
from storage.store.objects import open_store
from storage.worklog import log_work

R = TypeVar("R")

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 256 << 20
"""Up to this many bytes of weights, every commit record carries their digest."""


class LocalEngine:
    """Implements engine.protocol.Engine in this process."""

    def __init__(self, store_url: str, spec: LocalEngineSpec | None = None) -> None:
        self.spec = spec or LocalEngineSpec()
        if self.spec.uses_ray:
            require_ray()  # before any model is loaded
        self.store = open_store(store_url)
        self.backend = create_trainer_backend(self.spec)
        self.samplers = create_sampler_backend(self.spec, self.backend)
        self.devices = max(self.backend.devices, self.samplers.devices)
        self.saver = Saver(self.store)
        self.loaded_policies = LoadedPolicies(
            budget=self.backend.memory_bytes(),
            residency=self.spec.residency_seconds,
            frozen=self.spec.frozen_policies,
            save=self._save_unasked,
        )
        self.queue = FairQueue(name="ostinato-engine", prepare=self.backend.prepare_thread)
        self.policies = Materialiser(
            self.store,
            self.backend,
            self.samplers,
            self.loaded_policies,
            rebaser=Rebaser(self.store, self.backend, self.saver, self.spec),
            check=self.queue.check,
        )
        self.generation_batcher = GenerationBatcher(max_rows=self.spec.max_rows)
        self._epochs: dict[str, int] = {}
        self._speed: float | None = None
        self._closing = threading.Event()

    async def _compute(self, run: str, call: Callable[[], R]) -> R:
        """The result of `call` in the compute thread, at the run's turn, and when there is room for what it needs."""
        deadline = time.monotonic() + self.spec.room_seconds
        while True:
            try:
                return await self.queue.run(run, call)
            except NoRoomYet as error:
                seconds = error.seconds
                if time.monotonic() + seconds > deadline:
                    raise EngineBusy(
                        f"{error}; waited {self.spec.room_seconds:.0f} s for room. Call again later, raise "
                        "engine.memory_gib, or give the run an engine of its own"
                    ) from error
            await asyncio.sleep(seconds)  # not above: a handled error keeps what it named

    def _fence(self, run: str, epoch: int, *, ask_store: bool = False) -> None:
        """Refuses a caller whose lease was taken over, as far as this engine has heard; `ask_store` hears of leases
        taken by other processes too, for a listing: a step is dear enough to ask first. Only leases in the store fence
        anybody: a caller's word for its own epoch does not, or one wrong call could stop a run."""
        newest = self._epochs.get(run, 0)
        if ask_store or epoch > newest:
            newest = self._epochs[run] = max(newest, current_epoch(self.store, run))
        if epoch < newest:
            raise Fenced(
                f"this call acts for run {run!r} in epoch {epoch}, but epoch {newest} has taken over; stop: "
                "another process is driving the run now"
            )

    # -- models and policies -----------------------------------------------------------------------------------

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        return await self._compute("", partial(self._import_model, source, provenance))

    def _import_model(self, source: str, provenance: Provenance) -> ArtifactRef:
        path = local_folder(source)
        if path is None:
            return registered_model(self.store, source)
        return self._import_folder(ModelFolder.of(path), provenance)

    async def import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """A checked folder brought into the registry. Idempotent."""
        return await self._compute("", partial(self._import_folder, folder, provenance))

    def _import_folder(self, folder: ModelFolder, provenance: Provenance) -> ArtifactRef:
        version = registry_version(folder.digest())
        if find_model(self.store, folder.name, version) is None:
            need = checked_parameter_count(folder) * self.backend.master_dtype.itemsize
            if self.backend.device.type == "cpu":
                self.loaded_policies.make_room(need, run="", what=f"loading {folder.path.name}")
            self.backend.try_load(folder.path)  # a version never changes: what does not load must not become one
            load_tokenizer(folder.path)
        return publish_model(
            self.store, folder.name, version, folder.files, provenance=provenance, extra={"imported": True}
        )

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        return await self._compute(spec.run, partial(create_chain, self.store, spec))

    # -- reading -----------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: OnToken | None = None
    ) -> list[Completion]:
        """`on_token` hears of each token in the compute thread as it is drawn; what it raises ends the call. A caller
        that is cancelled ends it too, at the next token."""
        call = PendingGeneration(request, on_token=on_token)
        shared = on_token is None and not self.spec.deterministic
        if shared:
            self.generation_batcher.add(call)
        try:
            return await self._compute(request.policy.run, partial(self._generate, call, epoch))
        except asyncio.CancelledError:
            call.abandoned = True
            raise
        finally:
            self.generation_batcher.remove(call)

    def _generate(self, call: PendingGeneration, epoch: int) -> list[Completion]:
        self._fence(call.request.policy.run, epoch)
        if call.completions is not None:  # another caller's batch had room for it
            check_committed(self.store, call.request.policy)
            return call.completions
        return self.generation_batcher.answer(call, self._draw)

    def _draw(self, request: GenerateRequest, on_token: OnToken) -> list[Completion]:
        def hear(index: int, token: int, logprob: float) -> None:
            if self._closing.is_set():
                raise EngineBusy("the engine is closing; call again when it is back")
            on_token(index, token, logprob)

        slot = self.policies.for_reading(request.policy)
        # tp(ctx.world_size) asks for all devices, which the sampler uses as it is configured
        all_devices = self.samplers.fixed_tensor_parallel and request.tensor_parallel == self.devices
        spread = None if all_devices else request.tensor_parallel
        sampler = self.policies.sampler_for(slot, request.policy, tensor_parallel=spread)
        log_work("generate", policy=request.policy.uri, completions=len(request.prompts))
        return draw(sampler, request, hear)

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        return await self._compute(request.policy.run, partial(self._logprobs, request, epoch))

    def _logprobs(self, request: LogprobsRequest, epoch: int) -> list[list[float]]:
        self._fence(request.policy.run, epoch)
        slot = self.policies.for_reading(request.policy)
        check_images_accepted(slot.trainer, request.images, "sequences")
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        return slot.trainer.logprobs(request.sequences, temperature=request.temperature, max_tokens=limit)

    async def values(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        return await self._compute(request.policy.run, partial(self._values, request, epoch))

    def _values(self, request: LogprobsRequest, epoch: int) -> list[list[float]]:
        self._fence(request.policy.run, epoch)
        trainer = self.policies.for_reading(request.policy).trainer
        check_images_accepted(trainer, request.images, "sequences")
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        if self.spec.deterministic:  # scores become grades: no bit of one may depend on which were asked for with it
            return [trainer.values([sequence], max_tokens=limit)[0] for sequence in request.sequences]
        return trainer.values(request.sequences, max_tokens=limit)

    # -- the step ----------------------------------------------------------------------------------------------

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        """A caller that is cancelled ends it at its next micro-batch, and nothing of it is committed."""
        return await self._compute(request.parent.run, partial(self._take_gradient_step, request, epoch))

    def _take_gradient_step(self, request: StepRequest, epoch: int) -> CommitRecord:
        self._fence(request.parent.run, epoch, ask_store=True)
        chain = Chain.of(self.store, request.parent)
        committed = chain.record(request.parent.step + 1)
        if committed is not None:
            return require_same_request(committed, request)
        self.samplers.offload_for_training()
        slot = self.policies.for_training(request.parent)
        failpoint("step.before_gradient")
        try:
            self.policies.rebaser.before_step(slot)
            limit = request.max_tokens or self.spec.max_tokens_per_forward
            effect = apply_request(slot.trainer, request, self.store, max_tokens=limit, check=self.queue.check)
            log_work("step", policy=request.result().uri, step=request.parent.step + 1)
            record = self._record(request, effect, slot)
            failpoint("step.before_commit")
            stands = chain.commit(record)
            failpoint("step.after_commit")
            require_same_request(stands, request)
        except BaseException:
            self.loaded_policies.drop(request.parent)  # the weights moved, and no commit stands for where they are
            raise
        lost, mine = stands.attempt != record.attempt, (record.weights_digest, record.rebase)
        if lost and (stands.weights_digest is None or (stands.weights_digest, stands.rebase) != mine):
            self.loaded_policies.drop(request.parent)  # the winner's weights are the truth, and may have other bits
        slot.policy, slot.made_under = stands.policy, stands.numerics
        return stands

    def _record(self, request: StepRequest, effect: StepEffect, slot: LoadedPolicy) -> CommitRecord:
        limit = self.spec.max_tokens_per_forward
        numerics = self.backend.numerics().model_copy(
            update={
                "micro_batches": effect.micro_batches,
                "max_tokens_of_updates": effect.max_tokens if set(effect.max_tokens) - {limit} else (),
            }
        )
        due = self._digest_due(slot, request.parent.step + 1)
        whole, parts = slot.trainer.weights_digest() if due else (None, {})
        return CommitRecord(
            request=request,
            state=request.next_state(),
            controllers_out=request.controllers_in,
            metrics=effect.metrics,
            updates=effect.updates,
            skipped=effect.skipped,
            numerics=numerics,
            rebase=slot.rebase,
            weights_digest=whole,
            tensor_digests=tuple(parts[name][:8] for name in sorted(parts)),
        )

    def _digest_due(self, slot: LoadedPolicy, step: int) -> bool:
        every = self.spec.digest_every
        if every is None:
            every = 1 if slot.trainer.weights_nbytes <= SMALL_MODEL_BYTES else 10
        return step % every == 0

    # -- writing -----------------------------------------------------------------------------------------------

    async def begin_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> None:
        """Returns when the files are written on this machine; another thread commits them."""
        await self._compute(policy.run, partial(self._checkpoint, policy, provenance, name, epoch))

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        taken = await self._compute(policy.run, partial(self._checkpoint, policy, provenance, name, epoch))
        if isinstance(taken, ArtifactRef):
            return taken
        ref = await asyncio.shield(asyncio.wrap_future(taken))  # who stops waiting does not stop the upload
        # another caller may have begun the checkpoint without this name
        await asyncio.to_thread(find_policy_checkpoint, self.store, policy, name=name)
        return ref

    def _checkpoint(
        self, policy: PolicyRef, provenance: Provenance, name: str | None, epoch: int
    ) -> ArtifactRef | Future[ArtifactRef]:
        """The committed checkpoint, or the one on its way: begun now if it was not."""
        self._fence(policy.run, epoch)
        check_committed(self.store, policy)
        there = self.saver.under_way(policy) or find_policy_checkpoint(self.store, policy, name=name)
        if there is not None:
            return there
        snapshot = self.saver.take(self.policies.for_training(policy), scratch_folder(self.store), name=name)
        return self.saver.submit(snapshot, provenance)

    def _save_unasked(self, slot: LoadedPolicy) -> None:
        """A checkpoint that nobody waits for: the provenance of the chain's last batch is its own."""
        if self.saver.under_way(slot.policy) or find_policy_checkpoint(self.store, slot.policy, name=None):
            return
        snapshot = self.saver.take(slot, scratch_folder(self.store))
        self.saver.submit(snapshot, batch_provenance(self.store, slot.policy))

    async def export_model(
        self, policy: PolicyRef, model_name: str, *, provenance: Provenance, epoch: int = 0
    ) -> ArtifactRef:
        return await self._compute(policy.run, partial(self._export_model, policy, model_name, provenance, epoch))

    def _export_model(
        self, policy: PolicyRef, model_name: str, provenance: Provenance, epoch: int
    ) -> ArtifactRef:
        self._fence(policy.run, epoch)
        slot = self.policies.for_reading(policy)
        weights_digest, _ = slot.trainer.weights_digest()
        # the version names the content, so that a second export of the same weights is the same version
        version = f"{policy.step:06d}-{digest(canonical_json([weights_digest, policy.state]))[:12]}"
        found = find_published(self.store, model_name, version)
        if found is not None:
            return found
        with scratch(self.store) as folder, scratch(self.store) as base_folder:
            files = slot.trainer.export_merged(folder / "whole")
            if isinstance(slot.trainer, AdapterTrainer):  # beside the whole model, the adapter alone, as peft reads it
                adapter = slot.trainer.export(folder / "adapter")
                files |= {f"adapter/{name}": path for name, path in adapter.items()}
            base_model = base_model_of(self.store, policy)
            base = materialise_files(self.store, base_model.key, base_folder, names=TOKENIZER_FILES)
            publish = partial(
                publish_model,
                self.store,
                model_name,
                files={**base, **files},
                provenance=provenance,
                parents=(policy.uri,),
                extra={"weights_digest": weights_digest, "state": policy.state},
            )
            try:
                return publish(version)
            except VersionConflict:
                # another library version or device was killed while it published: its claim stands, its files do not
                return publish(f"{version}-{digest_of(file_entries({**base, **files}, lambda file: file))[:8]}")

    # -- life --------------------------------------------------------------------------------------------------

    async def release(self, run: str, *, epoch: int = 0) -> None:
        """Returns when the checkpoints of what moved are in the store."""
        await self._compute(run, partial(self._release, run, epoch))
        uploads = [asyncio.wrap_future(future) for future in self.saver.of_run(run)]
        if uploads:
            await asyncio.shield(asyncio.gather(*uploads, return_exceptions=True))  # the saver tells of failures

    def _release(self, run: str, epoch: int) -> None:
        if epoch >= self._epochs.get(run, 0):
            for slot in self.loaded_policies.release(run):
                self._save_unasked(slot)

    async def info(self) -> EngineInfo:
        """Does not wait for the calls before it, but for the first one, which measures the device."""
        if self._speed is None:
            self._speed = await self._compute("", self.backend.operations_per_second)
        root = self.store.local_path("store")
        return EngineInfo(
            numerics=self.backend.numerics(),
            store_id=await asyncio.to_thread(store_id, self.store),
            memory_bytes=self.loaded_policies.budget,
            memory_used_bytes=self.loaded_policies.used_bytes(),
            disk_free_bytes=None if root is None else (await asyncio.to_thread(shutil.disk_usage, root.parent)).free,
            operations_per_second=self._speed,
            devices=self.devices,
            cluster=await asyncio.to_thread(cluster_info, self.backend.actors, self.samplers.actors),
        )

    async def close(self, *, checkpoint: bool = True) -> None:
        """Ends what waits, and a running generation at its next token, with EngineBusy; finishes a running step; and,
        with `checkpoint`, saves every policy that moved past its last checkpoint: who comes next has nothing to redo.
        Whoever cannot wait may kill the process: nothing committed is lost."""
        self._closing.set()
        await asyncio.to_thread(self._close, checkpoint)

    def _close(self, checkpoint: bool) -> None:
        self.queue.close()
        for slot in self.loaded_policies.moved() if checkpoint else []:
            try:
                self._save_unasked(slot)
            except (EngineError, StorageError, OSError) as error:
                log.warning("%s was not checkpointed, a redo will be longer: %s", slot.policy.uri, error)
        self.saver.close()
        self.samplers.close()
        self.backend.close()
