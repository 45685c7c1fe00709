"""Options of a rank, as plain data that is sent to its process, and DeepSpeed's configuration from them."""

from __future__ import annotations

from typing import Any, Literal

import torch

from engine.specs.trainer import DeepSpeedSpec
from storage.serialization import Frozen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ZeroOptions(Frozen):
    """Options of a rank. They are equal on all ranks."""

    trainer: DeepSpeedSpec
    compute_dtype: Literal["float32", "bfloat16", "float64"]
    device: Literal["cpu", "cuda"]
    threads: int
    """CPU threads per rank."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.compute_dtype]

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == "float64" else torch.float32


def deepspeed_config(options: ZeroOptions, *, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration. `parameters` is the model's number of elements, which no bucket needs to exceed."""
    spec = options.trainer
    lower = options.compute_dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the trainer says when an update ends
        "gradient_clipping": 1.0,  # every update sets its own
        "steps_per_print": 1 << 30,
        "zero_optimization": _zero_config(spec, options, parameters),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no compiler on the machine
        "bf16": {"enabled": lower, "check_grad_overflow": lower},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _zero_config(spec: DeepSpeedSpec, options: ZeroOptions, parameters: int) -> dict[str, Any]:
    bucket = max(1, min(spec.bucket_mib * (1 << 20) // options.dtype.itemsize, parameters))
    zero: dict[str, Any] = {
        "stage": spec.zero_stage,
        # as the trainer ends updates itself, DeepSpeed can overlap in stage 2 only, at twice the buckets
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
