"""Conversions of verl's values: optimizer, engine, length of the run, checkpoints."""

from __future__ import annotations

import re
from typing import Any

from flows.verl.read import Verl
from flows.verl.values import Approximate, Conversion, NoCounterpart, PathValues, Unused, local_path, times

# -- optimizer -------------------------------------------------------------------------------------------------


def _schedule(verl: Verl, key: str, value: Any) -> Any:
    # warmup_style is an older name of the schedule, and comes first
    group = key.rpartition(".")[0]
    if verl.kind != "sft_trainer" and verl.get(group + ".warmup_style") is not None:
        return Unused("warmup_style decides")
    return _named_schedule(verl, key, value)


def _schedule_alias(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    return _named_schedule(verl, key, value)


def _schedule_name(verl: Verl, key: str) -> Any:
    """verl's name of the schedule in the group of an optimizer's key."""
    group = key.rpartition(".")[0]
    if verl.kind == "sft_trainer":
        return verl.get(group + ".lr_scheduler")
    return verl.get(group + ".warmup_style") or verl.get(group + ".lr_scheduler_type")


def _warmup_steps(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value < 0:
        return Unused("lr_warmup_steps_ratio decides")
    return value


def _warmup_ratio(verl: Verl, key: str, value: Any) -> Any:
    group = key.rpartition(".")[0]
    steps = verl.get(group + ".lr_warmup_steps")
    if steps is not None and steps >= 0:
        return Unused("lr_warmup_steps decides")
    # the SFT trainer has an older name, which counts only if the new one is not given
    older = group + ".warmup_steps_ratio"
    if verl.kind == "sft_trainer" and key != older and verl.is_given(older) and not verl.is_given(key):
        return Unused("warmup_steps_ratio decides")
    if value == 0 and _schedule_name(verl, key) == "constant":
        return Unused()
    return value


def _older_warmup_ratio(verl: Verl, key: str, value: Any) -> Any:
    # both names have a default, so only a given key counts
    newer = key.replace(".warmup_steps_ratio", ".lr_warmup_steps_ratio")
    if not verl.is_given(key) or verl.is_given(newer):
        return Unused("lr_warmup_steps_ratio decides")
    return _warmup_ratio(verl, key, value)


def _lowest_rate(verl: Verl, key: str, value: Any) -> Any:
    if _schedule_name(verl, key) == "constant":
        return Unused("a constant rate has no minimum")
    return 0.0 if value is None else value


def _betas(verl: Verl, key: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"{value!r} is not a pair")
    group = "value_model.optimizer" if key.startswith("critic.") else "optimizer"
    return PathValues({f"{group}.beta1": value[0], f"{group}.beta2": value[1]})


def _named_schedule(verl: Verl, key: str, value: Any) -> Any:
    if value == "constant":
        return "constant"
    if value == "cosine":
        return Approximate("cosine", SCHEDULE_DIFFERENCE)
    if value == "wsd" and verl.kind == "sft_trainer":
        return Approximate("wsd", f"{SCHEDULE_DIFFERENCE}; over the last tenth of the run the rate falls linearly")
    raise NoCounterpart(f"there is no schedule {value!r} here; expected constant or cosine")


SCHEDULE_DIFFERENCE = (
    "a warm-up of W steps begins at lr / W, while verl's begins at 0; the schedule reaches its end in the last step"
)


# -- engine ----------------------------------------------------------------------------------------------------


def _trainer(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("fsdp", "fsdp2"):
        raise NoCounterpart(f"there is no trainer {value!r} here; expected fsdp or fsdp2 (DeepSpeed ZeRO here)")
    return "deepspeed"


def _recompute(verl: Verl, key: str, value: Any) -> Any:
    # our setting has one value for both of verl's switches
    switch = key.rpartition(".")[0] + ".enable_activation_offload"
    if value and verl.table.has_default(switch) and verl.get(switch):
        return Unused("enable_activation_offload includes it")
    return "recompute" if value else "none"


def _activation_offload(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return "offload"


def _offload(verl: Verl, key: str, value: Any) -> Any:
    return "cpu" if value else "none"


def _zero_stage(verl: Verl, key: str, value: Any) -> Any:
    """ZeRO 3 also shards the weights, like FSDP with resharding. Only ZeRO 3 can offload them."""
    group = key.rpartition(".")[0]
    if value or verl.get(group + ".param_offload"):
        return 3
    return 2


def _cpu_offload(verl: Verl, key: str, value: Any) -> Any:
    return PathValues({"engine.trainer.offload_optimizer": "cpu" if value else "none", "engine.trainer.zero_stage": 3})


DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32",
}  # fmt: skip


def _compute_dtype(verl: Verl, key: str, value: Any) -> Any:
    if value not in DTYPES:
        raise NoCounterpart(f"the engine does not compute in {value}; expected {', '.join(DTYPES)}")
    return DTYPES[value]


def _device(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("cuda", "cpu"):
        raise NoCounterpart(f"there is no device {value!r} here; expected cuda or cpu")
    return value


def _ranks(verl: Verl, key: str, value: Any) -> Any:
    """verl counts GPUs per node, our config counts ranks over all nodes."""
    return times(value, verl.get("trainer.nnodes"))


def _cluster(verl: Verl, key: str, value: Any) -> Any:
    """Several nodes form a Ray cluster, both for verl's PPO trainer and for our engine."""
    if times(value, 1) == 1:
        return Unused("trainer.n_gpus_per_node gives the number of ranks")
    return Approximate("auto", "the cluster whose head runs on this machine; for another one, give its HOST:PORT")


def _sampler(verl: Verl, key: str, value: Any) -> Any:
    if value in (None, "???", "vllm"):
        return "vllm"
    if value == "hf":
        return "torch"
    raise NoCounterpart(f"there is no sampler {value!r} here; expected vllm or hf")


def _top_k(verl: Verl, key: str, value: Any) -> Any:
    return max(value, 0)


# -- length, names, checkpoints --------------------------------------------------------------------------------


def _epochs(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("trainer.total_training_steps") is not None:
        return Unused("total_training_steps decides")
    return value


def _run_key(verl: Verl, key: str, value: Any) -> Any:
    """A run with the same key is resumed, as with resume_mode=auto."""
    if verl.get("trainer.resume_mode") != "auto":
        return Unused("resume_mode is not auto")
    # a run key has only letters, digits and . _ -
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.").lower()


def _folder(verl: Verl, key: str, value: Any) -> Any:
    return local_path(value)


def _save_every(verl: Verl, key: str, value: Any) -> Any:
    """Named checkpoints are kept permanently. If verl keeps only the last ones, recovery checkpoints correspond."""
    if value is None or value <= 0:
        return PathValues({"checkpoints.frequency": None})
    # kinds of verl configs have different keys for the number of checkpoints
    rotating = any(
        verl.table.has_default(name) and verl.get(name)
        for name in (
            "trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", "trainer.remove_previous_ckpt_in_save",
        )
    )  # fmt: skip
    if rotating:
        return PathValues({"checkpoints.frequency": None, "checkpoints.recovery_steps": value})
    return PathValues({"checkpoints.frequency": None, "checkpoints.every_steps": value})


def _critic_warmup(verl: Verl, key: str, value: Any) -> Any:
    """verl counts steps, our config has a fraction of the run."""
    steps = verl.get("trainer.total_training_steps")
    # a fraction cannot be computed without the length of the run
    if value and steps is None:
        raise NoCounterpart("its fraction of the run needs trainer.total_training_steps; give it")
    if not value:
        return 0.0
    return value / steps


def _keep_one(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return 1


ENGINE_CONVERSIONS: dict[str, Conversion] = {
    "activation_offload": _activation_offload, "betas": _betas, "cluster": _cluster,
    "compute_dtype": _compute_dtype, "cpu_offload": _cpu_offload, "critic_warmup": _critic_warmup, "device": _device,
    "epochs": _epochs, "folder": _folder, "keep_one": _keep_one, "lowest_rate": _lowest_rate, "offload": _offload,
    "older_warmup_ratio": _older_warmup_ratio, "ranks": _ranks, "recompute": _recompute, "run_key": _run_key,
    "sampler": _sampler, "save_every": _save_every, "schedule": _schedule, "schedule_alias": _schedule_alias,
    "top_k": _top_k, "trainer": _trainer, "warmup_ratio": _warmup_ratio, "warmup_steps": _warmup_steps,
    "zero_stage": _zero_stage,
}  # fmt: skip
