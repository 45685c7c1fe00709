"""Conversions of verl's values: batches, loss, rewards, validation. keys.toml refers to all conversions by name."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from flows.verl.convert_data import DATA_CONVERSIONS
from flows.verl.convert_engine import ENGINE_CONVERSIONS
from flows.verl.convert_loss import LOSS_CONVERSIONS, MEAN_OF_MEANS, WHICH_VERSION
from flows.verl.convert_schedule import SCHEDULE_CONVERSIONS
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
    ranks_of_a_sequence,
    times,
    workers_of,
)

REWARD_GRADER = "tasks.graders.verl:VerlReward"
REWARD_MODEL_GRADER = "tasks.graders.reward_model:RewardModelGrader"


# -- which flow ------------------------------------------------------------------------------------------------


LOSS_MODES = {
    "vanilla": "clip", "cispo": "cispo", "gpg": "cispo", "geo_mean": "gmpo", "sapo": "sapo", "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}  # fmt: skip
NO_RATIO = 1e-12
"""Clip range of cispo that leaves every ratio at 1: the gradient is the advantage times that of the log-probability, as
of verl's gpg (trainer/ppo/core_algos.py, compute_policy_loss_gpg)."""


def _loss_mode(verl: Verl, key: str, value: Any) -> Any:
    # in bypass mode the ratio is against the sampler's probability, whatever the loss
    if value != "vanilla" and verl.get("algorithm.rollout_correction.bypass_mode"):
        raise NoCounterpart("verl's bypass_mode replaces it by the clipped ratio; remove one of the two")
    if value == "gspo":
        if flow_of(verl) == "gspo":
            return PathValues({})
        raise NoCounterpart("GSPO computes advantages from groups and not from a critic; use adv_estimator=grpo")
    if value not in LOSS_MODES:
        raise NoCounterpart(f"there is no loss {value!r:.200} here; expected {', '.join(LOSS_MODES)} or gspo")
    if value == "gpg":
        clips = {"algorithm.clip_range": NO_RATIO, "algorithm.clip_range_high": NO_RATIO}
        return PathValues({"regularisation.policy_loss": LOSS_MODES[value]} | clips)
    if value in COVARIANCES:
        return Approximate(LOSS_MODES[value], COVARIANCES[value])
    return LOSS_MODES[value]


SELECTED = (
    "the tokens are selected once a step, among those of the whole batch, by the log-probabilities before the step; "
    "verl selects among the tokens of each micro-batch, by the current log-probabilities"
)
COVARIANCES = {"clip_cov": SELECTED + ", without those that the clip acts on", "kl_cov": SELECTED}


ESTIMATORS = {
    "grpo": None, "grpo_vectorized": None, "rloo": "leave_one_out", "rloo_vectorized": "leave_one_out",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gpg": "centred",
}  # fmt: skip


# the only completion of a prompt keeps its reward there: its baseline is 0, and its standard deviation counts as 1
SINGLE_ESTIMATORS = {
    "grpo": "raw", "grpo_vectorized": "raw", "rloo": "raw", "reinforce_plus_plus_baseline": "reinforce_plus_plus",
    "gpg": "raw",
}  # fmt: skip
GPG_FACTOR = (
    "verl multiplies the advantages of a batch by its completions, divided by those whose reward is not 0: by 2 if "
    "half of the rewards are 0. AdamW's steps do not depend on a constant factor, but on its changes from step to "
    "step, and on the norm at which the gradient is clipped"
)


def _estimator(verl: Verl, key: str, value: Any) -> Any:
    # GAE selects the flow ppo, and needs no estimator of groups
    if value == "gae":
        return Unused()
    if value == "grpo_passk":
        return _best_of_a_group(verl)
    if value == "gdpo":
        return _estimator_of_parts(verl)
    if value not in ESTIMATORS:
        expected = ", ".join(sorted([*ESTIMATORS, "grpo_passk", "gdpo"]))
        raise NoCounterpart(f"there is no estimator {value!r:.200} here; expected gae, {expected}")
    if verl.get(ROLLOUT + "n") == 1 and value in SINGLE_ESTIMATORS:
        if value == "reinforce_plus_plus_baseline" and verl.get("algorithm.use_kl_in_reward"):
            raise NoCounterpart("with rollout.n=1 it has no baseline; use reinforce_plus_plus")
        advantages: str | None = SINGLE_ESTIMATORS[value]
    else:
        advantages = ESTIMATORS[value]
    if value == "gpg":
        return Approximate(advantages, GPG_FACTOR)
    return advantages or Unused("norm_adv_by_std_in_grpo decides")


STD_OF_THE_BEST = (
    "verl divides the advantage by the standard deviation of the prompt's rewards. With rewards of 0 and 1, of which "
    "only a single 1 has an advantage, that is the same factor for every prompt, on which AdamW's steps do not depend; "
    "with other rewards it differs by prompt. algorithm.norm_adv_by_std_in_grpo=false is exact"
)
WHITENED_BY_COMPLETION = (
    "the sums of the parts are whitened over the completions of a step; verl whitens over their tokens, so that long "
    "completions count more in the mean and the variance"
)


def _best_of_a_group(verl: Verl) -> Any:
    """The best completion of a group has its reward minus the second best (core_algos.py,
    compute_grpo_passk_outcome_advantage): pass_at_k, if k is the size of the group."""
    completions = verl.get(ROLLOUT + "n")
    if completions == 1:
        raise NoCounterpart("it compares the completions of a prompt, and verl refuses it, too; use rollout.n above 1")
    values = PathValues({"algorithm.advantage_estimator": "pass_at_k", "algorithm.pass_k": completions})
    if verl.get("algorithm.norm_adv_by_std_in_grpo"):
        return Approximate(values, STD_OF_THE_BEST)
    return values


def _estimator_of_parts(verl: Verl) -> Any:
    """Each part of the reward normalised apart, then their weighted sum (core_algos.py,
    compute_gdpo_outcome_advantage, August 2026)."""
    if not verl.get("algorithm.norm_adv_by_std_in_grpo"):
        raise NoCounterpart("each part is divided by its standard deviation here; remove norm_adv_by_std_in_grpo=false")
    if verl.get(ROLLOUT + "n") == 1:
        raise NoCounterpart("each part is compared within the completions of a prompt here; use rollout.n above 1")
    if verl.get("algorithm.use_kl_in_reward"):
        raise NoCounterpart("verl's gdpo does not read the KL term in the reward; use actor.use_kl_loss instead")
    return Approximate(PathValues({"algorithm.advantage_estimator": "gdpo"}), WHITENED_BY_COMPLETION)


def _reward_parts(verl: Verl, key: str, value: Any) -> Any:
    """Weights of the parts of the reward function's dict, by name."""
    if verl.get("algorithm.adv_estimator") != "gdpo":
        return Unused("only adv_estimator=gdpo reads it")
    if any(verl.given.get(path) for path in REWARD_MODELS.values()):
        raise NoCounterpart("a reward model gives no parts of a reward; give a reward function that returns them")
    if not any(verl.get(path) for path in FUNCTIONS):
        return Unused("the grader that you name gives the parts itself")
    weights = verl.get("algorithm.gdpo_reward_weights")
    if not isinstance(value, list) or not value:
        raise NoCounterpart("adv_estimator=gdpo needs the names of the parts of the reward; give a list of them")
    if weights is None:
        weights = [1.0] * len(value)
    if not isinstance(weights, list) or len(weights) != len(value):
        raise NoCounterpart(f"it has {len(value)} names, and gdpo_reward_weights is {weights!r:.200}; give as many")
    return dict(zip(value, weights, strict=True))


def _reward_weights(verl: Verl, key: str, value: Any) -> Any:
    return Unused("gdpo_reward_keys decides, if verl reads it")


def _gamma(verl: Verl, key: str, value: Any) -> Any:
    estimator = verl.get("algorithm.adv_estimator")
    if estimator == "gae":
        return PathValues({"credit.gae_gamma": value})
    if estimator == "reinforce_plus_plus":
        return PathValues({"regularisation.gamma": value})
    return Unused(f"adv_estimator={estimator} does not discount")


def _scale_by_std(verl: Verl, key: str, value: Any) -> Any:
    estimator = verl.get("algorithm.adv_estimator")
    if estimator in ("grpo_passk", "gdpo"):
        return Unused("adv_estimator decides")
    if estimator not in ("grpo", "grpo_vectorized"):
        return Unused("only adv_estimator=grpo reads it")
    if verl.get(ROLLOUT + "n") == 1:
        return Unused("with rollout.n=1 the advantage is the reward")
    return "group_sample_std" if value else "centred"


# -- batches ---------------------------------------------------------------------------------------------------


def _completions(verl: Verl, key: str, value: Any) -> Any:
    """verl's batch sizes count prompts, ours count completions."""
    return times(value, verl.get(ROLLOUT + "n"))


def _drawn_prompts(verl: Verl, key: str, value: Any) -> Any:
    """The prompts of a step of verl's data loader."""
    train = verl.get("data.train_batch_size")
    if value in (None, train):
        return Unused("a step draws the prompts that it trains on")
    if verl.get("algorithm.filter_groups.enable"):
        difference = "verl's recipe of DAPO draws rounds of this many prompts; a round here draws the missing groups"
        return Approximate(PathValues({}), difference)
    workers = workers_of(verl)
    if workers is None:
        raise NoCounterpart(
            f"January 2026 trains on these prompts, August 2026 on train_batch_size={train}; {WHICH_VERSION}"
        )
    if workers == "august":
        return Unused("data.train_batch_size decides; the data loader only reads in portions of this size")
    return times(value, verl.get(ROLLOUT + "n"))


def _mini_batch_order(verl: Verl, key: str, value: Any) -> Any:
    """The order in which the completions of a step are split into mini-batches."""
    if value:
        return Unused("the order of mini-batches is drawn from the run's seed")
    if verl.get(ACTOR + "ppo_mini_batch_size") == verl.get("data.train_batch_size"):
        return Unused("a step has one mini-batch")
    difference = (
        "mini-batches are drawn at random from the completions of a step; verl takes them in order, so that a prompt's "
        "completions are often in one mini-batch"
    )
    return Approximate(PathValues({}), difference)


def _router_replay(verl: Verl, key: str, value: Any) -> Any:
    """R2 computes an update with the routes of the pass that computed the logprobs before the step (January 2026:
    workers/megatron_workers.py, compute_log_prob), R3 with those of the sampler."""
    if value in (None, "disabled"):
        return Unused()
    has_one_update = (
        verl.get(ACTOR + "ppo_mini_batch_size") == verl.get("data.train_batch_size")
        and verl.get(ACTOR + "ppo_epochs") == 1
        and not verl.get("algorithm.rollout_correction.bypass_mode")
    )
    if value == "R2" and has_one_update:
        difference = (
            "the routes of the experts are not recorded. A step has one update, whose weights are those that recorded "
            "the routes, so only rounding can choose other experts"
        )
        return Approximate(PathValues({}), difference)
    raise NoCounterpart("mixture-of-experts: routing is neither recorded nor frozen here")


def _micro_batch(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.get(ACTOR + "use_dynamic_bsz"):
        return Unused("use_dynamic_bsz counts tokens instead")
    # verl counts sequences, our config counts tokens
    return times(value, verl.get("data.max_prompt_length") + verl.get("data.max_response_length"))


def _dynamic_batch(verl: Verl, key: str, value: Any) -> Any:
    """GPUs that share a sequence share the token budget."""
    if verl.kind == "ppo_trainer":
        is_dynamic, ranks = verl.get(ACTOR + "use_dynamic_bsz"), ranks_of_a_sequence(verl, ACTOR)
    else:
        is_dynamic, ranks = verl.get("data.use_dynamic_bsz"), ranks_of_a_sequence(verl, "engine.")
    if not is_dynamic:
        return Unused("use_dynamic_bsz is false")
    return times(value, ranks)


def _conversations(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.kind == "sft_trainer_engine" and verl.get("data.use_dynamic_bsz"):
        return Unused("use_dynamic_bsz counts tokens instead")
    # a conversation has at most max_length tokens
    return times(value, verl.get("data.max_length"))


def _sft_micro_batch(verl: Verl, key: str, value: Any) -> Any:
    """The SFT trainer of January 2026 averages each micro-batch alone, or with balance_dp_token those of all ranks
    that are computed at the same time (trainer/fsdp_sft_trainer.py, _compute_loss_and_backward)."""
    tokens = _conversations(verl, key, value)
    gpus = times(verl.get("trainer.n_gpus_per_node"), verl.get("trainer.nnodes"))
    ranks = max(1, gpus // verl.get("ulysses_sequence_parallel_size"))
    rounds = -(-verl.get("data.train_batch_size") // (ranks * value))
    if rounds == 1 and (ranks == 1 or verl.get("data.balance_dp_token")):
        return tokens
    return Approximate(tokens, f"the ranks of verl's fsdp_sft_trainer {MEAN_OF_MEANS}")


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
        expected = "expected error, left or right"
        raise NoCounterpart(f"truncation {value!r:.200} is not supported for conversations; {expected}")
    return value


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


def _longest_answer(verl: Verl, key: str, value: Any) -> Any:
    """The length at which the penalty for overlong completions is largest."""
    group = key.rpartition(".")[0] + ".overlong_buffer_cfg"
    if value is None or not verl.get(group + ".enable"):
        return Unused("only the penalty for overlong completions reads it, and it is off")
    longest = verl.get("data.max_response_length")
    if value != longest:
        raise NoCounterpart(f"the penalty's buffer ends at data.max_response_length={longest} here; give that number")
    return Unused("it is data.max_response_length, where the buffer ends here too")


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


def _megatron_lora(verl: Verl, key: str, value: Any) -> Any:
    """Megatron's adapter of all its linear layers."""
    if not value:
        return Unused()
    return PathValues({"model.adapter.rank": value, "model.adapter.target_modules": "all-linear"})


def _validation(verl: Verl, key: str, value: Any) -> Any:
    """The sampling of the validation. verl's agent loop reads the temperature and never `do_sample`."""
    if key.endswith(".n") and value > 1 and verl.get(ROLLOUT + "val_kwargs.temperature") == 0:
        return Unused("at temperature 0 all completions would be equal")
    if key.endswith(".top_k"):
        return max(0, value)
    return value


LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def _loggers(verl: Verl, key: str, value: Any) -> Any:
    names = [value] if isinstance(value, str) else list(value)
    # metrics are always shown in the terminal and kept in the store
    unknown = [name for name in names if name not in (*LOGGERS, "console", "file")]
    if unknown:
        text = ", ".join(map(repr, unknown))
        raise NoCounterpart(f"there is no logger {text} here; expected console, {', '.join(LOGGERS)}")
    trackers = [name for name in names if name in LOGGERS]
    return trackers or Unused("the terminal always shows the metrics, and the store keeps them")


VALIDATION_CONVERSIONS: dict[str, Conversion] = {"loggers": _loggers, "validation": _validation}


CONVERSIONS: dict[str, Conversion] = {
    **DATA_CONVERSIONS, **ENGINE_CONVERSIONS, **SCHEDULE_CONVERSIONS, **LOSS_CONVERSIONS, **VALIDATION_CONVERSIONS,
    "completions": _completions, "conversation_length": _conversation_length,
    "conversation_truncation": _conversation_truncation, "conversations": _conversations,
    "drawn_prompts": _drawn_prompts, "dynamic_batch": _dynamic_batch, "estimator": _estimator,
    "filter_metric": _filter_metric, "gamma": _gamma, "longest_answer": _longest_answer, "loss_mode": _loss_mode,
    "megatron_lora": _megatron_lora, "micro_batch": _micro_batch, "mini_batch_order": _mini_batch_order,
    "names": _names, "only_true": _only_true, "overlong": _overlong, "overlong_part": _overlong_part,
    "positive": _positive, "refill_rounds": _refill_rounds, "reward_file": _reward_file,
    "reward_model": _reward_model, "reward_model_switch": _reward_model_switch, "reward_name": _reward_name,
    "reward_parts": _reward_parts, "reward_weights": _reward_weights,
    "router_replay": _router_replay,
    "scale_by_std": _scale_by_std, "sft_micro_batch": _sft_micro_batch, "when_set": _when_set,
}  # fmt: skip
"""All conversions, by their names in keys.toml."""
