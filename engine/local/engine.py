"""`LocalEngine`: the embedded engine.

Calls run in two lanes, in each of which runs take turns (`engine.local.queue`): the trainer lane, whose one thread
makes every call that touches trainers, and the sampler lane (`engine.local.sampling`). This module holds the calls of
the protocol. Loading policies is in `engine.local.materialise`, and memory in `engine.local.loaded_policies`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from engine.backends.factory import create_sampler_backend, create_trainer_backend
from engine.backends.protocol import Interrupted, OnToken, Sampler
from engine.backends.weight_files.tensor_files import checked_parameter_count
from engine.cluster.connection import cluster_info, require_ray
from engine.errors import EngineBusy, EngineError, Fenced
from engine.local.apply import (
    apply_request,
    flatten,
    measure_batch,
    read_sequences,
    read_values,
    require_same_request,
    step_record,
)
from engine.local.loaded_policies import LoadedPolicies, LoadedPolicy, NoRoomYet
from engine.local.materialise import Materialiser, check_committed, create_chain
from engine.local.queue import FairQueue, GenerationBatcher, Interruption, PendingGeneration, sample_completions
from engine.local.rebase import Rebaser
from engine.local.sampling import Holding, SamplerLane, WeightsGone
from engine.local.saving import Saver, batch_provenance, find_policy_checkpoint, publish_policy, scratch_folder
from engine.models.folder import ModelFolder, local_folder, registered_model, registry_version
from engine.models.hub import hub_repo_of_key, import_from_hub
from engine.models.images import check_images_accepted
from engine.models.samples import FloatArray
from engine.protocol import (
    Completion,
    EngineInfo,
    GenerateRequest,
    LogprobsRequest,
    Measurement,
    MeasureRequest,
    PolicySpec,
    PublishDtype,
    RowsRequest,
    SamplerScale,
    TopLogprobs,
    TopRowsRequest,
)
from engine.specs.adapters import parse_trainable
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from engine.text.tokenizers import check_can_end_turns
from storage.chain.leases import current_epoch
from storage.chain.records import Chain, CommitRecord, PolicyRef, StepRequest
from storage.errors import StorageError
from storage.failpoints import failpoint
from storage.registry.models import find_model, publish_model
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import open_store, store_id
from storage.store.tables import check_stored, read_step_table
from storage.worklog import log_work, work_is_logged

R = TypeVar("R")

log = logging.getLogger(__name__)


class LocalEngine:
    """Implements `engine.protocol.Engine` in this process."""

    def __init__(self, store_url: str, spec: LocalEngineSpec | None = None) -> None:
        self.spec = spec or LocalEngineSpec()
        if self.spec.uses_ray:
            require_ray()  # fail before any model is loaded

        # The backends that train and sample, and the policies that they hold.
        self.store = open_store(store_url)
        self.backend = create_trainer_backend(self.spec)
        self.samplers = create_sampler_backend(self.spec, self.backend)
        self.devices = max(self.backend.devices, self.samplers.devices)
        self.saver = Saver(self.store, self.backend.transfers)
        self.loaded_policies = LoadedPolicies(
            budget=self.backend.memory_bytes(),
            protection_seconds=self.spec.residency_seconds,
            max_frozen=self.spec.frozen_policies,
            save=self._save_for_eviction,
        )

        # One thread runs every call that touches trainers, so the materialiser and the policies need no lock.
        self.queue = FairQueue(name="ostinato-engine", prepare=self.backend.prepare_thread)
        self.sampler_lane = SamplerLane(self.samplers.concurrent_calls, self.backend.prepare_thread)
        self.materialiser = Materialiser(
            self.store,
            self.backend,
            self.samplers,
            self.loaded_policies,
            rebaser=Rebaser(self.store, self.backend, self.saver, self.spec),
            stop_check=self.queue.check,
            add_sampler=self.sampler_lane.add,
        )
        self.generation_batcher = GenerationBatcher(max_rows=self.spec.max_rows)
        self._epochs: dict[str, int] = {}
        """The newest epoch of each run that this engine knows."""
        self._speed: float | None = None
        """Measured operations per second. None until the first `info`."""
        self._closing = threading.Event()

    async def _compute(self, run: str, call: Callable[[], R]) -> R:
        """Runs `call` in the trainer lane at the run's turn, and again while there is no memory for it.

        Raises EngineBusy when the memory is still taken after `room_seconds`."""
        deadline = time.monotonic() + self.spec.room_seconds
        while True:
            try:
                return await self.queue.run(run, call)
            except NoRoomYet as error:
                seconds = error.seconds
                # Fail now rather than after a sleep past the deadline.
                if time.monotonic() + seconds > deadline:
                    raise EngineBusy(
                        f"{error}; waited {self.spec.room_seconds:.0f} s for room. Call again later, raise "
                        "engine.memory_gib, or give the run an engine of its own"
                    ) from error
            # Sleep outside the handler: an error that is being handled keeps objects of its frames in memory.
            await asyncio.sleep(seconds)

    def _fence(self, run: str, epoch: int, *, ask_store: bool = False) -> None:
        """Raises Fenced when a newer lease on the run exists, as far as this engine knows.

        Ask the store before a step: a step costs seconds, the request milliseconds. Only leases in the store count. If
        the epochs of callers counted, one wrong call could stop a run."""
        newest = self._epochs.get(run, 0)
        if ask_store or epoch != newest:
            # fewer than before, if the run was deleted and its key is used again
            newest = self._epochs[run] = current_epoch(self.store, run)
        if epoch < newest:
            raise Fenced(
                f"this call acts for run {run!r} in epoch {epoch}, but epoch {newest} has taken over; stop: "
                "another process is driving the run now"
            )

    # -- models and policies -----------------------------------------------------------------------------------

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        repo = hub_repo_of_key(source)
        if repo is not None:
            return await import_from_hub(self.store, repo, partial(self.import_folder, provenance=provenance))
        return await self._compute("", partial(self._import_model, source, provenance))

    def _import_model(self, source: str, provenance: Provenance) -> ArtifactRef:
        path = local_folder(source)
        if path is None:
            return registered_model(self.store, source)
        return self._import_folder(ModelFolder.of(path), provenance)

    async def import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """Publishes a checked folder in the registry. Idempotent."""
        return await self._compute("", partial(self._import_folder, folder, provenance))

    def _import_folder(self, folder: ModelFolder, provenance: Provenance) -> ArtifactRef:
        version = registry_version(folder.digest())
        if find_model(self.store, folder.name, version) is None:
            # Load it once before it is published: a version can never be changed, so it must be a working one.
            need = checked_parameter_count(folder) * self.backend.master_dtype.itemsize
            if self.backend.device.type == "cpu":
                self.loaded_policies.make_room(need, run="", what=f"loading {folder.path.name}")
            self.backend.try_load(folder.path)
            check_can_end_turns(folder.path)
        return publish_model(
            self.store, folder.name, version, folder.files, provenance=provenance, extra={"imported": True}
        )

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        self.spec.check_trainable(parse_trainable(spec.root.trainable))
        return await self._compute(spec.run, partial(create_chain, self.store, spec))

    # -- reading -----------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: OnToken | None = None
    ) -> list[Completion]:
        """Calls `on_token` in a thread of the lane for each sampled token. An error that it raises ends the call.

        Cancelling the caller also ends the call, at the next token."""
        interruption = Interruption(request.interrupt_after) if request.interruptible else None
        call = PendingGeneration(request, on_token=on_token, interruption=interruption)
        # A call that streams its tokens is sampled alone, because its `on_token` may end the generation.
        can_share_batch = on_token is None and not self.spec.deterministic
        if can_share_batch:
            self.generation_batcher.add(call)
        try:
            with self.sampler_lane.interruptible(call):
                return await self._generate(call, epoch)
        except asyncio.CancelledError:
            call.abandoned = True
            raise
        finally:
            self.generation_batcher.remove(call)

    async def _generate(self, call: PendingGeneration, epoch: int) -> list[Completion]:
        """Samples in the sampler lane if a sampler holds the weights, and stages them before if none does. A sampler
        that shares the trainer's weights samples in the trainer lane."""
        policy, tensor_parallel = call.request.policy, self._tensor_parallel(call.request)
        deadline = time.monotonic() + self.spec.room_seconds
        while True:
            if call.is_interrupted:
                return call.without_tokens()
            holding = self.sampler_lane.holding_of(policy, tensor_parallel)
            if holding is None:
                outcome = await self._compute(policy.run, partial(self._sample_or_stage, call, epoch))
                if not isinstance(outcome, Holding):
                    return outcome
                holding = outcome
            try:
                return await self.sampler_lane.queue.run(
                    policy.run,
                    partial(self._sample_in_lane, call, holding, epoch),
                    group=holding.group,
                    cost=_sampled_tokens,
                    order=call.request.order,
                )
            except WeightsGone as error:
                # Other weights were loaded before the turn of this call.
                if time.monotonic() > deadline:
                    raise EngineBusy(f"{error}; tried for {self.spec.room_seconds:.0f} s. Call again later") from error

    def _sample_or_stage(self, call: PendingGeneration, epoch: int) -> list[Completion] | Holding:
        """Runs in the trainer lane. Returns the completions, or the weights that are staged for the sampler lane."""
        policy, tensor_parallel = call.request.policy, self._tensor_parallel(call.request)
        self._fence(policy.run, epoch)
        if call.completions is not None:  # it was sampled in the batch of another call
            check_committed(self.store, policy)
            return call.completions
        if call.is_interrupted:
            return call.without_tokens()
        staged = self.sampler_lane.holding_of(policy, tensor_parallel)
        if staged is not None:  # for another call
            return staged
        loaded = self.materialiser.for_reading(policy)
        sampler = self.materialiser.sampler_for(loaded, policy, tensor_parallel=tensor_parallel)
        if sampler.independent:
            return sampler.stage(loaded.trainer, loaded.weights, policy)

        def sample(
            request: GenerateRequest, on_token: OnToken, interrupted: Interrupted | None
        ) -> list[Completion]:
            return self._sample(self.materialiser.synced(sampler, loaded, policy), request, on_token, interrupted)

        return self.generation_batcher.complete(call, sample)

    def _sample_in_lane(self, call: PendingGeneration, holding: Holding, epoch: int) -> list[Completion]:
        policy = call.request.policy
        self._fence(policy.run, epoch)
        check_committed(self.store, policy)
        if call.completions is not None:  # it was sampled in the batch of another call
            return call.completions
        if call.is_interrupted:
            return call.without_tokens()
        with holding.sampler.holding(holding.weights, policy) as sampler:
            if self.samplers.concurrent_calls > 1:  # the sampler itself batches the calls
                return self.generation_batcher.complete_alone(call, partial(self._sample, sampler))
            return self.generation_batcher.complete(call, partial(self._sample, sampler))

    def _sample(
        self, sampler: Sampler, request: GenerateRequest, on_token: OnToken, interrupted: Interrupted | None
    ) -> list[Completion]:
        numbers = [count() for _ in request.prompts] if work_is_logged() else None

        def on_token_unless_closing(index: int, token: int, logprob: float) -> None:
            if self._closing.is_set():
                raise EngineBusy("the engine is closing; call again when it is back")
            if numbers is not None:
                log_work("token", seed=request.seeds[index], number=next(numbers[index]))
            on_token(index, token, logprob)

        log_work("generate", policy=request.policy.uri, completions=len(request.prompts))
        return sample_completions(sampler, request, on_token_unless_closing, interrupted)

    def _tensor_parallel(self, request: GenerateRequest) -> int | None:
        """The number of devices that the sampler must have. None: the setting of the engine's config."""
        # tp(ctx.world_size) asks for all devices. A sampler with a fixed split uses them all by its config.
        all_devices = self.samplers.tensor_parallel_from_config and request.tensor_parallel == self.devices
        return None if all_devices else request.tensor_parallel

    async def stage_policy(self, policy: PolicyRef, *, epoch: int = 0) -> None:
        await self._compute(policy.run, partial(self._stage_policy, policy, epoch))

    def _stage_policy(self, policy: PolicyRef, epoch: int) -> None:
        self._fence(policy.run, epoch)
        check_committed(self.store, policy)
        if self.sampler_lane.holding_of(policy, None) is not None:
            return
        # A policy that its chain has left would have to be restored here as well as for its first `generate`.
        in_memory = self.loaded_policies.find_by_state(policy.state) is not None
        if in_memory or Chain.of(self.store, policy).record(policy.step + 1) is None:
            loaded = self.materialiser.for_reading(policy)
            sampler = self.materialiser.sampler_for(loaded, policy)
            if sampler.independent:
                sampler.stage(loaded.trainer, loaded.weights, policy)

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        logprobs = await self._compute(request.policy.run, partial(self._logprobs, request, epoch))
        return [row.tolist() for row in logprobs]

    def _logprobs(self, request: LogprobsRequest, epoch: int) -> list[FloatArray]:
        self._fence(request.policy.run, epoch)
        trainer = self.materialiser.for_reading(request.policy).trainer
        check_images_accepted(trainer, request.images, "sequences")
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        return trainer.logprobs(request.sequences, temperature=request.temperature, max_tokens=limit)

    async def top_logprobs(self, request: LogprobsRequest, *, top: int, epoch: int = 0) -> list[FloatArray]:
        """As engine.backends.protocol.Trainer.top_logprobs. Raises BadSpec if the model has fewer tokens, and the
        errors of `logprobs`."""
        return await self._compute(request.policy.run, partial(self._top_logprobs, top, request, epoch))

    async def values(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        values = await self._compute(request.policy.run, partial(self._values, request, epoch))
        return [row.tolist() for row in values]

    def _values(self, request: LogprobsRequest, epoch: int) -> list[FloatArray]:
        self._fence(request.policy.run, epoch)
        trainer = self.materialiser.for_reading(request.policy).trainer
        check_images_accepted(trainer, request.images, "sequences")
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        return read_values(trainer, request.sequences, max_tokens=limit, deterministic=self.spec.deterministic)

    async def logprobs_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        return flatten(await self._score_rows(request, self._logprobs, epoch))

    async def values_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        return flatten(await self._score_rows(request, self._values, epoch))

    async def top_logprobs_of_rows(self, request: TopRowsRequest, *, epoch: int = 0) -> TopLogprobs:
        rows = await self._score_rows(request, partial(self._top_logprobs, request.top), epoch)
        top_TK2 = np.concatenate([np.zeros((0, request.top, 2)), *rows])
        return TopLogprobs(top_TK2[..., 0].astype(np.int32), top_TK2[..., 1])

    def _top_logprobs(self, top: int, request: LogprobsRequest, epoch: int) -> list[FloatArray]:
        self._fence(request.policy.run, epoch)
        trainer = self.materialiser.for_reading(request.policy).trainer
        check_images_accepted(trainer, request.images, "sequences")
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        return trainer.top_logprobs(request.sequences, top=top, temperature=request.temperature, max_tokens=limit)

    async def _score_rows(
        self, request: RowsRequest, score: Callable[[LogprobsRequest, int], list[FloatArray]], epoch: int
    ) -> list[FloatArray]:
        # The rows are read outside the trainer lane, which must not wait for the store.
        sequences = await asyncio.to_thread(read_sequences, self.store, request.tables)
        with_sequences = LogprobsRequest(request.policy, sequences, request.temperature, request.max_tokens)
        return await self._compute(request.policy.run, partial(score, with_sequences, epoch))

    async def measure(self, request: MeasureRequest, *, epoch: int = 0) -> Measurement:
        return await self._compute(request.policy.run, partial(self._measure, request, epoch))

    def _measure(self, request: MeasureRequest, epoch: int) -> Measurement:
        self._fence(request.policy.run, epoch)
        trainer = self.materialiser.for_reading(request.policy).trainer
        limit = request.max_tokens or self.spec.max_tokens_per_forward
        return measure_batch(
            trainer, request, self.store,
            max_tokens=limit, deterministic=self.spec.deterministic, check=self.queue.check,
        )  # fmt: skip

    # -- the step ----------------------------------------------------------------------------------------------

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        """Cancelling the caller ends the step at its next micro-batch, and nothing is committed."""
        return await self._compute(request.parent.run, partial(self._take_gradient_step, request, epoch))

    def _take_gradient_step(self, request: StepRequest, epoch: int) -> CommitRecord:
        # The step may have been committed before.
        self._fence(request.parent.run, epoch, ask_store=True)
        chain = Chain.of(self.store, request.parent)
        committed = chain.record(request.parent.step + 1)
        if committed is not None:
            return require_same_request(committed, request)

        # Load the parent policy, apply the request and commit the record.
        self.samplers.offload_for_training()
        loaded = self.materialiser.for_training(request.parent)
        failpoint("step.before_gradient")
        try:
            self.materialiser.rebaser.before_step(loaded)
            limit = request.max_tokens or self.spec.max_tokens_per_forward
            before = loaded.sketch_before_update()
            effect = apply_request(
                loaded.trainer, request, self.store, max_tokens=limit, check=self.queue.check, read=read_step_table
            )
            log_work("step", policy=request.result().uri, step=request.parent.step + 1)
            update = loaded.update_since(before)
            record = step_record(request, effect, loaded, self.backend.numerics(), self.spec, update=update)
            # The batch may have come from this process's cache. A step without its batch could not be redone.
            check_stored(self.store, request.batch)
            failpoint("step.before_commit")
            # Another process may have taken over during the gradient, which can take minutes.
            self._fence(request.parent.run, epoch, ask_store=True)
            committed = chain.commit(record)
            failpoint("step.after_commit")
            require_same_request(committed, request)
        except BaseException:
            self.loaded_policies.drop(request.parent)  # the weights have changed, but the step was not committed
            raise

        # Another engine may have committed the step first. Keep these weights only if they are known to be the same.
        if (committed.weights_digest, committed.rebase) != (record.weights_digest, record.rebase):
            self.loaded_policies.drop(request.parent)
        loaded.policy, loaded.committed_numerics = committed.policy, committed.numerics
        return committed

    # -- writing -----------------------------------------------------------------------------------------------

    async def begin_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> None:
        """Returns when the files are written on this machine. Another thread uploads and commits them."""
        await self._compute(policy.run, partial(self._checkpoint, policy, provenance, name, epoch))

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        checkpoint = await self._compute(policy.run, partial(self._checkpoint, policy, provenance, name, epoch))
        if isinstance(checkpoint, ArtifactRef):
            return checkpoint
        # Cancelling this caller must not cancel the upload.
        ref = await asyncio.shield(asyncio.wrap_future(checkpoint))
        # another caller may have begun the checkpoint without this name
        await asyncio.to_thread(find_policy_checkpoint, self.store, policy, name=name)
        return ref

    def _checkpoint(
        self, policy: PolicyRef, provenance: Provenance, name: str | None, epoch: int
    ) -> ArtifactRef | Future[ArtifactRef]:
        """The committed checkpoint of the policy, or its upload, which is started if there is neither."""
        self._fence(policy.run, epoch)
        check_committed(self.store, policy)
        # A pending upload first: an upload that ends between the two lookups is then seen by the second one.
        existing = self.saver.pending_upload(policy) or find_policy_checkpoint(self.store, policy, name=name)
        if existing is not None:
            return existing
        loaded = self.materialiser.for_training(policy)
        snapshot = self.saver.write_snapshot(loaded, scratch_folder(self.store), name=name)
        return self.saver.submit(snapshot, provenance)

    def _save_for_eviction(self, loaded: LoadedPolicy) -> None:
        """Starts a checkpoint that no caller asked for. It gets the provenance of the policy's last batch."""
        policy = loaded.policy
        if self.saver.pending_upload(policy) or find_policy_checkpoint(self.store, policy, name=None):
            return
        if self.store.exists(keys.deletion(policy.run)) or Chain.of(self.store, policy).record(policy.step) is None:
            return  # the run was deleted
        snapshot = self.saver.write_snapshot(loaded, scratch_folder(self.store))
        self.saver.submit(snapshot, batch_provenance(self.store, policy))

    async def export_model(
        self,
        policy: PolicyRef,
        model_name: str,
        *,
        provenance: Provenance,
        dtype: PublishDtype = "base",
        epoch: int = 0,
    ) -> ArtifactRef:
        def export() -> ArtifactRef:
            self._fence(policy.run, epoch)
            trainer = self.materialiser.for_reading(policy).trainer
            return publish_policy(self.store, trainer, policy, model_name, provenance=provenance, dtype=dtype)

        return await self._compute(policy.run, export)

    # -- life --------------------------------------------------------------------------------------------------

    async def release(self, run: str, *, epoch: int = 0) -> None:
        """Returns when the checkpoints of all policies that moved are in the store."""
        await self._compute(run, partial(self._release, run, epoch))
        uploads = [asyncio.wrap_future(future) for future in self.saver.pending_uploads(run)]
        if uploads:
            await asyncio.shield(asyncio.gather(*uploads, return_exceptions=True))  # the saver logs failures

    def _release(self, run: str, epoch: int) -> None:
        # A process that lost its lease must not evict the weights that its successor uses.
        if epoch >= self._epochs.get(run, 0):
            for loaded in self.loaded_policies.mark_evict_first(run):
                self._save_for_eviction(loaded)

    async def scale_samplers(self, count: int) -> SamplerScale:
        """Changes the number of vLLM replicas of each model, while calls run. Does not wait for other calls, nor for
        the replicas. An engine that is started again begins with the number in its config.

        Raises BadSpec if the samplers are no replicas, or if the cluster can never run so many."""
        return await asyncio.to_thread(self.samplers.scale, count)

    async def info(self) -> EngineInfo:
        """Does not wait for other calls, except that the first `info` measures the device in the trainer lane."""
        if self._speed is None:
            self._speed = await self._compute("", self.backend.operations_per_second)

        # store_id comes first: it creates the folder of a new store, which disk_usage needs.
        identity = await asyncio.to_thread(store_id, self.store)
        store_path = self.store.local_path("store")
        disk_free_bytes = None
        if store_path is not None:
            usage = await asyncio.to_thread(shutil.disk_usage, store_path.parent)
            disk_free_bytes = usage.free
        return EngineInfo(
            numerics=self.backend.numerics(),
            store_id=identity,
            memory_bytes=self.loaded_policies.budget,
            memory_used_bytes=self.loaded_policies.used_bytes(),
            disk_free_bytes=disk_free_bytes,
            operations_per_second=self._speed,
            devices=self.devices,
            cluster=await asyncio.to_thread(cluster_info, self.backend.actors, self.samplers.actors),
            spec=self._resolved_spec(),
        )

    def _resolved_spec(self) -> LocalEngineSpec:
        """The config, with what the backend uses in place of "auto"."""
        dtype = self.backend.numerics().compute_dtype
        resolved: dict[str, Any] = {"device": self.backend.device.type, "compute_dtype": dtype}
        if isinstance(self.spec.trainer, DeepSpeedSpec) and self.spec.trainer.ranks == "auto":
            resolved["trainer"] = self.spec.trainer.model_copy(update={"ranks": self.backend.devices})
        return self.spec.model_copy(update=resolved)

    async def close(self, *, checkpoint: bool = True) -> None:
        """Stops the engine.

        Waiting calls end with EngineBusy, as does a running generation at its next token. A running step is finished.
        With `checkpoint`, every policy ahead of its last checkpoint is saved, so that the next engine has nothing to
        redo. Killing the process instead loses nothing that was committed."""
        self._closing.set()
        await asyncio.to_thread(self._close, checkpoint)

    def _close(self, checkpoint: bool) -> None:
        # The queues first: after them no call changes the weights that are saved here.
        self.sampler_lane.close()
        self.queue.close()
        unsaved = self.loaded_policies.unsaved() if checkpoint else []
        for loaded in unsaved:
            try:
                self._save_for_eviction(loaded)
            except (EngineError, StorageError, OSError) as error:
                log.warning("%s was not checkpointed, so a later redo takes longer: %s", loaded.policy.uri, error)

        # The saver waits for its uploads, which read only files on disk.
        self.saver.close()
        self.samplers.close()
        self.backend.close()


def _sampled_tokens(completions: list[Completion]) -> float:
    return sum(len(completion.token_ids) for completion in completions)
