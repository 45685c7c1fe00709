"""The sampler that vLLM is. Four proofs stand between a trainer's weights and a completion that is returned:

  receipt   every tensor arrived with the trainer's names, shapes and bytes        (extension, per sync)
  readback  the live layers compute with these tensors, slice by slice, bit by bit (readback, per sync)
  gap       they give the trainer's logprobs on probe sequences                    (engine.backends.logprob_gap, per
  sync) check     the same processes still hold the same slices                          (per call, after drawing)

What fails one of them is SamplerOutOfSync, and the sampler holds nothing until the next sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.logprob_gap import LogprobGap, allowed_gap, check_logprob_gap, probe_sequences
from engine.backends.prompt_checks import check_prompts
from engine.backends.protocol import OnToken, Trainer
from engine.backends.torch.lora import PEFT_PREFIX
from engine.backends.torch.shared_base import AdapterTrainer, SharedTrainer
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.vllm.host import Host
from engine.backends.vllm.serving.runtime import Manifest, Receipt, Source
from engine.backends.vllm.weight_sync.manifest import digest_of, manifest_of, manifest_of_files
from engine.backends.weight_files.staging import staging_folder
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, TokenIds
from engine.specs.sampler import VllmSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECENT_TOKENS = 64
"""Of a prompt of the last call, which the gap gate looks at too."""


class VllmSampler:
    """Implements engine.backends.protocol.Sampler over the host that `open_host` gives for its trainer's model."""

    def __init__(self, trainer: Trainer, spec: VllmSpec, open_host: Callable[[Trainer], Host]) -> None:
        self.spec, self._open_host = spec, open_host
        self._host: Host | None = open_host(trainer)
        self._host.users.append(self)
        self._state: str | None = None
        self._base: str | None = None
        """What the host must have loaded: the state itself, or the digest of the base that an adapter is on."""
        self._digest: str | None = None
        """And the digest of the manifest that it came with."""
        self._adapter: str | None = None
        """Its name in the runtime."""
        self._adapters_made = 0
        self._load_number = 0
        self._recent: list[TokenIds] = []
        self.receipt: Receipt | None = None
        self.gap: LogprobGap | None = None
        self.seconds: dict[str, float] = {}
        """Of the last sync, by part."""

    @property
    def holds(self) -> str | None:
        """None too where another policy's weights have been loaded into the host, or it sleeps or died."""
        host = self._host
        if host is None or not host.is_open or host.asleep:
            return None
        if (host.loaded, host.digest) != (self._base, self._digest):
            return None
        if self._adapter is not None and host.loads != self._load_number:
            return None
        return self._state

    # -- weights ----------------------------------------------------------------------------------------------

    def sync(self, trainer: Trainer, state: str) -> None:
        began = time.perf_counter()
        host = self._enter(trainer)
        self.seconds = {}
        base = trainer.base.digest if isinstance(trainer, SharedTrainer) else state
        with self._proving(host):
            stays = isinstance(trainer, SharedTrainer) or host.asleep  # a frozen base; the same weights after a sleep
            if not (stays and self._still_there(host, base) and self._same_bytes(trainer, host)):
                self._load(trainer, base, host)
            if isinstance(trainer, AdapterTrainer):
                self._load_adapter(trainer, state, host)
            started = time.perf_counter()
            self._prove_gap(trainer, host)
            self.seconds["gap"] = time.perf_counter() - started
        self._base, self._digest, self._state, self._load_number = base, host.digest, state, host.loads
        self.seconds["all"] = time.perf_counter() - began

    def _enter(self, trainer: Trainer) -> Host:
        """The trainer's host. From here to the end of the sync this sampler holds nothing."""
        self._state = self._base = None
        host = self._open_host(trainer)
        if self._host is not None and host is not self._host and not _same_model(host, self._host):
            raise BadSpec("a sampler can only follow a trainer of the model it was made for; make a new sampler")
        if host is not self._host:
            host.users.append(self)
            self._host = host
        return host

    @staticmethod
    def _still_there(host: Host, base: str) -> bool:
        """Whether the live weights are those of `base`; after a sleep all kept slices are read, else a few."""
        slept = host.wake()
        if host.loaded != base or not host.is_open or host.runtime.wants_weights:
            return False
        try:
            host.runtime.check(base, full=slept)
        except SamplerOutOfSync:
            host.loaded = None
            return False
        return True

    @staticmethod
    def _same_bytes(trainer: Trainer, host: Host) -> bool:
        """Whether the host was loaded with what this trainer has now: by the name of a policy's state it may have been
        what the policy was before a rebase. Where to find out costs as much as a load, no."""
        if isinstance(trainer, SharedTrainer):
            return True  # a base is named by its content
        if not isinstance(trainer, TorchTrainer):
            return False
        return digest_of(manifest_of(_Cast(trainer, DTYPES[host.options.dtype]).items())) == host.digest

    def _load(self, trainer: Trainer, base: str, host: Host) -> None:
        host.wake()
        host.loaded = None
        runtime, first = host.runtime, time.perf_counter()
        with self._staged(trainer, host) as (source, manifest):
            self.seconds["stage"] = time.perf_counter() - first
            host.digest = digest_of(manifest)
            self.receipt = runtime.load(source, manifest, base)
        self.seconds |= self.receipt.seconds
        host.loaded, host.loads = base, host.loads + 1

    @contextmanager
    def _staged(self, trainer: Trainer, host: Host) -> Iterator[tuple[Source, Manifest]]:
        dtype = DTYPES[host.options.dtype]
        here = trainer if isinstance(trainer, TorchTrainer) else None
        if self.spec.transport in ("memory", "ipc", "nccl") and host.runtime.takes_tensors and here is not None:
            tensors = _Cast(here, dtype)
            yield tensors, manifest_of(tensors.items())
            return
        # ranks on other machines do not see the shared memory of this one
        shared = self.spec.sync_folder if self.spec.transport == "checkpoint" or here is None else None
        inside = Path(shared) if shared else None
        with staging_folder(trainer.weights_nbytes, inside=inside) as folder:
            files = trainer.stage_weights(folder, dtype=dtype)
            yield files, manifest_of_files(files) if here is None else manifest_of(_Cast(here, dtype).items())

    def _load_adapter(self, trainer: AdapterTrainer, state: str, host: Host) -> None:
        """Under a name of its own each time: vLLM caches adapters by name."""
        if host.options.max_lora_rank is None or trainer.spec.rank > host.options.max_lora_rank:
            raise BadSpec(
                f"an adapter of rank {trainer.spec.rank} was given; sampler.max_lora_rank is "
                f"{host.options.max_lora_rank}: raise it, or train a smaller rank"
            )
        started = time.perf_counter()
        self._drop_adapter()
        self._adapters_made += 1
        name = f"{state[:24]}-{id(self):x}-{self._adapters_made}"
        manifest = manifest_of((PEFT_PREFIX + own, tensor) for own, tensor in trainer.weights())
        with staging_folder(trainer.nbytes(training=False)) as folder:
            trainer.export(folder)
            host.runtime.load_adapter(folder, name, manifest)
        self._adapter = name
        self.seconds["adapter"] = time.perf_counter() - started

    def _drop_adapter(self) -> None:
        if self._adapter is not None and self._host is not None and self._host.is_open:
            self._host.runtime.remove_adapter(self._adapter)
        self._adapter = None

    def _prove_gap(self, trainer: Trainer, host: Host) -> None:
        probes = probe_sequences(host.architecture.vocab_size, host.options.max_context, self._recent)
        allowed = allowed_gap(self.spec.gap, DTYPES[host.options.dtype], _compute_dtype(trainer))
        self.gap = check_logprob_gap(
            trainer, lambda ids: host.runtime.score(ids, adapter=self._adapter), probes, max_gap=allowed
        )

    @contextmanager
    def _proving(self, host: Host) -> Iterator[None]:
        """What fails inside leaves this sampler without weights, and the host too where they are to blame."""
        try:
            yield
        except (SamplerOutOfSync, WorkerDied):
            self._state = self._base = host.loaded = None
            if not host.is_open:
                host.close()
            raise

    # -- tokens -----------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """As engine.backends.torch.sampler.TorchSampler.sample.

        Raises:
            SamplerOutOfSync: it holds no proven weights, or held others at the end: what was drawn is not returned.
        """
        host, base = self._host, self._base
        if host is None or base is None or self.holds is None:
            raise SamplerOutOfSync("the sampler holds no policy's weights; sync it with the trainer first")
        check_prompts(
            prompts,
            seeds,
            params,
            vocab_size=host.architecture.vocab_size,
            context_length=host.options.max_context,
            eos_token_ids=host.options.eos_token_ids,
        )
        if not prompts:
            return []
        with self._proving(host):
            if self._adapter is not None:  # other policies' adapters may have taken its place
                host.runtime.check_adapter(self._adapter)
            drawn = host.runtime.generate(prompts, seeds, params, on_token, adapter=self._adapter)
            host.runtime.check(base)
            if self._adapter is not None:
                host.runtime.check_adapter(self._adapter)
        self._recent = [list(prompt[:RECENT_TOKENS]) for prompt in prompts[:1]]
        return drawn

    def nbytes(self) -> int:
        host = self._host
        return host.nbytes if host is not None and host.is_open and host.users[0] is self else 0

    def close(self) -> None:
        """The host stays for other policies of the model: it is the backend's."""
        with suppress(WorkerDied, SamplerOutOfSync):  # who is gone has no adapter left to drop
            self._drop_adapter()
        if self._host is not None and self in self._host.users:
            self._host.users.remove(self)
        self._host = self._state = self._base = None


class _Cast(Mapping[str, Tensor]):
    """A trainer's weights in another precision, one tensor at a time."""

    def __init__(self, trainer: TorchTrainer, dtype: torch.dtype) -> None:
        self._weights, self._dtype = dict(trainer.model.exported_weights()), dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name].detach()
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    """A trainer elsewhere is taken to compute in float32: the sampler's own precision then decides the tolerance."""
    return trainer.model.compute_dtype if isinstance(trainer, TorchTrainer) else torch.float32


def _same_model(one: Host, other: Host) -> bool:
    return one.architecture.digest == other.architecture.digest
