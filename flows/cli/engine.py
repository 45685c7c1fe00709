"""`ostinato engine serve`: runs a shared engine as an HTTP service. `ostinato engine scale`: changes the number of its
samplers while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from engine.errors import EngineError
from engine.http.client import scale_samplers
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from engine.validation_messages import describe_errors
from flows.cli.plan import plan
from flows.configs.overrides import ConfigError, load_engine
from flows.ops.state import TOKEN_ENV
from storage.errors import StorageError

engine_app = typer.Typer(help="The shared engine as a service.", no_args_is_help=True)

MIN_TOKEN = 16
"""Smallest length of a token in characters. Shorter tokens can be guessed."""
PATIENCE_SECONDS = 10.0
"""How long `scale` tries to reach the engine."""


@engine_app.callback()
def group() -> None:
    """The shared engine as a service."""  # the help text of the group


engine_app.command("plan")(plan)


@engine_app.command("serve")
def serve(
    storage: Annotated[str, typer.Option(help="Store of the artifacts: file:///folder or s3://bucket/prefix.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0: any free port.", min=0, max=65535)] = 8777,
    config: Annotated[
        Path | None, typer.Option(help="Config file of an engine or of a run.", exists=True, dir_okay=False)
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override one key: device=cpu.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the bearer token; else ${TOKEN_ENV}.", exists=True, dir_okay=False)
    ] = None,
    max_body_mib: Annotated[int, typer.Option(help="Largest accepted body, MiB.", min=1, max=65536)] = 256,
    grace_seconds: Annotated[
        float, typer.Option(help="Seconds for the running call and the last checkpoints after SIGTERM.", min=0)
    ] = 20.0,
) -> None:
    """Serves an engine until SIGTERM or Ctrl-C. It may be killed at any time and started again on the same store."""
    # errors of the config and of the start have status 2; a served engine ends with status 0
    try:
        spec, _ = load_engine(config, sets or [])
        token = read_token(token_file)
        status = run_server(
            storage, spec, host, port, token, max_body_bytes=max_body_mib << 20, grace_seconds=grace_seconds
        )
    except (ConfigError, EngineError, StorageError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


@engine_app.command("scale")
def scale(
    samplers: Annotated[int, typer.Option(help="Number of vLLM replicas of each model.", min=1)],
    url: Annotated[str, typer.Option(help="Address of the engine.")] = "http://127.0.0.1:8777",
) -> None:
    """Changes the number of vLLM replicas of a served engine while runs go on. The token is $OSTINATO_ENGINE_TOKEN."""
    try:
        spec = HttpEngineSpec(url=url, token_env=TOKEN_ENV, patience_seconds=PATIENCE_SECONDS)
        scaled = asyncio.run(scale_samplers(spec, samplers))
    except ValidationError as error:
        print(f"--url: {describe_errors(error.errors())}", file=sys.stderr)
        raise typer.Exit(2) from None
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    replicas = scaled.replicas
    state = "they start with the first call that samples"
    if replicas.wanted:
        starting = replicas.wanted - replicas.alive
        state = f"{replicas.alive} up, {starting} starting, {replicas.leaving} leaving"
    print(f"samplers: {scaled.before} -> {samplers} ({state})")


def read_token(token_file: Path | None) -> str | None:
    """Returns the bearer token, or None. Raises ConfigError if it is too short or contains spaces."""
    source = f"${TOKEN_ENV}" if token_file is None else str(token_file)
    token = (os.environ.get(TOKEN_ENV, "") if token_file is None else token_file.read_text()).strip()
    if not token and token_file is None:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"the token in {source} has {len(token)} characters; give {MIN_TOKEN} or more, ASCII, without spaces, such "
            "as 'openssl rand -hex 32' prints"
        )
    return token


def run_server(
    storage: str,
    spec: LocalEngineSpec,
    host: str,
    port: int,
    token: str | None,
    *,
    max_body_bytes: int,
    grace_seconds: float,
) -> int:
    """Serves until a signal arrives; returns the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # imported by name, because flows must be importable without torch and without a web server
    lifecycle = import_module("engine.http.lifecycle")
    application = import_module("engine.http.app")
    service = import_module("engine.http.service")
    listener = lifecycle.Binding(host, port, token).open()

    # the engine is created inside the event loop that serves it
    async def main() -> None:
        engine: Any = import_module("engine.local.engine").LocalEngine(storage, spec)
        options = service.ServerOptions(token=token, max_body_bytes=max_body_bytes)
        app = application.create_app(engine, engine.store, options)
        closed = await lifecycle.serve_until_signal(app, listener, grace_seconds=grace_seconds, on_ready=print_address)
        if not closed:
            sys.stderr.flush()
            # a call that did not end in time must not keep the process alive
            os._exit(0)

    asyncio.run(main())
    return 0


def print_address(url: str) -> None:
    """Prints the first line on stdout, which scripts and tests wait for."""
    print(f"listening on {url}", flush=True)
