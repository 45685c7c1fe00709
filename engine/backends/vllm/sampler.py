"""The vLLM sampler. It returns completions of a trainer's weights only after four proofs:

- delivery: every tensor arrived with the trainer's name, shape and bytes (`extension`, at each load);
- readback: slices of the live layers equal these tensors, bit by bit (`readback`, at each load);
- gap: the logprobs of probe sequences equal the trainer's up to a tolerance, which shows that both compute the same
  function of the bytes: attention, rotary frequencies, precision, and the adapter in use (at each load);
- check: the same processes still hold the same slices (at each call, after sampling).

If a proof fails, SamplerOutOfSync is raised, and the sampler holds no weights until the next load.
"""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.logprob_gap import LogprobGap, allowed_gap, check_logprob_gap, probe_sequences, trainer_logprobs
from engine.backends.protocol import BaseGone, Interrupted, OnToken, Trainer, check_prompts, is_sampled_on_base
from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import count_replicas
from engine.backends.replicas.runtime import (
    LoadProof,
    Manifest,
    Runtime,
    SendsWeights,
    Source,
    digest_of,
    manifest_of,
    manifest_of_files,
)
from engine.backends.torch.lora import ADAPTER_FILE, PEFT_PREFIX
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.vllm.architecture import Architecture, EngineOptions
from engine.backends.weight_files.tensor_files import staging_folder
from engine.errors import BadSpec, SamplerOutOfSync, UnsupportedSchema, WorkerDied
from engine.models.samples import FloatArray
from engine.protocol import ActorCount, Completion, SamplingParams, TokenIds
from engine.specs.adapters import LoraSpec
from engine.specs.engine import VllmSpec
from engine.text.json_grammar import guidance_schema
from engine.text.stops import stop_strings
from engine.text.tokenizers import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECENT_TOKENS = 64
"""Leading tokens of the last call's first prompt that become a probe sequence of the gap check."""


class VllmSampler:
    """Implements engine.backends.protocol.Sampler over a runtime that policies of the same model share."""

    def __init__(
        self,
        trainer: Trainer,
        spec: VllmSpec,
        open_shared: Callable[[Trainer], SharedRuntime],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`open_shared` returns the shared runtime for a trainer's model. `tokenizer` finds stop strings."""
        self.spec, self._open_shared, self._tokenizer = spec, open_shared, tokenizer
        self._shared: SharedRuntime | None = open_shared(trainer)
        self._shared.users.append(self)
        self._base_of_adapters = _base_of_adapters(trainer)
        """Digest of the base that its adapters change. None: it samples whole models."""
        self._state: str | None = None
        """State of the policy that the sampler was last synced with."""
        self._base: str | None = None
        """Name of the weights that the runtime must have loaded: the state, or for an adapter the digest of its base.
        """
        self._digest: str | None = None
        """Digest of the manifest of these weights."""
        self._adapter: str | None = None
        """Name of the adapter in the runtime."""
        self._adapter_count = 0
        self._load_number = 0
        """`SharedRuntime.loads` at the last sync. A later load has dropped the adapter."""
        self._recent_prompts: list[TokenIds] = []
        """Shared with the samplers of the same group."""
        self.load_proof: LoadProof | None = None
        self.gap: LogprobGap | None = None
        self.seconds: dict[str, float] = {}
        """Duration of each part of the last stage and load."""

    @property
    def loaded_state(self) -> str | None:
        """State of the policy whose weights it holds. None also if the runtime sleeps, has died, or has loaded the
        weights of another policy since."""
        shared = self._shared
        if shared is None or not shared.is_open or shared.asleep:
            return None
        if (shared.loaded, shared.digest) != (self._base, self._digest):
            return None
        if self._adapter is not None and shared.loads != self._load_number:
            return None
        return self._state

    @property
    def independent(self) -> bool:
        """True for replicas that do not sleep during gradient steps. vLLM in the trainer's process changes global
        state of torch while it starts and loads weights."""
        return bool(self.spec.replicas) and self._shared is not None and not self._shared.options.sleep

    @property
    def base_group(self) -> Hashable | None:
        if self._base_of_adapters is None or not self.independent:
            return None
        return id(self._shared), self._base_of_adapters

    def in_same_group(self) -> VllmSampler:
        sampler = copy.copy(self)
        sampler._state = sampler._base = sampler._adapter = None
        assert sampler._shared is not None  # it is not closed
        sampler._shared.users.append(sampler)
        return sampler

    # -- weights ----------------------------------------------------------------------------------------------

    def stage(self, trainer: Trainer, state: str) -> StagedForVllm:
        start = time.perf_counter()
        shared = self._open_shared(trainer)
        if self._shared is not None and shared is not self._shared and not _is_same_model(shared, self._shared):
            raise BadSpec("a sampler can only follow a trainer of the model it was made for; make a new sampler")
        # Without a base that vLLM can hold under adapters, the weights are those of this state.
        base_of_adapters = _base_of_adapters(trainer)
        on_base, base = base_of_adapters is not None, base_of_adapters or state
        probes = probe_sequences(shared.architecture.vocab_size, shared.options.max_context, self._recent_prompts)
        tolerance = allowed_gap(self.spec.gap, DTYPES[shared.options.dtype], _compute_dtype(trainer))
        staged = StagedForVllm(state, base, shared, on_base, probes, tolerance=tolerance)
        with ExitStack() as folders:
            # The weights of a base never change, so they are staged only if the runtime does not hold them.
            if not (on_base and self._has_base(shared, base)):
                staged.source, staged.manifest = self._stage_weights(trainer, shared, folders)
            if on_base and trainer.adapter is not None:
                staged.adapter = self._stage_adapter(trainer, trainer.adapter, shared, folders)
            staged.expected_logprobs = trainer_logprobs(trainer, probes)
            staged.folders = folders.pop_all()
        staged.seconds["stage"] = time.perf_counter() - start
        return staged

    def load(self, staged: StagedForVllm) -> None:
        # One at a time: several samplers of a base group may find that its base must be loaded.
        with staged.shared.loading:
            self._load_staged(staged)

    def _load_staged(self, staged: StagedForVllm) -> None:
        start, shared = time.perf_counter(), staged.shared
        # Until the end of the load this sampler holds no weights.
        self._state = self._base = None
        if shared is not self._shared:
            shared.users.append(self)
            self._shared = shared
        self.seconds = dict(staged.seconds)
        with self._resets_on_failure(shared):
            # Skip the load if the runtime still holds the weights: a frozen base, or weights before a sleep. The state
            # alone is no proof: the policy may have been recomputed since, with other bytes.
            may_hold = staged.on_base or shared.asleep
            has_same_bytes = staged.on_base or digest_of(staged.manifest) == shared.digest
            if not (may_hold and has_same_bytes and self._holds_base(shared, staged.base)):
                self._load(staged)
            if staged.adapter is not None:
                self._load_adapter(staged, *staged.adapter)
            gap_start = time.perf_counter()

            def score(sequences: Sequence[TokenIds]) -> list[list[float]]:
                return shared.ensure_running().score(sequences, adapter=self._adapter)

            self.gap = check_logprob_gap(
                staged.expected_logprobs, score, staged.probes, tolerance=staged.tolerance
            )
            self.seconds["gap"] = time.perf_counter() - gap_start
        # Set the state last: the sampler holds no weights until every proof has passed.
        self._base, self._digest, self._state = staged.base, shared.digest, staged.state
        self._load_number = shared.loads
        self.seconds["load all"] = time.perf_counter() - start

    def _has_base(self, shared: SharedRuntime, base: str) -> bool:
        """Whether `load` need not load the base, as far as can be told before its turn."""
        if not self.independent:  # `load` follows at once
            return self._holds_base(shared, base)
        return shared.loaded == base and shared.is_open and not shared.ensure_running().needs_weights

    @staticmethod
    def _holds_base(shared: SharedRuntime, base: str) -> bool:
        """Whether the live weights are those of `base`. After a sleep all slices are read again, otherwise a few."""
        was_asleep = shared.wake()
        if shared.loaded != base or not shared.is_open or shared.ensure_running().needs_weights:
            return False
        try:
            shared.ensure_running().check(base, full=was_asleep)
        except SamplerOutOfSync:
            shared.loaded = None
            return False
        return True

    def _load(self, staged: StagedForVllm) -> None:
        shared = staged.shared
        if staged.source is None:
            raise BaseGone("vLLM has lost the base model since the adapter was staged; call again")
        shared.wake()
        # From here on the runtime holds no known weights, until the load has proven them.
        shared.loaded = None
        shared.digest = digest_of(staged.manifest)
        self.load_proof = shared.ensure_running().load(staged.source, staged.manifest, staged.base)
        self.seconds |= self.load_proof.seconds
        shared.loaded, shared.loads = staged.base, shared.loads + 1

    def _stage_weights(self, trainer: Trainer, shared: SharedRuntime, folders: ExitStack) -> tuple[Source, Manifest]:
        """The weights to load: the tensors themselves if runtime and transport accept them, otherwise files. Weights
        that the trainer's processes send stay there."""
        dtype = DTYPES[shared.options.dtype]
        merges = trainer.base is not None and not is_sampled_on_base(trainer)
        local_trainer = trainer if isinstance(trainer, TorchTrainer) and not merges else None
        # The ranks of a trainer send the weights of a broadcast themselves.
        if self.spec.transport == "nccl" and isinstance(trainer, SendsWeights):
            held = trainer.hold_weights(dtype=dtype)
            folders.callback(held.close)
            return held, held.manifest
        # Replicas get tensors by a broadcast. In this process only an engine of one worker takes them.
        transports = ("nccl",) if self.spec.replicas else ("memory", "ipc")
        takes_tensors = self.spec.replicas > 0 or shared.options.tensor_parallel == 1
        if takes_tensors and self.spec.transport in transports and local_trainer is not None:
            tensors: Mapping[str, Tensor] = _ConvertedWeights(local_trainer, dtype)
            if self.independent:  # the trainer may change its tensors before they are loaded
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return tensors, manifest_of(tensors.items())
        # Ranks may run on other machines, which cannot write into the shared memory of this one.
        parent: Path | None = None
        if self.spec.sync_folder and (self.spec.transport == "checkpoint" or local_trainer is None):
            parent = Path(self.spec.sync_folder)
        folder = folders.enter_context(staging_folder(trainer.weights_nbytes, inside=parent))
        files = trainer.stage_weights(folder, dtype=dtype)
        if local_trainer is None:
            return files, manifest_of_files(files)
        return files, manifest_of(_ConvertedWeights(local_trainer, dtype).items())

    def _stage_adapter(
        self, trainer: Trainer, adapter: LoraSpec, shared: SharedRuntime, folders: ExitStack
    ) -> tuple[Path, Manifest]:
        """The folder of the trainer's adapter, and its manifest."""
        if shared.options.max_lora_rank is None or adapter.rank > shared.options.max_lora_rank:
            raise BadSpec(
                f"an adapter of rank {adapter.rank} was given; sampler.max_lora_rank is "
                f"{shared.options.max_lora_rank}: raise it, or train a smaller rank"
            )
        # Ranks may run on other machines, which cannot write into the shared memory of this one.
        local_trainer = trainer if isinstance(trainer, TorchTrainer) else None
        parent = Path(self.spec.sync_folder) if self.spec.sync_folder and local_trainer is None else None
        folder = folders.enter_context(staging_folder(trainer.nbytes(training=False), inside=parent))
        trainer.export(folder)
        if local_trainer is None:
            return folder, manifest_of_files([folder / ADAPTER_FILE])
        weights = local_trainer.weights()
        return folder, manifest_of((PEFT_PREFIX + tensor_name, tensor) for tensor_name, tensor in weights)

    def _load_adapter(self, staged: StagedForVllm, folder: Path, manifest: Manifest) -> None:
        """Loads the adapter under a new name each time, because vLLM caches adapters by name."""
        started = time.perf_counter()
        self._remove_adapter()
        self._adapter_count += 1
        name = f"{staged.state[:24]}-{id(self):x}-{self._adapter_count}"
        staged.shared.ensure_running().load_adapter(folder, name, manifest)
        self._adapter = name
        self.seconds["adapter"] = time.perf_counter() - started

    def _remove_adapter(self) -> None:
        if self._adapter is not None and self._shared is not None and self._shared.is_open:
            self._shared.ensure_running().remove_adapter(self._adapter)
        self._adapter = None

    @contextmanager
    def _resets_on_failure(self, shared: SharedRuntime, *, keeps_base: bool = False) -> Iterator[None]:
        """After a failed proof inside the block, neither this sampler nor, without `keeps_base`, the runtime counts as
        holding weights."""
        try:
            yield
        except (SamplerOutOfSync, WorkerDied):
            self._state = self._base = None
            if not keeps_base:
                shared.loaded = None
            if not shared.is_open:
                shared.close()
            raise

    # -- tokens -----------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        """As engine.backends.torch.sampler.TorchSampler.sample.

        Raises:
            UnsupportedSchema: json_schema with tokens that earlier calls sampled: vLLM cannot go on within a JSON.
            SamplerOutOfSync: the sampler holds no proven weights, or the weights changed during the call. No completion
                is returned.
        """
        shared, base = self._shared, self._base
        if shared is None or base is None or self.loaded_state is None:
            raise SamplerOutOfSync("the sampler holds no policy's weights; sync it with the trainer first")
        check_prompts(
            prompts,
            seeds,
            params,
            vocab_size=shared.architecture.vocab_size,
            context_length=shared.options.max_context,
            eos_token_ids=shared.options.eos_token_ids,
            sampled=sampled,
        )
        if params.json_schema is not None and any(sampled or ()):
            raise UnsupportedSchema(
                "json_schema was given with completions that have tokens already, and vLLM can only constrain whole "
                "completions; use the torch sampler (engine.sampler.kind='torch'), or leave json_schema out"
            )
        stops = stop_strings(self._tokenizer, params)
        if params.json_schema is not None:
            params = params.model_copy(update={"json_schema": guidance_schema(self._tokenizer, params.json_schema)})
        if not prompts:
            return []
        runtime, adapter, loads = shared.ensure_running(), self._adapter, shared.loads
        if adapter is not None:
            # vLLM may have dropped it to make room for the adapters of other policies, which the base survives.
            with self._resets_on_failure(shared, keeps_base=True):
                runtime.check_adapter(adapter)
        with self._resets_on_failure(shared):
            completions = runtime.generate(
                prompts, seeds, params, on_token,
                adapter=adapter, stops=stops, sampled=sampled, interrupted=interrupted,
            )  # fmt: skip
            # Check again after sampling, so that no completion of changed weights is returned. The base last: its check
            # also fails if a process that sampled has ended, and with it the adapter that it used.
            if adapter is not None:
                runtime.check_adapter(adapter)
            runtime.check(base)
            if (shared.loaded, shared.loads) != (base, loads):
                raise SamplerOutOfSync("another call of the same base loaded the base again while this one sampled")
        # The gap check of the next sync also probes a real prompt, not only random tokens.
        self._recent_prompts[:] = [list(prompt[:RECENT_TOKENS]) for prompt in prompts[:1]]
        return completions

    def nbytes(self) -> int:
        shared = self._shared
        if shared is None or not shared.is_open:
            return 0
        # The oldest user reports the memory that all users share, so that it is counted once.
        return shared.nbytes if shared.users[:1] == [self] else 0

    def close(self) -> None:
        """Removes the adapter. The runtime stays open, since other policies of the model may use it."""
        with suppress(WorkerDied, SamplerOutOfSync):  # a runtime that is gone has no adapter to remove
            self._remove_adapter()
        if self._shared is not None and self in self._shared.users:
            self._shared.users.remove(self)
        self._shared = self._state = self._base = None


@dataclass
class StagedForVllm:
    """The weights of a policy as vLLM takes them, and what the trainer computes with them."""

    state: str
    base: str
    """Name of the weights that vLLM must have loaded: the state, or for an adapter the digest of its base."""
    shared: SharedRuntime
    on_base: bool
    probes: list[TokenIds]
    """The sequences of the gap check."""
    tolerance: float
    """Largest mean gap, in nats."""
    expected_logprobs: list[FloatArray] = field(default_factory=list)
    """The trainer's logprobs of the probes."""
    source: Source | None = None
    """None: vLLM holds the base already."""
    manifest: Manifest = field(default_factory=dict)
    adapter: tuple[Path, Manifest] | None = None
    """Folder of the adapter in peft's format, and its manifest."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part of `stage`."""
    folders: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.source = None
        self.folders.close()


class _ConvertedWeights(Mapping[str, Tensor]):
    """A trainer's weights, converted to another precision one tensor at a time."""

    def __init__(self, trainer: TorchTrainer, dtype: torch.dtype) -> None:
        self._weights, self._dtype = dict(trainer.model.exported_weights()), dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name].detach()
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _base_of_adapters(trainer: Trainer) -> str | None:
    """Digest of the base that vLLM holds under the trainer's adapter. None: it takes whole models."""
    return trainer.base.digest if trainer.base is not None and is_sampled_on_base(trainer) else None


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    """The precision in which the trainer computes. A trainer in other processes is assumed to compute in float32, so
    that the sampler's own precision decides the tolerance."""
    return trainer.model.compute_dtype if isinstance(trainer, TorchTrainer) else torch.float32


def _is_same_model(shared: SharedRuntime, other: SharedRuntime) -> bool:
    return shared.architecture.digest == other.architecture.digest


@dataclass(slots=True, eq=False)
class SharedRuntime:
    """A runtime that is started at its first use, and started again after it has died."""

    architecture: Architecture
    options: EngineOptions
    config_folder: Path
    start: Callable[[Path, EngineOptions], Runtime]
    """Starts a runtime from the config folder and the options."""
    nbytes: int
    """Bytes of the engine's memory that the runtime takes; 0 for replicas."""
    loaded: str | None = None
    """Name of the weights that the runtime was last proven to hold: a policy's state, or the digest of a base."""
    digest: str | None = None
    """Digest of the manifest of these weights. The state does not identify the bytes: a policy that was recomputed with
    other numerics has the same state and other bytes."""
    loads: int = 0
    """Number of weight loads. vLLM drops all adapters at each load."""
    asleep: bool = False
    users: list[object] = field(default_factory=list)
    """The samplers that use it, the oldest first. The oldest one reports the memory of the runtime as its own."""
    loading: threading.Lock = field(default_factory=threading.Lock)
    """Held while weights or an adapter are loaded."""
    _runtime: Runtime | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while the runtime is started or closed: several calls may notice at once that it has died."""

    def ensure_running(self) -> Runtime:
        """Returns the runtime. Starts it if it does not run yet or has died, which takes seconds to minutes."""
        with self._lock:
            if self._runtime is not None and not self._runtime.alive:
                self.close()
            if self._runtime is None:
                self._runtime = self.start(self.config_folder, self.options)
            return self._runtime

    @property
    def is_open(self) -> bool:
        runtime = self._runtime  # read once: another thread may close the runtime meanwhile
        return runtime is not None and runtime.alive

    @property
    def actors(self) -> ActorCount:
        """Number of replicas. Any thread may use it."""
        runtime = self._runtime  # read once: another thread may close the runtime meanwhile
        if isinstance(runtime, ReplicaPool):
            return count_replicas(runtime.replicas)
        return ActorCount()

    def scale(self, count: int) -> None:
        """Changes the number of replicas of a pool that runs. If it is being started, this waits until it runs."""
        with self._lock:
            if isinstance(self._runtime, ReplicaPool) and self._runtime.alive:
                self._runtime.scale(count)

    def sleep(self) -> None:
        """Frees device memory, if the options allow it."""
        if self.options.sleep and self.is_open and not self.asleep:
            self.ensure_running().sleep()
            self.asleep = True

    def wake(self) -> bool:
        """Ends a sleep. Returns whether the runtime was asleep. Then its weights may be lost, and must be checked."""
        if not self.asleep:
            return False
        self.asleep = False
        runtime = self.ensure_running()
        runtime.wake()
        runtime.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Ends the runtime. The next use starts another one, without weights."""
        with self._lock:
            self.loaded, self.asleep = None, False
            if self._runtime is not None:
                runtime, self._runtime = self._runtime, None
                runtime.close()

    def discard(self) -> None:
        """Ends the runtime for good, and deletes the config folder."""
        self.close()
        shutil.rmtree(self.config_folder, ignore_errors=True)
