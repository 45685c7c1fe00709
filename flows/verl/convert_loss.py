"""Conversions of verl's values: the losses of the actor and the critic."""

from __future__ import annotations

import re
from typing import Any

from flows.verl.read import Verl
from flows.verl.values import (
    ACTOR,
    Approximate,
    Conversion,
    MicroBatches,
    NoCounterpart,
    PathValues,
    Unused,
    flow_of,
    micro_batches,
    workers_of,
)


def _clip(verl: Verl, key: str, value: Any) -> Any:
    """verl reads it only if low and high are null. Older configs have only this key."""
    if _loss_mode(verl) in UNCLIPPED:
        return Unused(UNCLIPPED[_loss_mode(verl)])
    if any(verl.is_given(ACTOR + name) for name in ("clip_ratio_low", "clip_ratio_high")):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    if not verl.is_given(key):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    # the ratio of two probabilities is never below 0, so no lower clip of 1 or more ever binds
    if value > 1:
        return PathValues({"algorithm.clip_range": _lower_clip(verl, value), "algorithm.clip_range_high": value})
    return value


def _clip_side(verl: Verl, key: str, value: Any) -> Any:
    if _loss_mode(verl) in UNCLIPPED:
        return Unused(UNCLIPPED[_loss_mode(verl)])
    if not verl.is_given(key) and _only_clip_ratio(verl):
        return Unused("clip_ratio is given")
    if value is None:
        value = verl.get(ACTOR + "clip_ratio")
    if key.endswith("_low"):
        return _lower_clip(verl, value)
    return value


UNCLIPPED = {
    "gpg": "the loss gpg has no ratio to clip",
    "sapo": "the loss sapo has a smooth gate in place of clips",
    "kl_cov": "the loss kl_cov has a penalty in place of clips",
}


def _loss_mode(verl: Verl) -> str:
    return str(verl.get(ACTOR + "policy_loss.loss_mode"))


def _lower_clip(verl: Verl, value: Any) -> Any:
    # geo_mean clips the logarithm of the ratio, which has no lower bound
    if value > 1 and _loss_mode(verl) == "geo_mean":
        raise NoCounterpart("the lower clip of geo_mean is at most 1 here; give a smaller number")
    return min(1.0, value)


def _only_clip_ratio(verl: Verl) -> bool:
    # a config that gives only clip_ratio means both sides
    given_keys = {name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high") if verl.is_given(ACTOR + name)}
    return given_keys == {"clip_ratio"}


LOSS_NORMS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "token-sum": "token_sum"}


def _loss_norm(verl: Verl, key: str, value: Any) -> Any:
    norm, constant, difference = _norm(verl, ACTOR, value)
    if flow_of(verl) == "gspo" or _loss_mode(verl) in ("geo_mean", "sapo"):
        return _terms_norm(verl, value, norm, difference)
    paths: dict[str, Any] = {"algorithm.loss_norm": norm}
    if constant is not None:
        paths["regularisation.norm_constant"] = constant
    return _with_difference(paths, difference)


def _with_difference(paths: dict[str, Any], difference: str) -> Any:
    if difference:
        return Approximate(PathValues(paths), difference)
    return PathValues(paths)


def _terms_norm(verl: Verl, value: str, norm: str, difference: str) -> Any:
    """The policy's part of GSPO, geo_mean and sapo is always the mean of the sequence means. The mode reduces the KL
    and entropy terms."""
    paths = {} if flow_of(verl) == "gspo" else {"algorithm.loss_norm": "sequence_mean"}
    own_difference = _difference_of_sequences(verl)
    kl = verl.get(ACTOR + "use_kl_loss") and verl.get(ACTOR + "kl_loss_coef")
    if norm == "sequence_mean" or not (kl or verl.get(ACTOR + "entropy_coeff")):
        if paths or own_difference:
            return _with_difference(paths, own_difference)
        return Unused("verl's GSPO always uses the mean of the sequence means, as ours does")
    if norm == "constant":
        known = ", ".join(LOSS_NORMS)
        raise NoCounterpart(f"the KL and entropy terms of GSPO have no norm {value!r:.200} here; expected {known}")
    if own_difference and own_difference != difference:
        difference = "; ".join(filter(None, (own_difference, difference)))
    return _with_difference(paths | {"regularisation.terms_norm": norm}, difference)


SUM_OF_MEANS = (
    "add up the means of a rank's micro-batches (torch.mean in compute_policy_loss_geo_mean), so that the policy's "
    "part of the loss is larger by their number. AdamW's steps do not depend on a constant factor, but the norm at "
    "which the gradient is clipped and the weight of the KL and entropy terms do"
)


def _difference_of_sequences(verl: Verl) -> str:
    """How the mean over sequences of the policy's part differs from ours. Empty: it does not."""
    difference = _norm(verl, ACTOR, "seq-mean-token-mean")[2]
    workers = workers_of(verl)
    if difference or workers == "january" or _loss_mode(verl) != "geo_mean":
        return difference
    parts = micro_batches(verl, ACTOR)
    if parts.number is not None and parts.number <= parts.ranks:
        return ""
    if workers is None:
        return f"exact with January 2026; the workers of August 2026 {SUM_OF_MEANS}; {WHICH_VERSION}"
    return f"verl's engine workers {SUM_OF_MEANS}"


Norm = tuple[str, Any, str]
"""(our norm, the constant that it divides by, how it differs from verl's)."""


def _norm(verl: Verl, group: str, mode: Any) -> Norm:
    """The norm of the loss of the actor or the critic. `group` is that of its keys, with the dot at the end."""
    norm, constant = _norm_of_all_tokens(verl, group, mode)
    workers = workers_of(verl)
    if workers == "august":
        return norm, constant, ""
    parts = micro_batches(verl, group)
    if workers == "january_engine":
        return _norm_of_first_engine(group, mode, parts, norm, constant)
    january = _norm_of_micro_batches(verl, mode, parts, norm, constant)
    if workers == "january":
        return *january[:2], january[2] and f"verl's workers {january[2]}"
    # the config does not say which version it is for
    if january == (norm, constant, ""):
        return january
    difference = january[2] or MEAN_OF_MEANS
    return norm, constant, f"exact with August 2026; the workers of January 2026 {difference}; {WHICH_VERSION}"


MEAN_OF_MEANS = (
    "average within each micro-batch, then over the micro-batches and ranks: two micro-batches of one completion, with "
    "100 and 900 tokens and losses 1 and 2, give 1.50, and 1.90 here"
)
WHICH_VERSION = (
    "say which by --override trainer.use_legacy_worker_impl=auto (January), or --override trainer.use_v1=true (August)"
)


def _norm_of_all_tokens(verl: Verl, group: str, mode: Any) -> tuple[str, Any]:
    """(our norm, its constant) of verl's engine workers, whose losses are reduced over the whole mini-batch."""
    # a sum over the tokens of each completion, as a mean over completions
    if mode == "seq-mean-token-sum":
        return "constant", 1
    # divided by the longest completion, unless the config gives a number
    if mode == "seq-mean-token-sum-norm":
        scale = verl.get(group + "loss_scale_factor")
        return "constant", verl.get("data.max_response_length") if scale is None else scale
    if mode not in LOSS_NORMS:
        known = ", ".join([*LOSS_NORMS, "seq-mean-token-sum", "seq-mean-token-sum-norm"])
        raise NoCounterpart(f"there is no norm {mode!r} here; expected {known}")
    return LOSS_NORMS[mode], None


def _norm_of_first_engine(group: str, mode: str, parts: MicroBatches, norm: str, constant: Any) -> Norm:
    """The norm of January's engine workers (use_legacy_worker_impl=disable)."""
    if group == "critic.":
        return norm, constant, "the critic of January's engine workers adds up the losses of its micro-batches"
    if mode == "seq-mean-token-sum-norm":
        # the sum of each rank over the longest completion, as a mean over the ranks
        return norm, constant * parts.ranks / parts.completions, ""
    return norm, constant, ""


def _norm_of_micro_batches(verl: Verl, mode: str, parts: MicroBatches, norm: str, constant: Any) -> Norm:
    """The norm of January's workers. They reduce the loss of each micro-batch alone, and average over micro-batches and
    ranks (workers/actor/dp_actor.py, workers/actor/megatron_actor.py)."""
    if mode == "token-mean":
        if parts.number == 1:
            return norm, constant, ""
        # the mean of a single completion's tokens
        if parts.size == 1:
            return "sequence_mean", None, ""
        return norm, constant, MEAN_OF_MEANS
    if mode == "seq-mean-token-sum-norm":
        # a sum over the completions of a micro-batch, over the longest completion; loss_scale_factor is not read
        longest = verl.get("data.max_response_length")
        if parts.size is None:
            return norm, longest, "multiply a completion's loss by the number of completions of its micro-batch"
        return norm, longest / parts.size, ""
    # means over sequences: FSDP's dynamic micro-batches count by their completions, Megatron's all alike
    if mode.startswith("seq-mean") and parts.size is None and parts.is_megatron:
        return norm, constant, "give micro-batches with different numbers of completions the same weight"
    return norm, constant, ""


def _value_norm(verl: Verl, key: str, value: Any) -> Any:
    norm, constant, difference = _norm(verl, "critic.", value)
    paths: dict[str, Any] = {"credit.value_loss_norm": norm}
    if constant is not None:
        paths["credit.value_norm_constant"] = constant
    return _with_difference(paths, difference)


def _value_grad_norm(verl: Verl, key: str, value: Any) -> Any:
    """verl's value loss is half of ours, and so is its gradient, which AdamW's steps do not depend on otherwise."""
    return value / VALUE_LOSS_FACTOR


def _loss_scale(verl: Verl, key: str, value: Any) -> Any:
    """verl's actor and critic have this key, each with its own loss_agg_mode."""
    mode = verl.get(key.replace("loss_scale_factor", "loss_agg_mode"))
    if mode != "seq-mean-token-sum-norm" or flow_of(verl) == "gspo":
        return Unused("only loss_agg_mode=seq-mean-token-sum-norm reads it")
    if value is None:
        return Unused("data.max_response_length decides")
    return Unused("loss_agg_mode uses it, if verl does")


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
        raise NoCounterpart(f"there is no controller {value!r:.200} here; expected fixed or adaptive")
    if value == "adaptive":
        return Approximate(value, ADAPTIVE_KL)
    return value


ADAPTIVE_KL = (
    "verl's controller measures the KL as a mean over the completions' means, ours as a mean over tokens; a completion "
    "of 100 tokens at 0.2 nats and one of 900 at 0.1 give 0.15 there and 0.11 here"
)


def _importance(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    if verl.get("algorithm.rollout_correction.bypass_mode"):
        return Unused("in bypass_mode the ratio uses the sampler's probability, and verl adds no importance weights")
    if value != "token":
        raise NoCounterpart(f"importance weights are per token here, not per {value}")
    if _loss_mode(verl) == "geo_mean":
        raise NoCounterpart("geo_mean has a weight per completion, and ours are per token; remove one of the two")
    return Unused("rollout_is_threshold gives the cap")


def _importance_cap(verl: Verl, key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return PathValues({"regularisation.importance_cap": value})
    # "low_high" of August 2026 (trainer/ppo/rollout_corr_helper.py, compute_rollout_correction_weights)
    limits = re.fullmatch(r"([\d.]+)_([\d.]+)", value)
    if limits is None:
        raise NoCounterpart("expected a number, or two as in '0.5_4.0'")
    low, high = float(limits[1]), float(limits[2])
    if not low <= 1 <= high:
        raise NoCounterpart(f"limits {low} and {high} leave out tokens of equal probability; expected 1 between them")
    mask = {"kind": "token_ratio", "low": low, "high": high}
    return PathValues({"regularisation.importance_mask": mask})


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
    raise NoCounterpart(f"there is no KL estimator {value!r:.200} here; expected {', '.join(KL_ESTIMATORS)}")


def _sapo_tau(verl: Verl, key: str, value: Any) -> Any:
    """core_algos.py, compute_policy_loss_sapo reads the temperatures of the actor, not those of actor.policy_loss."""
    name = key.rpartition(".")[2]
    read = verl.get(ACTOR + name)
    if verl.is_given(key) and value != read:
        raise NoCounterpart(f"verl's loss reads {ACTOR}{name}={read}; give the number there")
    return Unused(f"{ACTOR}{name} decides")


VALUE_LOSS_FACTOR = 0.5
"""verl's value loss divided by ours. With AdamW, the factor changes only at which gradient norm an update is clipped,
and how much epsilon counts."""


LOSS_CONVERSIONS: dict[str, Conversion] = {
    "bypass": _bypass,
    "clip": _clip,
    "clip_side": _clip_side,
    "importance": _importance,
    "importance_cap": _importance_cap,
    "kl_controller": _kl_controller,
    "kl_estimator": _kl_estimator,
    "kl_in_reward": _kl_in_reward,
    "kl_loss": _kl_loss,
    "loss_norm": _loss_norm,
    "loss_scale": _loss_scale,
    "sapo_tau": _sapo_tau,
    "value_grad_norm": _value_grad_norm,
    "value_norm": _value_norm,
}  # fmt: skip
