"""Conversions of verl's values: optimizer, engine, checkpoints."""

from __future__ import annotations

import re
from typing import Any

from flows.verl.read import Verl
from flows.verl.values import Approximate, Conversion, NoCounterpart, PathValues, Unused, local_path, strategy_of, times

# -- optimizer -------------------------------------------------------------------------------------------------


def _betas(verl: Verl, key: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"{value!r:.200} is not a pair")
    if strategy_of(verl) == "megatron":
        value = MEGATRON_BETAS
    group = "value_model.optimizer" if key.startswith("critic.") else "optimizer"
    return PathValues({f"{group}.beta1": value[0], f"{group}.beta2": value[1]})


# -- engine ----------------------------------------------------------------------------------------------------


MEGATRON_BETAS = [0.9, 0.999]
"""The betas of Megatron's optimizer. verl does not pass its own to it (utils/megatron/optimizer.py)."""
ZERO = "layout is replaced by ZeRO 3 over the same GPUs: the same sums, in another order"
LAYOUTS = {
    "megatron": f"Megatron's {ZERO}. Its AdamW does not decay norms and biases, ours decays all weights",
    "veomni": f"VeOmni's {ZERO}", "automodel": f"Automodel's {ZERO}",
    "fsdp_turbo": f"FSDP Turbo's {ZERO}",
}  # fmt: skip
"""How our trainer differs from those of verl that are not FSDP."""


def _trainer(verl: Verl, key: str, value: Any) -> Any:
    if value in LAYOUTS:
        return Approximate("deepspeed", LAYOUTS[value])
    if value not in ("fsdp", "fsdp2"):
        raise NoCounterpart(f"there is no trainer {value!r:.200} here; expected fsdp, fsdp2, {', '.join(LAYOUTS)}")
    return "deepspeed"


def _model_engine(verl: Verl, key: str, value: Any) -> Any:
    """The group of files that verl's trainer is configured by."""
    if value == "dp":
        return Unused("actor.strategy decides")
    if value not in LAYOUTS:
        raise NoCounterpart(f"there is no trainer {value!r:.200} here; expected dp, {', '.join(LAYOUTS)}")
    return Approximate("deepspeed", LAYOUTS[value])


MASTER_DTYPE = "master weights and moments are float32 here, bfloat16 in verl"


def _master_dtype(verl: Verl, key: str, value: Any) -> Any:
    if value in (None, "fp32", "float32"):
        return Unused()
    if value not in ("bf16", "bfloat16"):
        raise NoCounterpart(f"the master weights are float32 here, not {value}")
    return Approximate(PathValues({}), MASTER_DTYPE)


def _mixed_precision(verl: Verl, key: str, value: Any) -> Any:
    if value:
        return Unused()
    return Approximate(PathValues({}), MASTER_DTYPE)


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
    if value == "npu":
        return Approximate("cuda", "the engine runs on CUDA GPUs")
    if value not in ("cuda", "cpu"):
        raise NoCounterpart(f"there is no device {value!r:.200} here; expected cuda or cpu")
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
    if value in ("sglang", "trtllm"):
        return Approximate("vllm", "vLLM draws from the same distribution")
    raise NoCounterpart(f"there is no sampler {value!r:.200} here; expected vllm, sglang, trtllm or hf")


def _samplers(verl: Verl, key: str, value: Any) -> Any:
    """All GPUs sample: a sampler takes as many as share its copy of the model."""
    gpus = times(verl.get("trainer.n_gpus_per_node"), verl.get("trainer.nnodes"))
    replicas = max(1, gpus // times(value, 1))
    paths = {"engine.sampler.tensor_parallel": value, "engine.sampler.replicas": replicas}
    # replicas on the GPUs of the ranks have one GPU each
    if value == 1:
        return PathValues(paths | {"engine.sampler.placement": "colocated"})
    difference = (
        f"the samplers need {replicas * value} GPUs besides those of the ranks, and verl's share them; to share them: "
        f"--set engine.sampler.placement=colocated --set engine.sampler.tensor_parallel=1 "
        f"--set engine.sampler.replicas={gpus}"
    )
    return Approximate(PathValues(paths), difference)


def _top_k(verl: Verl, key: str, value: Any) -> Any:
    return max(value, 0)


# -- names, checkpoints --------------------------------------------------------------------------------


def _run_key(verl: Verl, key: str, value: Any) -> Any:
    """A run with the same key is resumed, as with resume_mode=auto."""
    if verl.get("trainer.resume_mode") != "auto":
        return Unused("resume_mode is not auto")
    # a run key has only letters, digits and . _ -
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.").lower()


def _folder(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
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


def _keep_one(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return 1


ENGINE_CONVERSIONS: dict[str, Conversion] = {
    "activation_offload": _activation_offload, "betas": _betas, "cluster": _cluster, "compute_dtype": _compute_dtype,
    "cpu_offload": _cpu_offload, "device": _device, "folder": _folder, "keep_one": _keep_one,
    "master_dtype": _master_dtype, "mixed_precision": _mixed_precision, "model_engine": _model_engine,
    "offload": _offload, "ranks": _ranks, "recompute": _recompute, "run_key": _run_key, "sampler": _sampler,
    "samplers": _samplers, "save_every": _save_every, "top_k": _top_k, "trainer": _trainer, "zero_stage": _zero_stage,
}  # fmt: skip
