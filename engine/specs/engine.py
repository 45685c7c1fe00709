"""How to reach an engine, and how the embedded one runs. Plain data: it crosses tasks and stands in configs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from engine.specs.cluster import ClusterSpec
from engine.specs.sampler import SamplerSpec, TorchSamplerSpec, VllmSpec
from engine.specs.trainer import DeepSpeedSpec, TorchTrainerSpec, TrainerSpec
from storage.serialization import Frozen


class LocalEngineSpec(Frozen):
    """An engine that this process owns: it trains and samples here, or in actors on a Ray cluster."""

    kind: Literal["local"] = "local"
    trainer: TrainerSpec = TorchTrainerSpec()
    """Who computes gradient steps: torch in this process, or DeepSpeed over several devices."""
    sampler: SamplerSpec = TorchSamplerSpec()
    """Who draws completions: torch in this process, or vLLM."""
    cluster: ClusterSpec = ClusterSpec()
    """The Ray cluster that DeepSpeed's ranks and vLLM's replicas run on. Without them, nothing connects to Ray."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the forward and backward passes; master weights are float32 (float64 when that is asked for).
    auto: bfloat16 where the device computes it natively, else float32."""
    deterministic: bool = False
    """Final weights equal to the byte to those of a run without faults: computes and samples in float32."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """CPU threads of this process. auto: all cores of an idle machine, else one; with `deterministic`, all cores."""
    max_tokens_per_forward: int = Field(8192, ge=16)
    """Packed tokens of one forward pass: decides the micro-batches and bounds memory. Never changes the loss."""
    max_rows: int = Field(64, ge=1)
    """Completions that decode together."""
    frozen_policies: int = Field(2, ge=1)
    """Reference and past policies kept in memory besides the ones in training."""
    memory_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """What weights, moments and gradients of all runs may fill. auto: 80 % of the machine's memory, 70 % of a GPU's.
    Beyond it the least recently used policies are checkpointed and leave memory; they are rebuilt on demand."""
    residency_seconds: float = Field(20.0, ge=0)
    """A policy in training stays at least this long once it was rebuilt: runs that do not fit together take turns
    instead of evicting one another at every call."""
    room_seconds: float = Field(600.0, ge=0)
    """How long a call waits for room before it fails with EngineBusy."""
    digest_every: int | None = Field(None, ge=1)
    """Digest the weights into every n-th commit record. None: each step up to 256 MiB of weights, else every 10th."""

    rebase: Literal["record", "refuse"] = "record"
    """Where redone steps come out with other weights than the committed ones because this engine computes under other
    numerics (backend, layout, device, dtype, library): go on from them and say so on the chain, or fail. With
    `deterministic` it always fails."""

    @model_validator(mode="after")
    def _deterministic_is_float32(self) -> LocalEngineSpec:
        if self.deterministic and self.compute_dtype == "bfloat16":
            raise ValueError(
                "deterministic=true samples and trains in float32, but compute_dtype='bfloat16' was given; "
                "leave compute_dtype at 'auto', or set deterministic=false"
            )
        for part, default in ((self.trainer, "torch"), (self.sampler, "torch")):
            if self.deterministic and part.kind != default:
                raise ValueError(
                    f"deterministic=true promises equal bytes, which only the torch trainer and sampler give; "
                    f"{part.kind!r} was given. Leave trainer and sampler at 'torch', or set deterministic=false"
                )
        return self

    @model_validator(mode="after")
    def _placement_fits_the_trainer(self) -> LocalEngineSpec:
        sampler, trainer = self.sampler, self.trainer
        if not isinstance(sampler, VllmSpec) or sampler.placement != "beside":
            return self
        if not isinstance(trainer, DeepSpeedSpec):
            raise ValueError(
                f"sampler.placement='beside' shares the GPUs of DeepSpeed's ranks, and trainer.kind={trainer.kind!r} "
                "was given; set trainer.kind='deepspeed', or sampler.placement='apart'"
            )
        if trainer.ranks != "auto" and sampler.replicas > trainer.ranks:
            raise ValueError(
                f"sampler.placement='beside' takes one replica per rank, and sampler.replicas={sampler.replicas} was "
                f"given for trainer.ranks={trainer.ranks}; give at most {trainer.ranks} replicas"
            )
        return self

    @model_validator(mode="after")
    def _every_dtype_is_known(self) -> LocalEngineSpec:
        if self.compute_dtype == "float64" and isinstance(self.sampler, VllmSpec):
            raise ValueError("vLLM computes in bfloat16 or float32; use compute_dtype='float32', or the torch sampler")
        return self

    @property
    def uses_ray(self) -> bool:
        """Whether the engine runs actors on Ray: DeepSpeed's ranks, or replicas of vLLM."""
        return isinstance(self.trainer, DeepSpeedSpec) or self.replicas > 0

    @property
    def replicas(self) -> int:
        """Copies of vLLM on Ray; 0 where the sampler runs in the engine's process."""
        return self.sampler.replicas if isinstance(self.sampler, VllmSpec) else 0

    def ranks(self, gpus: int) -> int:
        """Number of processes that train, where `gpus` GPUs are there for actors (0: the engine computes on CPUs)."""
        if not isinstance(self.trainer, DeepSpeedSpec):
            return 1
        if self.trainer.ranks != "auto":
            return self.trainer.ranks
        return max(1, gpus - self._replica_gpus)

    def actor_gpus(self, gpus: int) -> int:
        """GPUs that ranks and replicas take together, where `gpus` are there for them."""
        return self._replica_gpus + (self.ranks(gpus) if isinstance(self.trainer, DeepSpeedSpec) else 0)

    @property
    def _replica_gpus(self) -> int:
        """GPUs of the replicas that share none with the ranks."""
        vllm = self.sampler
        apart = isinstance(vllm, VllmSpec) and vllm.placement == "apart"
        return vllm.replicas * vllm.tensor_parallel if isinstance(vllm, VllmSpec) and apart else 0


class HttpEngineSpec(Frozen):
    """An engine that runs as a service (`ostinato engine serve`), over the same store."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")
    """http://host:port; never with credentials in it."""
    token_env: str = Field("OSTINATO_ENGINE_TOKEN", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable that holds the bearer token: the token itself stands in no config and no run.json."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for one HTTP answer. Long calls are polled, so this need not be long."""
    patience_seconds: float = Field(300.0, ge=0)
    """How long an engine may be away before a call fails with EngineUnreachable."""


def _kind_of(value: Any) -> str:
    """`kind` may be left out for the embedded engine."""
    return str(value.get("kind", "local")) if isinstance(value, dict) else str(getattr(value, "kind", "local"))


EngineSpec = Annotated[
    Annotated[LocalEngineSpec, Tag("local")] | Annotated[HttpEngineSpec, Tag("http")], Discriminator(_kind_of)
]
"""Every way to reach an engine."""
