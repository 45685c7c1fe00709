"""`ostinato engine join`: one more machine for a trainer of several nodes (`trainer.nodes`)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

TOKEN_ENV = "OSTINATO_GROUP_TOKEN"


def join(
    head: Annotated[str, typer.Option(help="HOST:PORT of the engine: its trainer.listen.")],
    node_rank: Annotated[int, typer.Option(help="Which node this is: 1 … trainer.nodes-1.", min=1)],
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the group's token; else ${TOKEN_ENV}.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Runs the ranks of this machine, whenever the engine wants them, until SIGTERM or Ctrl-C.

    It waits for an engine that is not up yet, and outlives one that is started again. The model's folder and this
    program must be here as they are there.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    host, separator, port = head.rpartition(":")
    if not separator or not host or not port.isdecimal():
        fail(f"--head {head!r} is no address; give HOST:PORT, the engine's trainer.listen")
    token = (os.environ.get(TOKEN_ENV, "") if token_file is None else token_file.read_text()).strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # by name: flows must be importable without torch
    joiner, wire = (import_module(f"engine.backends.group.{name}") for name in ("joiner", "wire"))
    try:
        joiner.join(host.strip("[]"), int(port), node_rank, token)
    except wire.Refused as error:
        fail(f"the engine at {head} refuses this node: {error}")


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(2)
