"""`trainer` in the engine's config: how gradient steps are computed. Plain data, without torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.serialization import Frozen


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
