"""Who samples: one line of the engine's config (`sampler.kind`), and what that sampler can be told. Plain data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.models import Frozen


class TorchSamplerSpec(Frozen):
    """The embedded sampler: this process, over the trainer's own weights or one copy."""

    kind: Literal["torch"] = "torch"


class VllmSpec(Frozen):
    """vLLM (arXiv:2309.06180): in this process, or servers that the engine starts and watches, or servers elsewhere."""

    kind: Literal["vllm"] = "vllm"
    servers: int = Field(0, ge=0)
    """Server processes on this machine. 0 without `urls`: vLLM runs in the engine's own process."""
    urls: tuple[str, ...] = ()
    """Servers on other machines, started there by `ostinato engine sampler`; http://host:port, never with a token."""
    token_env: str = Field("OSTINATO_SAMPLER_TOKEN", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable with the servers' bearer token; must be set when `urls` are."""
    python: str | None = None
    """Interpreter of an environment that has vLLM, for `servers`. None: the engine's own."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the model; `ModelBuilder.tp(n)` asks for it per model."""
    devices: tuple[int, ...] = ()
    """GPUs that the servers take, tensor_parallel each, in this order. Empty: all that the engine sees."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """KV cache of each server. auto: 1 GiB on the CPU; on a GPU what `gpu_share` leaves."""
    gpu_share: float = Field(0.9, gt=0, lt=1)
    """Share of a GPU's memory that vLLM may take, weights and KV cache."""
    max_context: int | None = Field(None, ge=16)
    """Longest prompt and completion together, tokens. None: the model's."""
    max_lora_rank: int = Field(64, ge=1)
    """The highest rank of an adapter that it serves; memory is set aside for it."""
    eager: bool | Literal["auto"] = "auto"
    """Without compilation and CUDA graphs. auto: on the CPU."""
    sleep: bool | Literal["auto"] = "auto"
    """Whether vLLM gives its memory back during gradient steps. auto: where trainer and sampler share a GPU."""
    transport: Literal["auto", "memory", "shm", "ipc", "nccl", "checkpoint"] = "auto"
    """How weights reach vLLM: memory and ipc (same process: the tensors themselves), shm (files in shared memory, same
    machine), nccl (a broadcast between GPUs and nodes; gloo where a process has no GPU of its own), checkpoint (files
    in a folder that all machines see). auto: see `way`."""
    sync_folder: str | None = None
    """The folder that all machines see: for transport "checkpoint", and for adapters that go to `urls`."""
    sync_seconds: float = Field(120.0, gt=0)
    """For transport "nccl": how long the processes may take to meet, and each exchange of up to 256 MiB. Who is silent
    for longer is taken for dead."""
    start_seconds: float = Field(600.0, gt=0)
    """How long a server may take to start."""
    answer_seconds: float = Field(1800.0, gt=0)
    """A server that is silent for this long in one call is taken for hung: it is killed and started again."""
    gap: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Mean |logprob of the sampler - logprob of the trainer|, nats, over the probes of a weight sync, beyond which the
    sampler is refused. auto: 1e-3 in float32, 0.15 in bfloat16."""

    @property
    def way(self) -> Literal["memory", "shm", "ipc", "nccl", "checkpoint"]:
        """`transport`, with auto decided: memory in the engine's process, shm to servers that it starts, to `urls`
        checkpoint where there is a `sync_folder`, else nccl."""
        if self.transport != "auto":
            return self.transport
        if not self.urls:
            return "shm" if self.servers else "memory"
        return "checkpoint" if self.sync_folder else "nccl"

    @model_validator(mode="after")
    def _fits_together(self) -> VllmSpec:
        if self.transport == "checkpoint" and not self.sync_folder:
            raise ValueError("transport='checkpoint' needs sync_folder, a folder that every machine sees")
        if self.transport == "memory" and (self.servers or self.urls):
            raise ValueError("transport='memory' is for vLLM in the engine's process; leave servers at 0, urls empty")
        if self.devices and len(self.devices) != self.tensor_parallel * max(1, self.servers):
            raise ValueError(
                f"{len(self.devices)} devices were given for {max(1, self.servers)} servers of tensor_parallel="
                f"{self.tensor_parallel}; give {self.tensor_parallel * max(1, self.servers)}, or none"
            )
        return self


SamplerSpec = Annotated[TorchSamplerSpec | VllmSpec, Field(discriminator="kind")]
