"""The trainer of an engine: `trainer` in its config. Plain data, without torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.serialization import Frozen


class TorchTrainerSpec(Frozen):
    """The embedded trainer: this process, the CPU or one GPU."""

    kind: Literal["torch"] = "torch"


class DeepSpeedSpec(Frozen):
    """DeepSpeed ZeRO (arXiv:1910.02054) on ranks that Ray places and starts."""

    kind: Literal["deepspeed"] = "deepspeed"
    ranks: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Processes that train, over all machines of the cluster, one per GPU. auto: as many as the cluster (without
    cluster.address: this machine) has GPUs, less those of vLLM's replicas; 1 on the CPU."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is split over the ranks: 1 moments and master weights, 2 gradients too, 3 weights too. 0: nothing."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where moments and master weights lie. cpu: in the machine's memory, and AdamW runs there."""
    offload_parameters: Literal["none", "cpu"] = "none"
    """ZeRO 3 only: where the shards of the weights lie between uses."""
    activation_checkpointing: Literal["none", "recompute", "offload"] = "none"
    """recompute: each layer keeps its input only and runs again in the backward pass; offload: that input in the
    machine's memory."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence (Ulysses, arXiv:2309.14509); divides `ranks`, attention and key heads."""
    liger: bool | Literal["auto"] = "auto"
    """Fused Liger kernels. auto: where liger-kernel is installed and the device is a GPU."""
    bucket_mib: int = Field(200, ge=1)
    """Gradients and gathered weights travel in buckets of about this size."""
    start_seconds: float = Field(300.0, gt=0)
    """Seconds that the ranks may take to start."""
    hang_seconds: float = Field(1800.0, gt=0)
    """A rank without progress for this many seconds counts as hung: all ranks are killed and started again."""

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
    """What numerics say of the ranks, such as "zero3x2": stage and ranks; "zero3x4-sp2" with split sequences."""
    sequence = f"-sp{spec.sequence_parallel}" if spec.sequence_parallel > 1 else ""
    return f"zero{spec.zero_stage}x{world_size}{sequence}"


def spec_of_layout(layout: str) -> DeepSpeedSpec | None:
    """The spec of such ranks; None for a string that is no layout name."""
    found = re.fullmatch(r"zero([0-3])x([1-9][0-9]*)(?:-sp([1-9][0-9]*))?", layout)
    if found is None:
        return None
    stage, ranks, sequence = found.groups()
    return DeepSpeedSpec(zero_stage=int(stage), ranks=int(ranks), sequence_parallel=int(sequence or 1))  # type: ignore[arg-type]


TrainerSpec = Annotated[TorchTrainerSpec | DeepSpeedSpec, Field(discriminator="kind")]
