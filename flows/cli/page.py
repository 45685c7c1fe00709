"""`ostinato page`: serves the page of runs, models and datasets to a browser."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import BadSpec
from engine.http.guard import is_loopback
from flows.cli.engine import print_address, read_token
from flows.cli.output import DEFAULT_STORAGE, usage_error
from flows.configs.overrides import ConfigError
from flows.ops.state import TOKEN_ENV


def page(
    storage: Annotated[
        str, typer.Option("--storage", help="Store of the artifacts: a folder, file:///folder or s3://bucket/prefix.")
    ] = DEFAULT_STORAGE,
    server: Annotated[str, typer.Option("--server", help="Prefect API url; else $PREFECT_API_URL.")] = "",
    engine: Annotated[
        str, typer.Option("--engine", help="Url of the engine, for estimates and the chat.")
    ] = "",
    engine_token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the engine's token; else ${TOKEN_ENV}.", exists=True, dir_okay=False),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on. 0: any free port.", min=0, max=65535)] = 4202,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the page's login.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Serves the page until SIGTERM or Ctrl-C: runs, the start of trainings, models, datasets and chat."""
    url = server or os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise usage_error(
            "no Prefect server was given: give --server http://host:4200/api, or set PREFECT_API_URL; 'ostinato up' "
            "starts one with this page"
        )
    if token_file is None and not is_loopback(host):
        raise usage_error(f"other machines reach {host}, so the page needs a token: give --token-file, or 127.0.0.1")
    try:
        token = read_token(token_file) if token_file else None
        engine_token = read_token(engine_token_file)
        listener = import_module("engine.http.lifecycle").Binding(host, port, token).open()
    except (ConfigError, BadSpec, OSError) as error:
        raise usage_error(f"{type(error).__name__}: {error}") from None
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # imported here, since the imports of Prefect and of the web server take seconds
    shared, application = import_module("flows.page.shared"), import_module("flows.page.app")
    uvicorn = import_module("uvicorn")
    settings = shared.PageSettings(
        storage=storage, server=url, engine=engine, engine_token=engine_token, token=token,
        engine_token_file=str(engine_token_file.absolute()) if engine_token_file else "",
    )  # fmt: skip
    config = uvicorn.Config(
        application.create_app(settings), log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    name = f"[{host}]" if ":" in host else host
    print_address(f"http://{name}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])
