"""Conversions of verl's values into ours, by the names that verl_keys.toml gives them: batches, loss, rewards."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from flows.verl.convert_data import DATA_CONVERSIONS
from flows.verl.convert_engine import ENGINE_CONVERSIONS
from flows.verl.convert_validation import VALIDATION_CONVERSIONS
from flows.verl.read import Verl
from flows.verl.values import ACTOR, ROLLOUT, Conversion, Near, Nothing, Paths, Refused, flow_of, local_path, times

REWARD_GRADER = "tasks.graders.verl:VerlReward"
REWARD_MODEL_GRADER = "tasks.graders.reward_model:RewardModelGrader"


# -- which flow ------------------------------------------------------------------------------------------------


LOSS_MODES = {"vanilla": "clip", "cispo": "cispo"}


def _loss_mode(verl: Verl, key: str, value: Any) -> Any:
    if value != "vanilla" and verl.get("algorithm.rollout_correction.bypass_mode"):
        raise Refused("verl's bypass_mode replaces it by the clipped ratio; take one of the two out")
    if value == "gspo":
        if flow_of(verl) == "gspo":
            return Paths({})
        raise Refused("GSPO takes its advantages from groups, not from a critic; use adv_estimator=grpo")
    if value not in LOSS_MODES:
        raise Refused(f"there is no loss {value!r} here; expected {', '.join(LOSS_MODES)} or gspo")
    return LOSS_MODES[value]


ESTIMATORS = {
    "grpo": None, "grpo_vectorized": None, "rloo": "leave_one_out", "rloo_vectorized": "leave_one_out",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip


def _estimator(verl: Verl, key: str, value: Any) -> Any:
    if value == "gae":
        return Nothing()
    if value not in ESTIMATORS:
        raise Refused(f"there is no estimator {value!r} here; expected gae, {', '.join(sorted(ESTIMATORS))}")
    return ESTIMATORS[value] or Nothing("norm_adv_by_std_in_grpo says which")


def _scale_by_std(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("algorithm.adv_estimator") not in ("grpo", "grpo_vectorized"):
        return Nothing("only adv_estimator=grpo reads it")
    return "group_sample_std" if value else "centred"


# -- batches ---------------------------------------------------------------------------------------------------


def _completions(verl: Verl, key: str, value: Any) -> Any:
    """verl's batches count prompts, ours completions."""
    return times(value, verl.get(ROLLOUT + "n"))


def _micro_batch(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Nothing()
    if verl.get(ACTOR + "use_dynamic_bsz"):
        return Nothing("use_dynamic_bsz counts tokens instead")
    return times(value, verl.get("data.max_prompt_length") + verl.get("data.max_response_length"))


def _dynamic_batch(verl: Verl, key: str, value: Any) -> Any:
    """GPUs that share a sequence share the pack."""
    group, engine = (ACTOR, ACTOR) if verl.kind == "ppo_trainer" else ("data.", "engine.")
    if not verl.get(group + "use_dynamic_bsz"):
        return Nothing("use_dynamic_bsz is false")
    return times(value, verl.get(engine + "ulysses_sequence_parallel_size"))


def _conversations(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Nothing()
    if verl.kind == "sft_trainer_engine" and verl.get("data.use_dynamic_bsz"):
        return Nothing("use_dynamic_bsz counts tokens instead")
    return times(value, verl.get("data.max_length"))


def _conversation_length(verl: Verl, key: str, value: Any) -> Any:
    pack = _conversations(verl, key, verl.get("data.micro_batch_size_per_gpu"))
    packs = {} if isinstance(pack, Nothing) else {"engine.max_tokens_per_forward": pack}
    return Paths({"algorithm.max_tokens": value} | packs)


def _conversation_truncation(verl: Verl, key: str, value: Any) -> Any:
    if verl.kind == "sft_trainer_engine" and verl.get("data.pad_mode") == "no_padding":
        return "right"  # whatever truncation says
    if value not in ("error", "left", "right"):
        raise Refused(f"a conversation is not cut in the {value}; expected error, left or right")
    return value


# -- loss ------------------------------------------------------------------------------------------------------


def _clip(verl: Verl, key: str, value: Any) -> Any:
    """verl reads it only where low and high are null; older configs know nothing else."""
    if any(verl.is_given(ACTOR + name) for name in ("clip_ratio_low", "clip_ratio_high")):
        return Nothing("clip_ratio_low and clip_ratio_high decide")
    return value if verl.is_given(key) else Nothing("clip_ratio_low and clip_ratio_high decide")


def _clip_low(verl: Verl, key: str, value: Any) -> Any:
    if not verl.is_given(key) and _only_clip_ratio(verl):
        return Nothing("clip_ratio is given")
    return verl.get(ACTOR + "clip_ratio") if value is None else value


def _clip_high(verl: Verl, key: str, value: Any) -> Any:
    if not verl.is_given(key) and _only_clip_ratio(verl):
        return Nothing("clip_ratio is given")
    return verl.get(ACTOR + "clip_ratio") if value is None else value


def _only_clip_ratio(verl: Verl) -> bool:
    given = {name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high") if verl.is_given(ACTOR + name)}
    return given == {"clip_ratio"}


LOSS_NORMS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "token-sum": "token_sum"}


def _loss_norm(verl: Verl, key: str, value: Any) -> Any:
    if flow_of(verl) == "gspo":
        return Nothing("verl's GSPO takes the mean of the sequences' means, as ours does")
    if value == "seq-mean-token-sum-norm" and verl.get(ACTOR + "loss_scale_factor") is None:
        return _divided_by(verl.get("data.max_response_length"))
    if value in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return _divided_by(1 if value == "seq-mean-token-sum" else verl.get(ACTOR + "loss_scale_factor"))
    if value not in LOSS_NORMS:
        known = ", ".join([*LOSS_NORMS, "seq-mean-token-sum", "seq-mean-token-sum-norm"])
        raise Refused(f"there is no norm {value!r} here; expected {known}")
    return Paths({"algorithm.loss_norm": LOSS_NORMS[value]})


def _divided_by(tokens: Any) -> Paths:
    """The sum over the tokens of each completion, as a mean over completions, by so many tokens each."""
    return Paths({"algorithm.loss_norm": "constant", "regularisation.norm_constant": tokens})


def _loss_scale(verl: Verl, key: str, value: Any) -> Any:
    if verl.get(ACTOR + "loss_agg_mode") != "seq-mean-token-sum-norm" or flow_of(verl) == "gspo":
        return Nothing("only loss_agg_mode=seq-mean-token-sum-norm reads it")
    return Nothing("data.max_response_length says it") if value is None else value


def _kl_loss(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("algorithm.use_kl_in_reward"):
        return Nothing("use_kl_in_reward puts the KL term into the reward")
    return Nothing("kl_loss_coef says how much") if value else 0.0


def _kl_in_reward(verl: Verl, key: str, value: Any) -> Any:
    if value and verl.get(ACTOR + "use_kl_loss"):
        raise Refused("the KL term stands in the loss or in the reward, not in both; choose one of them")
    return "reward" if value else Nothing()


def _kl_controller(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("fixed", "adaptive"):
        raise Refused(f"there is no controller {value!r} here; expected fixed or adaptive")
    return value


def _importance(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Nothing()
    if verl.get("algorithm.rollout_correction.bypass_mode"):
        return Nothing("bypass_mode's ratio is against the sampler's probability, and verl adds no weights to it")
    if value != "token":
        raise Refused(f"importance weights are per token here, not per {value}")
    return Nothing("rollout_is_threshold is the cap")


def _importance_cap(verl: Verl, key: str, value: Any) -> Any:
    if isinstance(value, str):
        raise Refused("importance weights have an upper cap only; give a number")
    return value


def _bypass(verl: Verl, key: str, value: Any) -> Any:
    return "sampler" if value else Nothing()


KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip


def _kl_estimator(verl: Verl, key: str, value: Any) -> Any:
    if value in KL_ESTIMATORS:
        return KL_ESTIMATORS[value]
    if value == "full":
        raise Refused("the KL over the whole vocabulary is not kept; expected low_var_kl, kl, abs or mse")
    raise Refused(f"there is no KL estimator {value!r} here; expected {', '.join(KL_ESTIMATORS)}")


# -- which completions count -----------------------------------------------------------------------------------

REWARD_METRICS = (None, "score", "seq_reward", "seq_final_reward")


def _filter_metric(verl: Verl, key: str, value: Any) -> Any:
    if value in REWARD_METRICS:
        return Nothing("a group is judged by its rewards")
    return Near(value, "a group is judged by its rewards, which is the same where they say right or wrong")


def _refill_rounds(verl: Verl, key: str, value: Any) -> Any:
    """verl counts the first draw too, and fails at the last; 0 is without end."""
    if value > 0:
        return Paths({"rules.max_refill_rounds": value - 1, "rules.refill_end": "fail"})
    return Nothing("it has no limit in verl, rules.max_refill_rounds here")


def _overlong(verl: Verl, key: str, value: Any) -> Any:
    return Nothing("its len and penalty_factor say how") if value else Nothing()


def _overlong_part(verl: Verl, key: str, value: Any) -> Any:
    """The buffer is known by three names; each has its own switch."""
    group = key.rpartition(".")[0]
    if not all(verl.get(f"{group}.{name}") for name in ("enable", "len", "penalty_factor")):
        return Nothing("the buffer is not enabled, or has no length or penalty")
    return value


# -- rewards ------------------------------------------------------------------------------------


def _reward_file(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Nothing()
    path = Path(local_path(value))
    arguments = {"path": str(path)} | ({"sha256": sha256(path.read_bytes()).hexdigest()} if path.is_file() else {})
    if verl.kind == "evaluation":
        arguments |= {"data_source_column": verl.get("data.data_source_key")}
        arguments |= {"reward_model_column": verl.get("data.reward_model_key")}
    elif verl.get("data.reward_fn_key") != "data_source":
        arguments |= {"data_source_column": verl.get("data.reward_fn_key")}
    at = "suite.graders.0" if verl.kind == "evaluation" else "grader"
    return Paths({f"{at}.path": REWARD_GRADER, **{f"{at}.arguments.{name}": text for name, text in arguments.items()}})


FUNCTIONS = ("custom_reward_function.path", "reward.custom_reward_function.path")
REWARD_MODELS = {
    "reward_model.enable": "reward_model.model.path", "reward.reward_model.enable": "reward.reward_model.model_path",
}  # fmt: skip


def _reward_model_switch(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Nothing()
    if not any(verl.given.get(path) for path in REWARD_MODELS.values()):
        raise Refused(f"which model it is, is not given; give {REWARD_MODELS[key]}")
    return Nothing("the reward model's path says which")


def _reward_model(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Nothing()
    if any(verl.get(path) for path in FUNCTIONS):
        raise Refused("both a reward function and a reward model: verl hands the one to the other; choose one of them")
    key_of = {"grader_key": "reward_model", "model": local_path(value)}
    arguments = {f"grader.arguments.{name}": text for name, text in key_of.items()}
    return Paths({"grader.path": REWARD_MODEL_GRADER, **arguments})


def _reward_name(verl: Verl, key: str, value: Any) -> Any:
    if value is None or verl.get(key.rpartition(".")[0] + ".path") is None:
        return Nothing()
    at = "suite.graders.0" if verl.kind == "evaluation" else "grader"
    return Paths({f"{at}.arguments.name": value})


# -- plain -----------------------------------------------------------------------------------------------------


def _only_true(verl: Verl, key: str, value: Any) -> Any:
    return True if value else Nothing()


def _when_set(verl: Verl, key: str, value: Any) -> Any:
    return Nothing() if value is None else value


def _positive(verl: Verl, key: str, value: Any) -> Any:
    return value if value is not None and value > 0 else Nothing()


def _names(verl: Verl, key: str, value: Any) -> Any:
    return value if value == "all-linear" or isinstance(value, list) else [value]


CONVERSIONS: dict[str, Conversion] = {
    **DATA_CONVERSIONS, **ENGINE_CONVERSIONS, **VALIDATION_CONVERSIONS,
    "bypass": _bypass, "clip": _clip, "clip_high": _clip_high, "clip_low": _clip_low, "completions": _completions,
    "conversation_length": _conversation_length, "conversation_truncation": _conversation_truncation,
    "conversations": _conversations, "dynamic_batch": _dynamic_batch,
    "estimator": _estimator, "filter_metric": _filter_metric, "importance": _importance,
    "importance_cap": _importance_cap, "kl_controller": _kl_controller, "kl_estimator": _kl_estimator,
    "kl_in_reward": _kl_in_reward, "kl_loss": _kl_loss, "loss_mode": _loss_mode, "loss_norm": _loss_norm,
    "loss_scale": _loss_scale, "micro_batch": _micro_batch, "names": _names, "only_true": _only_true,
    "overlong": _overlong, "overlong_part": _overlong_part, "positive": _positive, "refill_rounds": _refill_rounds,
    "reward_file": _reward_file, "reward_model": _reward_model, "reward_model_switch": _reward_model_switch,
    "reward_name": _reward_name, "scale_by_std": _scale_by_std, "when_set": _when_set,
}  # fmt: skip
"""By the names of verl_keys.toml."""
