"""Conversions of verl's values: the losses of the actor and the critic."""

from __future__ import annotations

from typing import Any

from flows.verl.read import Verl
from flows.verl.values import ACTOR, Conversion, NoCounterpart, PathValues, Unused, flow_of


def _clip(verl: Verl, key: str, value: Any) -> Any:
    """verl reads it only if low and high are null. Older configs have only this key."""
    if any(verl.is_given(ACTOR + name) for name in ("clip_ratio_low", "clip_ratio_high")):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    if not verl.is_given(key):
        return Unused("clip_ratio_low and clip_ratio_high decide")
    return value


def _clip_side(verl: Verl, key: str, value: Any) -> Any:
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
    norm, constant = _norm(verl, value, verl.get(ACTOR + "loss_scale_factor"))
    if flow_of(verl) == "gspo":
        return _terms_norm(verl, value, norm)
    if constant is not None:
        return PathValues({"algorithm.loss_norm": norm, "regularisation.norm_constant": constant})
    return PathValues({"algorithm.loss_norm": norm})


def _terms_norm(verl: Verl, value: str, norm: str) -> Any:
    """GSPO's own part is always the mean of the sequence means. The mode reduces its KL and entropy terms."""
    kl = verl.get(ACTOR + "use_kl_loss") and verl.get(ACTOR + "kl_loss_coef")
    if norm == "sequence_mean" or not (kl or verl.get(ACTOR + "entropy_coeff")):
        return Unused("verl's GSPO always uses the mean of the sequence means, as ours does")
    if norm == "constant":
        known = ", ".join(LOSS_NORMS)
        raise NoCounterpart(f"the KL and entropy terms of GSPO have no norm {value!r} here; expected {known}")
    return PathValues({"regularisation.terms_norm": norm})


def _norm(verl: Verl, value: Any, scale: Any) -> tuple[str, Any]:
    """(our norm, the constant that it divides by, if it does). `scale` is verl's loss_scale_factor."""
    # a sum over the tokens of each completion, as a mean over completions
    if value == "seq-mean-token-sum":
        return "constant", 1
    # divided by the longest completion, unless the config gives a number
    if value == "seq-mean-token-sum-norm":
        return "constant", verl.get("data.max_response_length") if scale is None else scale
    if value not in LOSS_NORMS:
        known = ", ".join([*LOSS_NORMS, "seq-mean-token-sum", "seq-mean-token-sum-norm"])
        raise NoCounterpart(f"there is no norm {value!r} here; expected {known}")
    return LOSS_NORMS[value], None


def _value_norm(verl: Verl, key: str, value: Any) -> Any:
    norm, constant = _norm(verl, value, verl.get("critic.loss_scale_factor"))
    paths = {"credit.value_loss_norm": norm}
    if constant is not None:
        paths["credit.value_norm_constant"] = constant
    return PathValues(paths)


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
    "value_grad_norm": _value_grad_norm,
    "value_norm": _value_norm,
}  # fmt: skip
