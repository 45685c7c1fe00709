"""What a conversion of one of verl's values says, and which flow a verl config is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.verl.read import Verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


class Refused(Exception):
    """verl's value has no counterpart here. The message says why."""


@dataclass(frozen=True)
class Nothing:
    """verl does not use this key; `why` says what decides instead. Empty: it is at the value that asks for nothing."""

    why: str = ""


@dataclass(frozen=True)
class Near:
    """Our value is not quite verl's."""

    value: Any
    difference: str


@dataclass(frozen=True)
class Paths:
    """A value per path, where a key has several."""

    values: dict[str, Any]


Conversion = Callable[[Verl, str, Any], Any]
"""Of the config, the key and its value: our value, or one of the above."""


def flow_of(verl: Verl) -> str:
    """The flow that does what the verl config does."""
    if verl.kind.startswith("sft"):
        return "sft"
    if verl.kind == "evaluation":
        return "evaluation"
    if verl.get("algorithm.adv_estimator") == "gae":
        return "ppo"
    return "gspo" if verl.get(ACTOR + "policy_loss.loss_mode") == "gspo" else "grpo"


def local_path(path: Any) -> str:
    """A path of this machine, or a URL. Raises Refused for what is no path, and for HDFS."""
    if not isinstance(path, str):
        raise Refused(f"expected a path, not {type(path).__name__}")
    if path.startswith("hdfs:"):
        raise Refused("there is no HDFS here; copy it to a folder or to an object store")
    return str(Path(path).expanduser()) if path.startswith("~") else path


def times(value: Any, factor: Any) -> int:
    """Their product. Raises TypeError for anything but whole numbers: a text times a number would be a longer text."""
    for number in (value, factor):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is no whole number")
    return int(value * factor)
