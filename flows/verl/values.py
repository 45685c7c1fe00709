"""The possible results of converting a value of verl, and the flow that a verl config stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.verl.read import Verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


class NoCounterpart(Exception):
    """The value of verl has no counterpart in Ostinato. The message says why."""


@dataclass(frozen=True)
class Unused:
    """The key has no effect in this config. `why` names the key that decides instead. Empty: its value disables it."""

    why: str = ""


@dataclass(frozen=True)
class Approximate:
    """Our value is close to verl's, but not the same. `difference` says how they differ."""

    value: Any
    difference: str


@dataclass(frozen=True)
class PathValues:
    """A value for each path of our config, for a key that has several."""

    values: dict[str, Any]


Conversion = Callable[[Verl, str, Any], Any]
"""Takes the verl config, the key and its value; returns our value or one of the classes above."""


def flow_of(verl: Verl) -> str:
    """Returns the flow that corresponds to the verl config."""
    if verl.kind.startswith("sft"):
        return "sft"
    if verl.kind == "evaluation":
        return "evaluation"
    if verl.get("algorithm.adv_estimator") == "gae":
        return "ppo"
    return "gspo" if verl.get(ACTOR + "policy_loss.loss_mode") == "gspo" else "grpo"


def local_path(path: Any) -> str:
    """Returns a path on this machine, or a URL. Raises NoCounterpart for other values, and for HDFS."""
    if not isinstance(path, str):
        raise NoCounterpart(f"expected a path, not {type(path).__name__}")
    if path.startswith("hdfs:"):
        raise NoCounterpart("HDFS is not supported; copy the data to a folder or to an object store")
    if path.startswith("~"):
        return str(Path(path).expanduser())
    return path


def times(value: Any, factor: Any) -> int:
    """Returns the product. Raises TypeError for values that are not integers. (Python also multiplies strings.)"""
    for number in (value, factor):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is not an integer")
    return int(value * factor)
