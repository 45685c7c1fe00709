"""The vLLM backend: who gets which host. In this process there is room for one engine at a time, since all of them
share torch's process group; servers (engine.backends.vllm.pool) are one pool per architecture.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch

from engine.backends.lora import short_names
from engine.backends.protocol import Trainer
from engine.backends.shared_base import SharedTrainer
from engine.backends.vllm.adapter import CPU_KV_CACHE_BYTES, InProcess
from engine.backends.vllm.architecture import Architecture, architecture_of
from engine.backends.vllm.host import Host
from engine.backends.vllm.runtime import EXTENSION, EngineOptions, Runtime
from engine.backends.vllm.sampler import DTYPES, VllmSampler
from engine.errors import BadSpec
from engine.sampler_spec import VllmSpec
from engine.spec import LocalEngineSpec

_Key = tuple[str, int, bool]


class VllmSamplers:
    """Implements engine.backends.protocol.SamplerBackend. `extension` is what runs inside vLLM's workers."""

    def __init__(
        self,
        spec: LocalEngineSpec,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        extension: str = EXTENSION,
    ) -> None:
        assert isinstance(spec.sampler, VllmSpec)
        self.spec, self._rows, self._extension = spec.sampler, spec.max_rows, extension
        self.device = device
        names: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
        if compute_dtype not in names:
            raise BadSpec(f"vLLM computes in {' or '.join(DTYPES)}; compute_dtype {compute_dtype} was given")
        self._dtype = cast(Literal["float32", "bfloat16"], names[compute_dtype])
        self._in_process = not self.spec.servers and not self.spec.urls
        if refused := _refused(self.spec):
            raise BadSpec(f"sampler.transport={self.spec.transport!r} was given, but {refused}")
        self._hosts: dict[_Key, Host] = {}

    @property
    def devices(self) -> int:
        return self.spec.tensor_parallel * max(1, self.spec.servers, len(self.spec.urls))

    @property
    def fixed_spread(self) -> bool:
        return not self._in_process

    def new_bytes(self, trainer: Trainer) -> int:
        if not self._in_process or any(host.is_open and host.users for host in self._hosts.values()):
            return 0  # elsewhere; or in the place of the engine that is there, or with it
        return self._nbytes(trainer)

    def sampler(self, trainer: Trainer, *, tensor_parallel: int | None = None) -> VllmSampler:
        ranks = tensor_parallel or self.spec.tensor_parallel
        if self.spec.servers and ranks != self.spec.tensor_parallel:
            raise BadSpec(
                f"tp({ranks}) was asked for, but the sampler's servers run with tensor_parallel="
                f"{self.spec.tensor_parallel}; set sampler.tensor_parallel, or leave tp out"
            )
        return VllmSampler(trainer, self.spec, partial(self._host_of, ranks=ranks))

    def make_way(self) -> None:
        for host in self._hosts.values():
            host.sleep()

    def close(self) -> None:
        for host in self._hosts.values():
            host.discard()
        self._hosts.clear()

    def _host_of(self, trainer: Trainer, *, ranks: int) -> Host:
        """The host of the trainer's architecture, made if there is none, in this process in the place of another."""
        folder = Path(tempfile.mkdtemp(prefix="ostinato-config-"))
        trainer.write_config(folder)
        architecture = architecture_of(folder)
        key = (architecture.digest, ranks, isinstance(trainer, SharedTrainer))
        if self._in_process:
            for other, host in self._hosts.items():
                if other != key:
                    host.close()
        if key in self._hosts:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
            return self._hosts[key]
        nbytes = self._nbytes(trainer) if self._in_process else 0
        options = self._options(trainer, architecture, ranks)
        self._hosts[key] = Host(architecture, options, folder, self._open, nbytes)
        return self._hosts[key]

    def _open(self, config_folder: Path, options: EngineOptions) -> Runtime:
        if self._in_process:
            return InProcess(config_folder, options)
        from engine.backends.vllm.opening import open_pool

        return open_pool(self.spec, config_folder, options, self.device)

    def _options(self, trainer: Trainer, architecture: Architecture, ranks: int) -> EngineOptions:
        targets = tuple(short_names(trainer.base.layers)) if isinstance(trainer, SharedTrainer) else ()
        options = engine_options(
            self.spec,
            architecture,
            dtype=self._dtype,
            device=self.device,
            ranks=ranks,
            lora_targets=targets,
            rows=self._rows,
        )
        shares_gpu = self._in_process and self.device.type == "cuda"
        sleep = shares_gpu if self.spec.sleep == "auto" else self.spec.sleep
        return replace(options, sleep=sleep, extension=self._extension)

    def _nbytes(self, trainer: Trainer) -> int:
        """Weights, the prepacked copy of a tied head at most, and keys and values."""
        kv = CPU_KV_CACHE_BYTES if self.spec.kv_cache_gib == "auto" else int(self.spec.kv_cache_gib * (1 << 30))
        return trainer.weights_nbytes * DTYPES[self._dtype].itemsize // torch.float32.itemsize * 3 // 2 + kv


def _refused(spec: VllmSpec) -> str:
    """Why its transport does not reach the samplers, and what does; empty where it does."""
    in_process = not spec.servers and not spec.urls
    if spec.transport == "nccl" and in_process:
        return "vLLM in the engine's own process takes the tensors as they are: use 'auto', or set servers or urls"
    if spec.transport == "ipc" and not in_process:
        return (
            "servers do not take CUDA handles: one handle is good for one GPU, which a server of more, or on another, "
            "does not compute on; use 'nccl' between GPUs, 'shm' on one machine, or leave servers at 0 to share a GPU"
        )
    return ""


def engine_options(
    spec: VllmSpec,
    architecture: Architecture,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: torch.device,
    ranks: int,
    lora_targets: tuple[str, ...] = (),
    rows: int,
) -> EngineOptions:
    """How vLLM is built for models of this architecture, here or in a server elsewhere. It keeps its memory."""
    return EngineOptions(
        dtype=dtype,
        max_context=min(spec.max_context or architecture.context_length, architecture.context_length),
        vocab_size=architecture.vocab_size,
        eos_token_ids=architecture.eos_token_ids,
        tensor_parallel=ranks,
        kv_cache_bytes=None if spec.kv_cache_gib == "auto" else int(spec.kv_cache_gib * (1 << 30)),
        gpu_share=spec.gpu_share,
        eager=device.type == "cpu" if spec.eager == "auto" else spec.eager,
        max_lora_rank=spec.max_lora_rank if lora_targets else None,
        lora_targets=lora_targets,
        max_rows=rows,
    )
