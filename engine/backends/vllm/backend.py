"""The vLLM backend: who gets which host. In this process there is room for one engine at a time, since all of them
share torch's process group; replicas (engine.backends.vllm.serving.pool) are one pool per architecture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch

from engine.backends.protocol import Trainer
from engine.backends.torch.lora import short_names
from engine.backends.torch.shared_base import SharedTrainer
from engine.backends.vllm.adapter import CPU_KV_CACHE_BYTES, InProcess
from engine.backends.vllm.architecture import Architecture, architecture_of
from engine.backends.vllm.host import Host
from engine.backends.vllm.sampler import DTYPES, VllmSampler
from engine.backends.vllm.serving.runtime import EXTENSION, EngineOptions, Runtime
from engine.cluster.placement import Placement
from engine.errors import BadSpec
from engine.protocol import ActorCount
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import TorchTrainerSpec

_Key = tuple[str, int, bool]


class VllmSamplers:
    """Implements engine.backends.protocol.SamplerBackend. `extension` is what runs inside vLLM's workers."""

    def __init__(
        self,
        spec: LocalEngineSpec,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        beside: Callable[[], Placement] | None = None,
        extension: str = EXTENSION,
    ) -> None:
        """`beside`: reserves the bundles of the trainer's ranks. It is called where sampler.placement is "beside"."""
        assert isinstance(spec.sampler, VllmSpec)
        if refused := _refused(spec.sampler):
            raise BadSpec(f"sampler.transport={spec.sampler.transport!r} was given, but {refused}")
        self.spec = spec.sampler.model_copy(update={"transport": spec.sampler.resolved_transport(spec.cluster)})
        self._rows, self._extension = spec.max_rows, extension
        self._cluster, self._beside = spec.cluster, beside
        self._trains_here = isinstance(spec.trainer, TorchTrainerSpec)
        self.device = device
        names: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
        if compute_dtype not in names:
            raise BadSpec(f"vLLM computes in {' or '.join(DTYPES)}; compute_dtype {compute_dtype} was given")
        self._dtype = cast(Literal["float32", "bfloat16"], names[compute_dtype])
        self._in_process = not self.spec.replicas
        self._hosts: dict[_Key, Host] = {}

    @property
    def devices(self) -> int:
        return self.spec.tensor_parallel * max(1, self.spec.replicas)

    @property
    def actors(self) -> ActorCount:
        counts = [host.actors for host in list(self._hosts.values())]
        return ActorCount(
            wanted=sum(count.wanted for count in counts),
            alive=sum(count.alive for count in counts),
            restarts=sum(count.restarts for count in counts),
        )

    @property
    def fixed_tensor_parallel(self) -> bool:
        return not self._in_process

    def new_bytes(self, trainer: Trainer) -> int:
        if not self._in_process or any(host.is_open and host.users for host in self._hosts.values()):
            return 0  # elsewhere; or in the place of the engine that is there, or with it
        return self._nbytes(trainer)

    def sampler(self, trainer: Trainer, *, tensor_parallel: int | None = None) -> VllmSampler:
        ranks = tensor_parallel or self.spec.tensor_parallel
        if self.spec.replicas and ranks != self.spec.tensor_parallel:
            raise BadSpec(
                f"tp({ranks}) was asked for, but the sampler's replicas run with tensor_parallel="
                f"{self.spec.tensor_parallel}; set sampler.tensor_parallel, or leave tp out"
            )
        return VllmSampler(trainer, self.spec, partial(self._host_of, ranks=ranks))

    def offload_for_training(self) -> None:
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
        from engine.backends.vllm.serving.placement import open_pool

        return open_pool(
            self.spec,
            config_folder,
            options,
            self.device,
            cluster=self._cluster,
            spare_first_gpu=self._trains_here and self.device.type == "cuda",
            beside=self._beside() if self._beside is not None and self.spec.placement == "beside" else None,
        )

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
        shares_gpu = (self._in_process or self.spec.placement == "beside") and self.device.type == "cuda"
        sleep = shares_gpu if self.spec.sleep == "auto" else self.spec.sleep
        return replace(options, sleep=sleep, extension=self._extension)

    def _nbytes(self, trainer: Trainer) -> int:
        """Weights, the prepacked copy of a tied head at most, and keys and values."""
        kv = CPU_KV_CACHE_BYTES if self.spec.kv_cache_gib == "auto" else int(self.spec.kv_cache_gib * (1 << 30))
        return trainer.weights_nbytes * DTYPES[self._dtype].itemsize // torch.float32.itemsize * 3 // 2 + kv


def _refused(spec: VllmSpec) -> str:
    """Why its transport does not reach the samplers, and what does; empty where it does."""
    if spec.transport == "nccl" and not spec.replicas:
        return "vLLM in the engine's own process takes the tensors as they are: use 'auto', or set replicas"
    if spec.transport == "ipc" and spec.replicas:
        return (
            "replicas do not take CUDA handles: one handle is good for one GPU, and a replica of more, or on another, "
            "does not compute on that one; use 'nccl' between GPUs, 'shm' on one machine, or set replicas to 0 to "
            "share the GPU"
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
    """How vLLM is built for models of this architecture. It keeps its memory."""
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
