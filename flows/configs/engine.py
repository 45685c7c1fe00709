"""Reads the engine that a config file describes: a file of an engine, or a run's config with a group `engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.specs.engine import LocalEngineSpec
from flows.configs.overrides import ConfigError, describe_validation, load_config


def load_engine(path: Path | None, sets: Sequence[str] = ()) -> tuple[LocalEngineSpec, dict[str, Any]]:
    """The engine, and the whole file after the changes of `sets`. A set names a key of the engine:
    `trainer.zero_stage=3`.

    Raises ConfigError.
    """
    is_run_config = _is_run_config(load_config(path))
    prefix = "engine." if is_run_config else ""
    body = load_config(path, [prefix + text for text in sets])
    keys = body.get("engine", {}) if is_run_config else body
    if isinstance(keys, dict) and keys.get("kind") == "http":
        raise ConfigError(
            f"{path} names an engine elsewhere (engine.kind='http'), and this command is about the engine itself; give "
            "the file that 'ostinato engine serve' is started with"
        )
    try:
        return LocalEngineSpec.model_validate(keys), body
    except ValidationError as error:
        raise ConfigError(describe_validation(error, LocalEngineSpec, keys)) from error


def _is_run_config(body: Mapping[str, Any]) -> bool:
    """Whether the file is the config of a run, and not of an engine."""
    return "engine" in body or "model" in body
