"""`sampler` in the engine's config: how completions are sampled. Plain data, without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.specs.cluster import ClusterSpec
from storage.serialization import Frozen

Transport = Literal["memory", "shm", "ipc", "nccl", "checkpoint"]
"""How weights are sent to vLLM: see `VllmSpec.transport`."""


class TorchSamplerSpec(Frozen):
    """Samples with torch in the engine's process. It uses the trainer's weights, or one copy of them."""

    kind: Literal["torch"] = "torch"


class VllmSpec(Frozen):
    """Samples with vLLM (arXiv:2309.06180) in the engine's process, or in replicas that Ray places and starts."""

    kind: Literal["vllm"] = "vllm"
    replicas: int = Field(0, ge=0)
    """Number of vLLM replicas that share the prompts. Each is an actor on the Ray cluster (`cluster`). 0: vLLM runs in
    the engine's process, without Ray."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Where the replicas run. dedicated: on GPUs that the trainer does not use. colocated: on the GPUs of the trainer's
    ranks, at most one replica per rank, which releases its memory during gradient steps."""
    python: str | None = None
    """Path of the replicas' Python interpreter on every machine. Its environment needs vLLM, the same version of Ray,
    and Ostinato. Unset: the engine's interpreter."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of GPUs that share one copy of the model. `ModelBuilder.tp(n)` sets it for one model."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Size of the KV cache of each vLLM copy, in GiB. auto: 1 GiB on the CPU; on a GPU, what remains of `gpu_share`."""
    gpu_share: float = Field(0.9, gt=0, lt=1)
    """Share of a GPU's memory that vLLM may use for weights and KV cache."""
    max_context: int | None = Field(None, ge=16)
    """Maximum length of a prompt with its completion, in tokens. None: the model's context length."""
    max_lora_rank: int = Field(64, ge=1)
    """Highest rank of an adapter that vLLM can serve. vLLM reserves memory for it."""
    eager: bool | Literal["auto"] = "auto"
    """Run vLLM without compilation and CUDA graphs. auto: only on the CPU."""
    sleep: bool | Literal["auto"] = "auto"
    """Release vLLM's memory during gradient steps. auto: only if trainer and sampler share a GPU."""
    transport: Literal["auto"] | Transport = "auto"
    """How weights are sent to vLLM. memory, ipc: the tensors themselves, in the same process. shm: files in shared
    memory, on the same machine. nccl: a broadcast between GPUs and machines (gloo for a process without a GPU of its
    own). checkpoint: files in `sync_folder`. auto: memory without replicas; shm on a private Ray; on the cluster at
    cluster.address, checkpoint if `sync_folder` is set, else nccl."""
    sync_folder: str | None = None
    """Folder that every machine can access. Used by transport "checkpoint", and by DeepSpeed's ranks on several
    machines, which write the weights there."""
    sync_seconds: float = Field(120.0, gt=0)
    """Timeout of transport "nccl" in seconds, for connecting the processes and for each exchange of up to 256 MiB. A
    process that does not answer in time counts as dead."""
    start_seconds: float = Field(600.0, gt=0)
    """Maximum time in seconds for a replica to start."""
    answer_seconds: float = Field(1800.0, gt=0)
    """Maximum time in seconds without progress in one call. A replica that exceeds it is killed and started again."""
    gap: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Largest mean difference between the sampler's and the trainer's logprobs of the probe sequences of a weight sync,
    in nats. A larger one raises SamplerOutOfSync. auto: 1e-3 in float32, 0.15 in bfloat16."""

    def resolved_transport(self, cluster: ClusterSpec) -> Transport:
        """The transport to use on this cluster: `transport`, or the choice of "auto"."""
        if self.transport != "auto":
            return self.transport
        # A private Ray has one machine, whose processes share memory. On a cluster the replicas may be elsewhere.
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
        if self.placement == "colocated" and not self.replicas:
            raise ValueError(
                "placement='colocated' is for replicas, and replicas=0 was given; set replicas to 1 or more"
            )
        if self.placement == "colocated" and self.tensor_parallel > 1:
            raise ValueError(
                "placement='colocated' puts a replica on the GPU of one rank, and "
                f"tensor_parallel={self.tensor_parallel} was given; set tensor_parallel=1, or placement='dedicated'"
            )
        return self


SamplerSpec = Annotated[TorchSamplerSpec | VllmSpec, Field(discriminator="kind")]
