"""The config of an engine: where it runs and how. Plain data, which configs hold and tasks pass to other machines."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from engine.errors import BadSpec
from engine.specs.adapters import FullSpec, LoraSpec
from storage.chain.records import OptimizerKind
from storage.secrets import refuse_secrets
from storage.serialization import Frozen

ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
"""HOST:PORT, where HOST may be [IPv6]."""


class ClusterSpec(Frozen):
    """A private Ray on this machine, or an existing Ray cluster."""

    address: str | None = None
    """Address of an existing Ray cluster: HOST:PORT of its head node, or "auto" for the cluster that this machine
    belongs to. Unset: a private Ray on this machine, which listens on loopback only and ends with this process."""

    @field_validator("address")
    @classmethod
    def _is_of_a_head_node(cls, address: str | None) -> str | None:
        if address is None or address == "auto" or ADDRESS.fullmatch(address):
            return address
        raise ValueError(
            f"cluster.address={address!r} is no address of a Ray cluster; give HOST:PORT of its head node, without "
            "ray://, such as 10.0.0.1:6379, or 'auto'"
        )


class TorchTrainerSpec(Frozen):
    """Trains with torch in the engine's process, on the CPU or one GPU."""

    kind: Literal["torch"] = "torch"


class DeepSpeedSpec(Frozen):
    """Trains with DeepSpeed ZeRO (arXiv:1910.02054) on ranks that Ray places and starts."""

    kind: Literal["deepspeed"] = "deepspeed"
    ranks: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of training processes on all machines of the cluster, one per GPU. auto: the number of GPUs of the cluster
    (without cluster.address: of this machine), minus those of vLLM's replicas; 1 on the CPU."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO splits over the ranks. 0: nothing. 1: moments and master weights. 2: also gradients. 3: also
    weights."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where moments and master weights are kept. cpu: in the machine's memory, and AdamW runs on the CPU."""
    offload_parameters: Literal["none", "cpu"] = "none"
    """Where the shards of the weights are kept between uses. Only for ZeRO 3."""
    activation_checkpointing: Literal["none", "recompute", "offload"] = "none"
    """Memory saving for activations. recompute: each layer keeps only its input and is run again in the backward pass.
    offload: as recompute, with the inputs in the machine's memory."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of ranks that share each sequence (Ulysses, arXiv:2309.14509). It must divide `ranks` and the model's
    numbers of attention heads and key heads."""
    liger: bool | Literal["auto"] = "auto"
    """Use fused Liger kernels. auto: if liger-kernel is installed and the device is a GPU."""
    bucket_mib: int = Field(200, ge=1)
    """Approximate size in MiB of the buckets in which gradients and weights are exchanged."""
    start_seconds: float = Field(300.0, gt=0)
    """Maximum time in seconds for the ranks to start."""
    hang_seconds: float = Field(1800.0, gt=0)
    """Maximum time in seconds without progress of a rank. If it is exceeded, all ranks are killed and started again."""

    @model_validator(mode="after")
    def _fits_together(self) -> DeepSpeedSpec:
        if self.offload_parameters != "none" and self.zero_stage != 3:
            raise ValueError(
                f"offload_parameters={self.offload_parameters!r} needs zero_stage=3, not {self.zero_stage}: below it "
                "every rank keeps the weights whole; set zero_stage=3, or offload_parameters='none'"
            )
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3; zero_stage=0 keeps AdamW on every rank")
        if self.ranks != "auto" and self.ranks % self.sequence_parallel:
            raise ValueError(f"sequence_parallel={self.sequence_parallel} does not divide ranks={self.ranks}")
        return self


def layout_name(spec: DeepSpeedSpec, world_size: int) -> str:
    """The name of the ranks' layout in the numerics of a step: "zero3x2" is ZeRO stage 3 on 2 ranks, and "zero3x4-sp2"
    also splits each sequence over 2 ranks."""
    sequence = f"-sp{spec.sequence_parallel}" if spec.sequence_parallel > 1 else ""
    return f"zero{spec.zero_stage}x{world_size}{sequence}"


def spec_of_layout(layout: str) -> DeepSpeedSpec | None:
    """The spec of ranks with this layout name. None for a string that is not a layout name."""
    # The inverse of layout_name. Trainers without ranks record other layouts.
    match = re.fullmatch(r"zero([0-3])x([1-9][0-9]*)(?:-sp([1-9][0-9]*))?", layout)
    if match is None:
        return None
    stage, ranks, sequence = match.groups()
    return DeepSpeedSpec(zero_stage=int(stage), ranks=int(ranks), sequence_parallel=int(sequence or 1))  # type: ignore[arg-type]


TrainerSpec = Annotated[TorchTrainerSpec | DeepSpeedSpec, Field(discriminator="kind")]


Transport = Literal["memory", "shm", "ipc", "nccl", "checkpoint"]
"""How weights are sent to vLLM: see `VllmSpec.transport`."""


class TorchSamplerSpec(Frozen):
    """Samples with torch in the engine's process. It uses the trainer's weights, or one copy of them."""

    kind: Literal["torch"] = "torch"
    own_lane: bool = False
    """Samples while a torch trainer in the same process trains, with a copy of the weights. Useful with
    `rules.max_staleness`. Adapters are sampled on the trainer's base model, and so never at the same time. A DeepSpeed
    trainer has processes of its own: then the sampler has its own copy and lane in any case."""


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
    max_loras: int = Field(2, ge=1, le=32)
    """Number of adapters that sample at the same time: policies of several runs, or of a run with
    `rules.max_staleness`. vLLM reserves memory for each."""
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
    """Folder that every machine can access. Used by transport "checkpoint", and for the LoRA adapters of DeepSpeed's
    ranks on several machines."""
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


class LocalEngineSpec(Frozen):
    """An engine in this process. It trains and samples in the process, or in actors on a Ray cluster."""

    kind: Literal["local"] = "local"
    trainer: TrainerSpec = TorchTrainerSpec()
    """Backend of gradient steps: torch in this process, or DeepSpeed on several devices."""
    sampler: SamplerSpec = TorchSamplerSpec()
    """Backend of generation: torch in this process, or vLLM."""
    cluster: ClusterSpec = ClusterSpec()
    """The Ray cluster that runs DeepSpeed's ranks and vLLM's replicas. Without those, the engine does not use Ray."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the torch backends. auto: cuda if there is a GPU, else cpu."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the forward and backward passes. auto: bfloat16 if the device supports it natively, else float32.
    The master weights are float32, or float64 if this is float64."""
    deterministic: bool = False
    """Make the final weights equal, to the byte, to those of a run without faults. Trains and samples in float32."""
    deterministic_kernels: bool = True
    """Use torch's deterministic kernels on CUDA where it has them. Then most steps can be redone to the bit after a
    crash. They take more time (bench/gpu)."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """CPU threads of this process. auto: all cores if the machine is idle or `deterministic` is set, else one."""
    max_tokens_per_forward: int = Field(8192, ge=16)
    """Maximum packed tokens of one forward pass. It limits the memory of micro-batches and never changes the loss."""
    max_rows: int = Field(64, ge=1)
    """Maximum number of completions that are decoded together."""
    frozen_policies: int = Field(2, ge=1)
    """Number of reference and past policies kept in memory, in addition to the policies in training."""
    memory_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Memory for weights, moments and gradients of all runs, in GiB. auto: 80 % of the machine's memory, or 70 % of a
    GPU's. When it is full, the least recently used policies are checkpointed and evicted, and rebuilt on demand."""
    residency_seconds: float = Field(20.0, ge=0)
    """Minimum time in seconds that a policy in training stays in memory after it was rebuilt. Runs that do not fit into
    memory together then take turns, instead of evicting each other at every call."""
    room_seconds: float = Field(600.0, ge=0)
    """Maximum time in seconds that a call waits for free memory before it fails with EngineBusy."""
    rebase: Literal["record", "refuse"] = "record"
    """What to do when redone steps give other weights than the committed ones, because this engine has other numerics
    (backend, layout, device, precision, library versions), or because the device does not repeat its sums to the bit.
    record: continue from the new weights and record a rebase on the chain, with the measured distance. refuse: fail.
    With `deterministic` it always fails."""

    @model_validator(mode="after")
    def _deterministic_is_float32(self) -> LocalEngineSpec:
        if self.deterministic and self.compute_dtype == "bfloat16":
            raise ValueError(
                "deterministic=true samples and trains in float32, but compute_dtype='bfloat16' was given; "
                "leave compute_dtype at 'auto', or set deterministic=false"
            )
        # The order of sums in other backends depends on the number of processes and on the batch.
        for part in (self.trainer, self.sampler):
            if self.deterministic and part.kind != "torch":
                raise ValueError(
                    f"deterministic=true promises equal bytes, which only the torch trainer and sampler give; "
                    f"{part.kind!r} was given. Leave trainer and sampler at 'torch', or set deterministic=false"
                )
        return self

    @model_validator(mode="after")
    def _placement_fits_the_trainer(self) -> LocalEngineSpec:
        sampler, trainer = self.sampler, self.trainer
        if not isinstance(sampler, VllmSpec) or sampler.placement != "colocated":
            return self
        if not isinstance(trainer, DeepSpeedSpec):
            raise ValueError(
                "sampler.placement='colocated' shares the GPUs of DeepSpeed's ranks, and "
                f"trainer.kind={trainer.kind!r} was given; set trainer.kind='deepspeed', or "
                "sampler.placement='dedicated'"
            )
        # With ranks="auto" the number of ranks is known only when the engine connects to the cluster.
        if trainer.ranks != "auto" and sampler.replicas > trainer.ranks:
            raise ValueError(
                "sampler.placement='colocated' takes at most one replica per rank, and "
                f"sampler.replicas={sampler.replicas} was given for trainer.ranks={trainer.ranks}; give at most "
                f"{trainer.ranks} replicas"
            )
        return self

    @model_validator(mode="after")
    def _every_dtype_is_known(self) -> LocalEngineSpec:
        if self.compute_dtype == "float64" and isinstance(self.sampler, VllmSpec):
            raise ValueError("vLLM computes in bfloat16 or float32; use compute_dtype='float32', or the torch sampler")
        return self

    def check_trainable(self, trainable: FullSpec | LoraSpec) -> None:
        """Raises BadSpec for an adapter whose base in 4 bits this engine cannot train, sample or compute with."""
        if not isinstance(trainable, LoraSpec) or not trainable.load_in_4bit:
            return
        for name, part in (("trainer", self.trainer), ("sampler", self.sampler)):
            if part.kind != "torch":
                raise BadSpec(
                    "load_in_4bit=true was given, which needs the torch trainer and the torch sampler, and "
                    f"{name}.kind={part.kind!r} was given; set engine.{name}.kind='torch', or leave load_in_4bit out"
                )
        if self.compute_dtype == "float64":
            raise BadSpec(
                "load_in_4bit=true was given, and bitsandbytes computes in bfloat16 or float32, but engine."
                "compute_dtype='float64' was given; set engine.compute_dtype='float32', or leave load_in_4bit out"
            )

    def check_optimizer(self, kind: OptimizerKind) -> None:
        """Raises BadSpec for an optimizer that the trainer of this engine does not have."""
        if kind == "adamw_8bit" and self.trainer.kind != "torch":
            raise BadSpec(
                f"optimizer.kind='adamw_8bit' was given, which only the torch trainer has, and engine.trainer.kind="
                f"{self.trainer.kind!r}; set engine.trainer.kind='torch', or optimizer.kind='adamw'"
            )

    @property
    def uses_ray(self) -> bool:
        """Whether the engine runs actors on Ray: DeepSpeed's ranks, or replicas of vLLM."""
        return isinstance(self.trainer, DeepSpeedSpec) or self.replicas > 0

    @property
    def replicas(self) -> int:
        """Number of vLLM replicas on Ray. 0 if the sampler runs in the engine's process."""
        return self.sampler.replicas if isinstance(self.sampler, VllmSpec) else 0

    def ranks(self, gpus: int) -> int:
        """Number of training processes, when `gpus` GPUs are available to actors (0: the engine uses CPUs)."""
        if not isinstance(self.trainer, DeepSpeedSpec):
            return 1
        if self.trainer.ranks != "auto":
            return self.trainer.ranks
        # Replicas with dedicated GPUs take theirs first, and the ranks get the rest.
        return max(1, gpus - self.replica_gpus)

    def actor_gpus(self, gpus: int) -> int:
        """Number of GPUs that ranks and replicas use together, when `gpus` are available to them."""
        rank_gpus = self.ranks(gpus) if isinstance(self.trainer, DeepSpeedSpec) else 0
        return self.replica_gpus + rank_gpus

    @property
    def replica_gpus(self) -> int:
        """Number of GPUs of replicas that share none with the ranks."""
        if not isinstance(self.sampler, VllmSpec) or self.sampler.placement != "dedicated":
            return 0
        return self.sampler.replicas * self.sampler.tensor_parallel


class HttpEngineSpec(Frozen):
    """An engine that runs as a service (`ostinato engine serve`) and uses the same store."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the url may hold a password

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")
    """Address of the service: http://host:port, without credentials."""
    token_env: str = Field("OSTINATO_ENGINE_TOKEN", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the bearer token. The token itself is never stored in a config."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Timeout of one HTTP request in seconds. Long calls are polled, so it need not be long."""
    patience_seconds: float = Field(300.0, ge=0)
    """How long an unreachable engine is retried, in seconds, before a call fails with EngineUnreachable."""

    @field_validator("url", mode="before")
    @classmethod
    def _has_no_password(cls, url: Any) -> Any:
        refuse_secrets(url)
        return url


def _kind_of(value: Any) -> str:
    """The kind of an engine's config. It may be left out for the embedded engine."""
    # pydantic passes a dict from a config, and a model when a spec is copied.
    if isinstance(value, dict):
        return str(value.get("kind", "local"))
    return str(getattr(value, "kind", "local"))


EngineSpec = Annotated[
    Annotated[LocalEngineSpec, Tag("local")] | Annotated[HttpEngineSpec, Tag("http")], Discriminator(_kind_of)
]
"""The config of an engine of either kind."""
