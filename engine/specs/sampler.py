"""The sampler of an engine: `sampler` in its config. Plain data, without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.specs.cluster import ClusterSpec
from storage.serialization import Frozen

Transport = Literal["memory", "shm", "ipc", "nccl", "checkpoint"]
"""How weights reach vLLM."""


class TorchSamplerSpec(Frozen):
    """The embedded sampler: this process, over the trainer's own weights or one copy."""

    kind: Literal["torch"] = "torch"


class VllmSpec(Frozen):
    """vLLM (arXiv:2309.06180): in the engine's process, or in replicas that Ray places and starts."""

    kind: Literal["vllm"] = "vllm"
    replicas: int = Field(0, ge=0)
    """Copies of vLLM that share the prompts, each an actor on the Ray cluster (`cluster`). 0: vLLM runs in the engine's
    own process, without Ray."""
    placement: Literal["apart", "beside"] = "apart"
    """Where the replicas run. apart: on GPUs of their own; beside: on the GPUs of the trainer's ranks, one replica per
    rank at most, which sleeps during gradient steps."""
    python: str | None = None
    """Python interpreter of the replicas, at this path on every machine; its environment needs vLLM, the same version
    of Ray, and Ostinato. Unset: the engine's own interpreter."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the model; `ModelBuilder.tp(n)` asks for it per model."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """KV cache of each copy of vLLM, GiB. auto: 1 GiB on the CPU; on a GPU what `gpu_share` leaves."""
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
    transport: Literal["auto"] | Transport = "auto"
    """How weights reach vLLM. memory and ipc: the tensors themselves, in the same process; shm: files in shared memory,
    on the same machine; nccl: a broadcast between GPUs and machines (gloo where a process has no GPU of its own);
    checkpoint: files in `sync_folder`. auto: memory without replicas, shm on a private Ray, and on the cluster at
    cluster.address checkpoint where there is a `sync_folder`, else nccl."""
    sync_folder: str | None = None
    """Folder that every machine sees: for transport "checkpoint", and for DeepSpeed's ranks on several machines, which
    write the weights there."""
    sync_seconds: float = Field(120.0, gt=0)
    """For transport "nccl", seconds: how long the processes may take to meet, and each exchange of up to 256 MiB. A
    process that is silent for longer counts as dead."""
    start_seconds: float = Field(600.0, gt=0)
    """Seconds that a replica may take to start."""
    answer_seconds: float = Field(1800.0, gt=0)
    """A replica that is silent for this many seconds in one call counts as hung: it is killed and started again."""
    gap: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Mean |logprob of the sampler - logprob of the trainer|, nats, over the probes of a weight sync, beyond which the
    sampler is refused. auto: 1e-3 in float32, 0.15 in bfloat16."""

    def resolved_transport(self, cluster: ClusterSpec) -> Transport:
        """`transport`, with "auto" decided for replicas on this cluster."""
        if self.transport != "auto":
            return self.transport
        if not self.replicas:
            return "memory"
        if cluster.address is None:
            return "shm"
        return "checkpoint" if self.sync_folder else "nccl"

    @model_validator(mode="after")
    def _fits_together(self) -> VllmSpec:
        if self.transport == "checkpoint" and not self.sync_folder:
            raise ValueError("transport='checkpoint' needs sync_folder, a folder that every machine sees")
        if self.transport == "memory" and self.replicas:
            raise ValueError(
                f"transport='memory' is for vLLM in the engine's process, and replicas={self.replicas} was given; "
                "leave replicas at 0, or transport at 'auto'"
            )
        if self.placement == "beside" and not self.replicas:
            raise ValueError("placement='beside' places replicas, and replicas=0 was given; set replicas to 1 or more")
        if self.placement == "beside" and self.tensor_parallel > 1:
            raise ValueError(
                f"placement='beside' puts a replica on the GPU of one rank, and tensor_parallel={self.tensor_parallel} "
                "was given; set tensor_parallel=1, or placement='apart'"
            )
        return self


SamplerSpec = Annotated[TorchSamplerSpec | VllmSpec, Field(discriminator="kind")]
