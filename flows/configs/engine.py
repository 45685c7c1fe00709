"""The engine that a config file describes: an engine's own file, or a run's, whose `engine` table is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.specs.engine import LocalEngineSpec
from flows.configs.overrides import ConfigError, describe_validation, load_config


def load_engine(path: Path | None, sets: Sequence[str] = ()) -> tuple[LocalEngineSpec, dict[str, Any]]:
    """The engine, and the whole file with `sets` put in. A set names a key of the engine: `trainer.zero_stage=3`.

    Raises ConfigError.
    """
    inside = _is_of_a_run(load_config(path))
    body = load_config(path, [f"engine.{text}" if inside else text for text in sets])
    keys = body.get("engine", {}) if inside else body
    if isinstance(keys, dict) and keys.get("kind") == "http":
        raise ConfigError(
            f"{path} names an engine elsewhere (engine.kind='http'), and this command is about the engine itself; give "
            "the file that `ostinato engine serve` is started with"
        )
    try:
        return LocalEngineSpec.model_validate(keys), body
    except ValidationError as error:
        raise ConfigError(describe_validation(error, LocalEngineSpec)) from error


def _is_of_a_run(body: Mapping[str, Any]) -> bool:
    return "engine" in body or "model" in body
