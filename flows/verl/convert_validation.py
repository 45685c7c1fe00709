"""Conversions of verl's values: validation on held-out rows, loggers."""

from __future__ import annotations

from typing import Any

from flows.verl.read import Verl
from flows.verl.values import ROLLOUT, Conversion, NoCounterpart, Unused


def _greedy_or_value(verl: Verl, key: str, value: Any) -> Any:
    if verl.get(ROLLOUT + "val_kwargs.do_sample"):
        return value
    return Unused("val_kwargs.do_sample is false: greedy")


def _do_sample_validation(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return 0.0
    return Unused("val_kwargs.temperature decides")


def _drawn_validation(verl: Verl, key: str, value: Any) -> Any:
    if not verl.get(ROLLOUT + "val_kwargs.do_sample"):
        return Unused("val_kwargs.do_sample is false: greedy")
    if key.endswith(".n") and value > 1 and verl.get(ROLLOUT + "val_kwargs.temperature") == 0:
        return Unused("at temperature 0 all completions would be equal")
    if key.endswith(".top_k"):
        return max(0, value)
    return value


LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def _loggers(verl: Verl, key: str, value: Any) -> Any:
    names = [value] if isinstance(value, str) else list(value)
    unknown = [name for name in names if name not in (*LOGGERS, "console")]
    if unknown:
        text = ", ".join(map(repr, unknown))
        raise NoCounterpart(f"there is no logger {text} here; expected console, {', '.join(LOGGERS)}")
    trackers = [name for name in names if name != "console"]
    return trackers or Unused("the console always shows the metrics")


VALIDATION_CONVERSIONS: dict[str, Conversion] = {
    "do_sample_validation": _do_sample_validation, "drawn_validation": _drawn_validation,
    "greedy_or_value": _greedy_or_value, "loggers": _loggers,
}  # fmt: skip
