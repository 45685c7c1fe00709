"""Conversions of verl's values into ours: validation on held-out rows, loggers."""

from __future__ import annotations

from typing import Any

from flows.verl.read import Verl
from flows.verl.values import ROLLOUT, Conversion, Nothing, Refused


def _greedy_or_value(verl: Verl, key: str, value: Any) -> Any:
    return value if verl.get(ROLLOUT + "val_kwargs.do_sample") else Nothing("val_kwargs.do_sample is false: greedy")


def _do_sample_validation(verl: Verl, key: str, value: Any) -> Any:
    return Nothing("val_kwargs.temperature says how") if value else 0.0


def _drawn_validation(verl: Verl, key: str, value: Any) -> Any:
    if not verl.get(ROLLOUT + "val_kwargs.do_sample"):
        return Nothing("val_kwargs.do_sample is false: greedy")
    if key.endswith(".n") and value > 1 and verl.get(ROLLOUT + "val_kwargs.temperature") == 0:
        return Nothing("at temperature 0 they would be copies of one completion")
    return max(0, value) if key.endswith(".top_k") else value


LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def _loggers(verl: Verl, key: str, value: Any) -> Any:
    names = [value] if isinstance(value, str) else list(value)
    if others := [name for name in names if name not in (*LOGGERS, "console")]:
        raise Refused(f"there is no logger {', '.join(map(repr, others))} here; expected console, {', '.join(LOGGERS)}")
    found = [name for name in names if name != "console"]
    return found or Nothing("the console is always there")


VALIDATION_CONVERSIONS: dict[str, Conversion] = {
    "do_sample_validation": _do_sample_validation, "drawn_validation": _drawn_validation,
    "greedy_or_value": _greedy_or_value, "loggers": _loggers,
}  # fmt: skip
