"""`ostinato engine sampler`: one vLLM server on a GPU node, for engines on other machines."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import EngineError
from flows.engine_config import load_engine
from flows.overrides import ConfigError


def sampler(
    model: Annotated[
        Path, typer.Option(help="Folder with the model's config.json; weights come from the engine.", exists=True)
    ],
    config: Annotated[
        Path | None, typer.Option(help="YAML, TOML or JSON: an engine's keys, or a run's.", exists=True, dir_okay=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on, one that the engine reaches.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8778,
    lora_targets: Annotated[
        list[str] | None, typer.Option("--lora-target", help="A layer that adapters change, as q_proj. Repeat it.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override one key: sampler.eager=true.")] = None,
) -> None:
    """Serves one vLLM engine until SIGTERM or Ctrl-C, and starts it again if it ends. The token is in the environment
    variable that sampler.token_env names; the same stands in the engine's environment."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        spec, _ = load_engine(config, sets or [])
        # by name: flows must be importable without torch
        node = import_module("engine.backends.vllm.node")
        node.run_node(spec, model, host, port, tuple(lora_targets or ()), lambda line: print(line, flush=True))
    except (ConfigError, EngineError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
