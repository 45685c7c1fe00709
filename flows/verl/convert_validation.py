"""Conversions of verl's values: validation on held-out rows, loggers."""

from __future__ import annotations

from typing import Any

from flows.verl.read import Verl
from flows.verl.values import ROLLOUT, Conversion, NoCounterpart, Unused


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
