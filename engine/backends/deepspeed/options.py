"""The options that the engine sends to each rank process, and the DeepSpeed configuration that follows from them."""

from __future__ import annotations

from typing import Any, Literal

import torch

from engine.backends.torch.causal_lm import master_dtype_of
from engine.specs.engine import DeepSpeedSpec
from storage.serialization import Frozen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class RankOptions(Frozen):
    """Options of a rank process. All ranks get the same options."""

    trainer: DeepSpeedSpec
    compute_dtype: Literal["float32", "bfloat16", "float64"]
    device: Literal["cpu", "cuda"]
    threads: int
    """Number of CPU threads of each rank."""
    deterministic_kernels: bool = True
    """As in the engine's config."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.compute_dtype]

    @property
    def master_dtype(self) -> torch.dtype:
        return master_dtype_of(self.dtype)


def deepspeed_config(options: RankOptions, *, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of this many parameters. No communication bucket is larger than the model.
    """
    spec = options.trainer
    in_bfloat16 = options.compute_dtype == "bfloat16"
    return {
        # The trainer forms the micro-batches itself, and decides which backward pass is the last of an update.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,  # a placeholder: ZeroModel.step sets the norm of each update
        "steps_per_print": 1 << 30,
        "zero_optimization": _zero_config(spec, options, parameters),
        # Use torch's fused AdamW. DeepSpeed's own CPU optimizer would need a compiler on the machine.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": in_bfloat16, "check_grad_overflow": in_bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _zero_config(spec: DeepSpeedSpec, options: RankOptions, parameters: int) -> dict[str, Any]:
    bucket = max(1, min(spec.bucket_mib * (1 << 20) // options.dtype.itemsize, parameters))
    zero: dict[str, Any] = {
        "stage": spec.zero_stage,
        # Without managed gradient accumulation, DeepSpeed overlaps communication with the backward pass in stage 2
        # only, and holds two buckets instead of one.
        "overlap_comm": False,
        "contiguous_gradients": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if spec.zero_stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket
        zero["stage3_max_live_parameters"] = 2 * bucket
        zero["sub_group_size"] = max(bucket, 100_000_000)
    pin = options.device == "cuda"
    if spec.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if spec.offload_parameters == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    return zero
