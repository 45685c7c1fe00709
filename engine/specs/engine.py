"""The config of an engine: where it runs and how. Plain data, which configs hold and tasks pass to other machines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from engine.errors import BadSpec
from engine.specs.adapters import FullSpec, LoraSpec
from engine.specs.cluster import ClusterSpec
from engine.specs.sampler import SamplerSpec, TorchSamplerSpec, VllmSpec
from engine.specs.trainer import DeepSpeedSpec, TorchTrainerSpec, TrainerSpec
from storage.secrets import refuse_secrets
from storage.serialization import Frozen


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
    digest_every: int | None = Field(None, ge=1)
    """Store a digest of the weights in every n-th commit record. None: in every record for models of up to 256 MiB,
    else in every 10th."""

    rebase: Literal["record", "refuse"] = "record"
    """What to do when redone steps give other weights than the committed ones, because this engine has other numerics
    (backend, layout, device, precision, library versions). record: continue from the new weights and record a rebase on
    the chain. refuse: fail. With `deterministic` it always fails."""

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
        return max(1, gpus - self._replica_gpus)

    def actor_gpus(self, gpus: int) -> int:
        """Number of GPUs that ranks and replicas use together, when `gpus` are available to them."""
        rank_gpus = self.ranks(gpus) if isinstance(self.trainer, DeepSpeedSpec) else 0
        return self._replica_gpus + rank_gpus

    @property
    def _replica_gpus(self) -> int:
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
