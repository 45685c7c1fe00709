"""`LocalEngine`: the embedded engine. Every call runs in one compute thread, in the order it was made."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from engine.backends.causal_lm import PICKLE_SUFFIXES, check_model_folder
from engine.backends.torch_backend import TorchBackend
from engine.errors import BadModelFolder, Fenced, PermanentEngineError, StepConflict, UnknownPolicy
from engine.local.apply import Effect, apply_request
from engine.local.materialise import Materialiser, Slot
from engine.protocol import Completion, EngineInfo, GenerateRequest, LogprobsRequest, PolicySpec
from engine.spec import LocalEngineSpec
from engine.text.tokenizers import TOKENIZER_FILES, load_tokenizer
from storage import keys
from storage.artifacts import (
    ArtifactRef,
    Provenance,
    commit_files,
    digest_of,
    file_entries,
    find_artifact,
    materialise_files,
)
from storage.chain import Chain, CommitRecord, PolicyRef, StepRequest
from storage.failpoints import failpoint
from storage.leases import current_epoch
from storage.models import canonical_json, digest
from storage.objects import open_store
from storage.registry import find_model, find_published, publish_model
from storage.worklog import log_work

P = ParamSpec("P")
R = TypeVar("R")

SMALL_MODEL_BYTES = 256 << 20
"""Up to this many bytes of weights, every commit record carries their digest."""


class LocalEngine:
    """Implements engine.protocol.Engine in this process."""

    def __init__(self, store_url: str, spec: LocalEngineSpec | None = None) -> None:
        self.spec = spec or LocalEngineSpec()
        self.store = open_store(store_url)
        self.backend = TorchBackend(self.spec)
        self.policies = Materialiser(self.store, self.backend, frozen_policies=self.spec.frozen_policies)
        self._epochs: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="ostinato-engine", initializer=self.backend.prepare_thread
        )

    async def _compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = lambda: function(*args, **kwargs)  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _fence(self, run: str, epoch: int, *, ask_store: bool = False) -> None:
        """Refuses a caller whose lease was taken over, as far as this engine has heard; `ask_store` hears of leases
        taken by other processes too, for a listing: a step is dear enough to ask first."""
        newest = self._epochs.get(run, 0)
        if ask_store:
            newest = max(newest, current_epoch(self.store, run))
        if epoch < newest:
            raise Fenced(
                f"this call acts for run {run!r} in epoch {epoch}, but epoch {newest} has taken over; stop: "
                "another process is driving the run now"
            )
        self._epochs[run] = epoch

    # -- models and policies -----------------------------------------------------------------------------------

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        return await self._compute(self._import_model, source, provenance)

    def _import_model(self, source: str, provenance: Provenance) -> ArtifactRef:
        folder = Path(os.path.expanduser(source))
        if source and folder.is_dir():
            check_model_folder(folder)
            entries = [path for path in sorted(folder.iterdir()) if path.is_file()]
            files = {path.name: path for path in entries if path.suffix not in PICKLE_SUFFIXES}
            files.pop("manifest.json", None)
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
            version = digest_of(file_entries(files, lambda file: file))[:12]
            if find_model(self.store, name, version) is None:
                self.backend.load(folder)  # a version never changes: what does not load must not become one
                load_tokenizer(folder)
            return publish_model(self.store, name, version, files, provenance=provenance, extra={"imported": True})
        name, _, version = source.partition("@")
        if folder.exists() or "/" in source or source.startswith(".") or source.endswith("@"):
            raise BadModelFolder(f"{source!r} is not a model folder; give a folder, or the key of a registered model")
        found = find_model(self.store, name, version or None)
        if found is None:
            raise BadModelFolder(
                f"no model {source!r}: not a local folder, and not registered in {self.store.url}; give an existing "
                "Hugging Face folder, or a key that `save` returned"
            )
        return found

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        return await self._compute(self._create_policy, spec)

    def _create_policy(self, spec: PolicySpec) -> PolicyRef:
        if (spec.root.base is None) == (spec.root.start is None):
            raise PermanentEngineError("a chain starts from a base model or from an earlier policy: give exactly one")
        chain = Chain(self.store, spec.run, spec.stage, spec.model)
        stands = chain.create_root(spec.root)
        if stands.state() != spec.root.state():
            raise StepConflict(
                f"the chain {spec.run}/{spec.stage}/{spec.model} starts from {stands.base_digest[:12]}, but "
                f"{spec.root.base_digest[:12]} was given: the base model, the trainable part or the seed changed; "
                "use another run key"
            )
        return chain.policy(0)

    # -- reading -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        return await self._compute(self._generate, request, epoch)

    def _generate(self, request: GenerateRequest, epoch: int) -> list[Completion]:
        self._fence(request.policy.run, epoch)
        slot = self.policies.for_reading(request.policy)
        if slot.sampler is None:
            slot.sampler = self.backend.sampler(slot.trainer)
        elif slot.synced != request.policy.state:
            self.backend.sync(slot.trainer, slot.sampler)
        slot.synced = request.policy.state
        log_work("generate", policy=request.policy.uri, completions=len(request.prompts))
        return slot.sampler.sample(request.prompts, request.seeds, request.sampling)

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        return await self._compute(self._logprobs, request, epoch)

    def _logprobs(self, request: LogprobsRequest, epoch: int) -> list[list[float]]:
        self._fence(request.policy.run, epoch)
        slot = self.policies.for_reading(request.policy)
        return slot.trainer.logprobs(
            request.sequences, temperature=request.temperature, max_tokens=self.spec.max_tokens_per_forward
        )

    # -- the step ----------------------------------------------------------------------------------------------

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        return await self._compute(self._take_gradient_step, request, epoch)

    def _take_gradient_step(self, request: StepRequest, epoch: int) -> CommitRecord:
        self._fence(request.parent.run, epoch, ask_store=True)
        chain = Chain.of(self.store, request.parent)
        committed = chain.record(request.parent.step + 1)
        if committed is not None:
            return _same_step(committed, request)
        slot = self.policies.for_training(request.parent)
        failpoint("step.before_gradient")
        try:
            effect = apply_request(
                slot.trainer, request, self.store, max_tokens=self.spec.max_tokens_per_forward
            )
            log_work("step", policy=request.result().uri, step=request.parent.step + 1)
            record = self._record(request, effect, slot)
            failpoint("step.before_commit")
            stands = chain.commit(record)
            failpoint("step.after_commit")
            _same_step(stands, request)
        except BaseException:
            self.policies.drop(request.parent)  # the weights moved, and no commit stands for where they are
            raise
        if stands.weights_digest != record.weights_digest:
            self.policies.drop(request.parent)  # lost a race to other numerics: the winner's weights are the truth
        slot.policy = stands.policy
        return stands

    def _record(self, request: StepRequest, effect: Effect, slot: Slot) -> CommitRecord:
        numerics = self.backend.numerics().model_copy(update={"micro_batches": effect.micro_batches})
        step = request.parent.step + 1
        return CommitRecord(
            request=request,
            state=request.next_state(),
            controllers_out=request.controllers_in,
            metrics=effect.metrics,
            updates=effect.updates,
            skipped=effect.skipped,
            numerics=numerics,
            weights_digest=slot.trainer.weights_digest()[0] if self._digest_due(slot, step) else None,
        )

    def _digest_due(self, slot: Slot, step: int) -> bool:
        every = self.spec.digest_every
        if every is None:
            size = sum(t.numel() * t.element_size() for _, t in slot.trainer.model.named_weights())
            every = 1 if size <= SMALL_MODEL_BYTES else 10
        return step % every == 0

    # -- writing -----------------------------------------------------------------------------------------------

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        return await self._compute(self._save_checkpoint, policy, provenance, name, epoch)

    def _save_checkpoint(self, policy: PolicyRef, provenance: Provenance, name: str | None, epoch: int) -> ArtifactRef:
        self._fence(policy.run, epoch)
        self.policies.check_committed(policy)
        key = keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)
        found = find_artifact(self.store, key)
        if found is not None:
            if name is not None:
                self.store.put_if_absent(keys.checkpoint_name(key), canonical_json({"name": name}))
            return found
        slot = self.policies.for_training(policy)
        extra = {"state": policy.state, "name": name, "weights_digest": slot.trainer.weights_digest()[0]}
        with self.policies.scratch() as folder:
            files = slot.trainer.write_checkpoint(folder)
            log_work("checkpoint", policy=policy.uri, step=policy.step)
            return commit_files(
                self.store,
                key,
                files,
                kind="checkpoint",
                parents=(policy.uri,),
                provenance=provenance,
                extra=extra,
            )

    async def export_model(
        self, policy: PolicyRef, model_name: str, *, provenance: Provenance, epoch: int = 0
    ) -> ArtifactRef:
        return await self._compute(self._export_model, policy, model_name, provenance, epoch)

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
        with self.policies.scratch() as folder, self.policies.scratch() as base_folder:
            files = slot.trainer.export(folder)
            base = materialise_files(self.store, self._base_of(policy).key, base_folder, names=TOKENIZER_FILES)
            return publish_model(
                self.store,
                model_name,
                version,
                {**base, **files},
                provenance=provenance,
                parents=(policy.uri,),
                extra={"weights_digest": weights_digest, "state": policy.state},
            )

    def _base_of(self, policy: PolicyRef) -> ArtifactRef:
        """The registered model that a chain, or the chain it continues, started from."""
        root = Chain.of(self.store, policy).root()
        while root is not None and root.start is not None:
            root = Chain.of(self.store, root.start).root()
        if root is None or root.base is None:
            raise UnknownPolicy(f"{policy.uri} does not descend from a registered model")
        return root.base

    # -- life --------------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        return EngineInfo(numerics=self.backend.numerics())

    async def close(self) -> None:
        """Waits for the running call and ends the compute thread."""
        await asyncio.to_thread(self._thread.shutdown)


def _same_step(committed: CommitRecord, request: StepRequest) -> CommitRecord:
    """The committed record if it answers this very request; the pure decision behind exactly-once."""
    if committed.request.digest() == request.digest():
        return committed
    mine, theirs = request.content(), committed.request.content()
    differing = sorted(name for name in mine if mine[name] != theirs[name])
    raise StepConflict(
        f"step {request.parent.step + 1} of {request.parent.run}/{request.parent.stage}/{request.parent.model} was "
        f"taken with batch {committed.request.batch.sha256[:12]}, not {request.batch.sha256[:12]} "
        f"(differing: {', '.join(differing)}); a committed step is never taken again: fork the run before it"
    )
