"""Conversions of verl's values: batches, loss, rewards. keys.toml refers to all conversions by name."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from flows.verl.convert_data import DATA_CONVERSIONS
from flows.verl.convert_engine import ENGINE_CONVERSIONS
from flows.verl.convert_validation import VALIDATION_CONVERSIONS
from flows.verl.read import Verl
from flows.verl.values import (
    ACTOR,
    ROLLOUT,
    Approximate,
    Conversion,
    NoCounterpart,
    PathValues,
    Unused,
    flow_of,
    local_path,
    times,
)

REWARD_GRADER = "tasks.graders.verl:VerlReward"
REWARD_MODEL_GRADER = "tasks.graders.reward_model:RewardModelGrader"


# -- which flow ------------------------------------------------------------------------------------------------


LOSS_MODES = {"vanilla": "clip", "cispo": "cispo"}


def _loss_mode(verl: Verl, key: str, value: Any) -> Any:
    # in bypass mode the ratio is against the sampler's probability, whatever the loss
    if value != "vanilla" and verl.get("algorithm.rollout_correction.bypass_mode"):
        raise NoCounterpart("verl's bypass_mode replaces it by the clipped ratio; remove one of the two")
    if value == "gspo":
        if flow_of(verl) == "gspo":
            return PathValues({})
        raise NoCounterpart("GSPO computes advantages from groups and not from a critic; use adv_estimator=grpo")
    if value not in LOSS_MODES:
        raise NoCounterpart(f"there is no loss {value!r} here; expected {', '.join(LOSS_MODES)} or gspo")
    return LOSS_MODES[value]


ESTIMATORS = {
    "grpo": None, "grpo_vectorized": None, "rloo": "leave_one_out", "rloo_vectorized": "leave_one_out",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip


def _estimator(verl: Verl, key: str, value: Any) -> Any:
    # GAE selects the flow ppo, and needs no estimator of groups
    if value == "gae":
        return Unused()
    if value not in ESTIMATORS:
        raise NoCounterpart(f"there is no estimator {value!r} here; expected gae, {', '.join(sorted(ESTIMATORS))}")
    return ESTIMATORS[value] or Unused("norm_adv_by_std_in_grpo decides")


def _scale_by_std(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("algorithm.adv_estimator") not in ("grpo", "grpo_vectorized"):
        return Unused("only adv_estimator=grpo reads it")
    return "group_sample_std" if value else "centred"


# -- batches ---------------------------------------------------------------------------------------------------


def _completions(verl: Verl, key: str, value: Any) -> Any:
    """verl's batch sizes count prompts, ours count completions."""
    return times(value, verl.get(ROLLOUT + "n"))


def _micro_batch(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.get(ACTOR + "use_dynamic_bsz"):
        return Unused("use_dynamic_bsz counts tokens instead")
    # verl counts sequences, our config counts tokens
    return times(value, verl.get("data.max_prompt_length") + verl.get("data.max_response_length"))


def _dynamic_batch(verl: Verl, key: str, value: Any) -> Any:
    """GPUs that share a sequence share the token budget."""
    # the trainers have the same keys in other groups
    group, engine = "data.", "engine."
    if verl.kind == "ppo_trainer":
        group, engine = ACTOR, ACTOR
    if not verl.get(group + "use_dynamic_bsz"):
        return Unused("use_dynamic_bsz is false")
    return times(value, verl.get(engine + "ulysses_sequence_parallel_size"))


def _conversations(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.kind == "sft_trainer_engine" and verl.get("data.use_dynamic_bsz"):
        return Unused("use_dynamic_bsz counts tokens instead")
    # a conversation has at most max_length tokens
    return times(value, verl.get("data.max_length"))


def _conversation_length(verl: Verl, key: str, value: Any) -> Any:
    pack = _conversations(verl, key, verl.get("data.micro_batch_size_per_gpu"))
    paths = {"algorithm.max_tokens": value}
    if not isinstance(pack, Unused):
        paths["engine.max_tokens_per_forward"] = pack
    return PathValues(paths)


def _conversation_truncation(verl: Verl, key: str, value: Any) -> Any:
    if verl.kind == "sft_trainer_engine" and verl.get("data.pad_mode") == "no_padding":
        # verl ignores `truncation` in this mode
        return "right"
    if value not in ("error", "left", "right"):
        raise NoCounterpart(f"truncation {value!r} is not supported for conversations; expected error, left or right")
    return value


# -- loss ------------------------------------------------------------------------------------------------------


def _clip(verl: Verl, key: str, value: Any) -> Any:
    """verl reads it only if low and high are null. Older configs have only this key."""
    if any(verl.is_given(ACTOR + name) for name in ("clip_ratio_low", "clip_ratio_high")):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    if not verl.is_given(key):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    return value


def _clip_low(verl: Verl, key: str, value: Any) -> Any:
    if not verl.is_given(key) and _only_clip_ratio(verl):
        return Unused("clip_ratio is given")
    if value is None:
        return verl.get(ACTOR + "clip_ratio")
    return value


def _clip_high(verl: Verl, key: str, value: Any) -> Any:
    if not verl.is_given(key) and _only_clip_ratio(verl):
        return Unused("clip_ratio is given")
    if value is None:
        return verl.get(ACTOR + "clip_ratio")
    return value


def _only_clip_ratio(verl: Verl) -> bool:
    # a config that gives only clip_ratio means both sides
    given_keys = {name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high") if verl.is_given(ACTOR + name)}
    return given_keys == {"clip_ratio"}


LOSS_NORMS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "token-sum": "token_sum"}


def _loss_norm(verl: Verl, key: str, value: Any) -> Any:
    if flow_of(verl) == "gspo":
        return Unused("verl's GSPO always uses the mean of the sequence means, as ours does")
    # the constant divisor of a completion's sum: by default the longest completion
    if value == "seq-mean-token-sum-norm" and verl.get(ACTOR + "loss_scale_factor") is None:
        return _divided_by(verl.get("data.max_response_length"))
    if value in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        divisor = 1 if value == "seq-mean-token-sum" else verl.get(ACTOR + "loss_scale_factor")
        return _divided_by(divisor)
    if value not in LOSS_NORMS:
        known = ", ".join([*LOSS_NORMS, "seq-mean-token-sum", "seq-mean-token-sum-norm"])
        raise NoCounterpart(f"there is no norm {value!r} here; expected {known}")
    return PathValues({"algorithm.loss_norm": LOSS_NORMS[value]})


def _divided_by(tokens: Any) -> PathValues:
    """The sum over the tokens of each completion, divided by this number of tokens, as a mean over completions."""
    return PathValues({"algorithm.loss_norm": "constant", "regularisation.norm_constant": tokens})


def _loss_scale(verl: Verl, key: str, value: Any) -> Any:
    if verl.get(ACTOR + "loss_agg_mode") != "seq-mean-token-sum-norm" or flow_of(verl) == "gspo":
        return Unused("only loss_agg_mode=seq-mean-token-sum-norm reads it")
    if value is None:
        return Unused("data.max_response_length decides")
    return value


def _kl_loss(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("algorithm.use_kl_in_reward"):
        return Unused("use_kl_in_reward puts the KL term into the reward")
    if not value:
        return 0.0
    return Unused("kl_loss_coef gives the coefficient")


def _kl_in_reward(verl: Verl, key: str, value: Any) -> Any:
    if value and verl.get(ACTOR + "use_kl_loss"):
        raise NoCounterpart("the KL term can be in the loss or in the reward, but not in both; choose one of them")
    if not value:
        return Unused()
    return "reward"


def _kl_controller(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("fixed", "adaptive"):
        raise NoCounterpart(f"there is no controller {value!r} here; expected fixed or adaptive")
    return value


def _importance(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.get("algorithm.rollout_correction.bypass_mode"):
        return Unused("in bypass_mode the ratio uses the sampler's probability, and verl adds no importance weights")
    if value != "token":
        raise NoCounterpart(f"importance weights are per token here, not per {value}")
    return Unused("rollout_is_threshold gives the cap")


def _importance_cap(verl: Verl, key: str, value: Any) -> Any:
    if isinstance(value, str):
        raise NoCounterpart("importance weights have an upper cap only; give a number")
    return value


def _bypass(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return "sampler"


KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip


def _kl_estimator(verl: Verl, key: str, value: Any) -> Any:
    if value in KL_ESTIMATORS:
        return KL_ESTIMATORS[value]
    if value == "full":
        raise NoCounterpart("the KL over the whole vocabulary is not supported; expected low_var_kl, kl, abs or mse")
    raise NoCounterpart(f"there is no KL estimator {value!r} here; expected {', '.join(KL_ESTIMATORS)}")


# -- which completions count -----------------------------------------------------------------------------------

REWARD_METRICS = (None, "score", "seq_reward", "seq_final_reward")


def _filter_metric(verl: Verl, key: str, value: Any) -> Any:
    if value in REWARD_METRICS:
        return Unused("groups are filtered by their rewards")
    return Approximate(value, "groups are filtered by their rewards, which is the same if rewards mean right or wrong")


def _refill_rounds(verl: Verl, key: str, value: Any) -> Any:
    """verl also counts the first round, and fails after the last one. 0 means no limit."""
    if value > 0:
        # our number does not count the first round
        return PathValues({"rules.max_refill_rounds": value - 1, "rules.refill_end": "fail"})
    return Unused("verl has no limit, Ostinato has rules.max_refill_rounds")


def _overlong(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return Unused("len and penalty_factor decide")


def _overlong_part(verl: Verl, key: str, value: Any) -> Any:
    """The buffer has three names in verl, each with its own switch."""
    group = key.rpartition(".")[0]
    if not all(verl.get(f"{group}.{name}") for name in ("enable", "len", "penalty_factor")):
        return Unused("the buffer is not enabled, or has no length or penalty")
    return value


# -- rewards ------------------------------------------------------------------------------------


def _reward_file(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    path = Path(local_path(value))
    # with the digest of the file, another reward function is another run
    arguments = {"path": str(path)}
    if path.is_file():
        arguments["sha256"] = sha256(path.read_bytes()).hexdigest()

    # the columns that the reward function reads, if they are not the default ones
    if verl.kind == "evaluation":
        arguments["data_source_column"] = verl.get("data.data_source_key")
        arguments["reward_model_column"] = verl.get("data.reward_model_key")
    elif verl.get("data.reward_fn_key") != "data_source":
        arguments["data_source_column"] = verl.get("data.reward_fn_key")

    grader = _grader_path(verl)
    values = {f"{grader}.arguments.{name}": text for name, text in arguments.items()}
    return PathValues({f"{grader}.path": REWARD_GRADER} | values)


def _grader_path(verl: Verl) -> str:
    """The path of the grader in our config."""
    return "suite.graders.0" if verl.kind == "evaluation" else "grader"


FUNCTIONS = ("custom_reward_function.path", "reward.custom_reward_function.path")
REWARD_MODELS = {
    "reward_model.enable": "reward_model.model.path", "reward.reward_model.enable": "reward.reward_model.model_path",
}  # fmt: skip


def _reward_model_switch(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    if not any(verl.given.get(path) for path in REWARD_MODELS.values()):
        raise NoCounterpart(f"the reward model is not given; give {REWARD_MODELS[key]}")
    return Unused("the reward model's path decides")


def _reward_model(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if any(verl.get(path) for path in FUNCTIONS):
        raise NoCounterpart("a reward function and a reward model cannot be combined; choose one of them")
    return PathValues(
        {
            "grader.path": REWARD_MODEL_GRADER,
            "grader.arguments.grader_key": "reward_model",
            "grader.arguments.model": local_path(value),
        }
    )


def _reward_name(verl: Verl, key: str, value: Any) -> Any:
    if value is None or verl.get(key.rpartition(".")[0] + ".path") is None:
        return Unused()
    return PathValues({f"{_grader_path(verl)}.arguments.name": value})


# -- plain -----------------------------------------------------------------------------------------------------


def _only_true(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return True


def _when_set(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    return value


def _positive(verl: Verl, key: str, value: Any) -> Any:
    if value is not None and value > 0:
        return value
    return Unused()


def _names(verl: Verl, key: str, value: Any) -> Any:
    if value == "all-linear" or isinstance(value, list):
        return value
    return [value]


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
"""All conversions, by their names in keys.toml."""
