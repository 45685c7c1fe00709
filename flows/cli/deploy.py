"""`ostinato deploy`: creates or updates everything that a Prefect server needs to run our flows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.engine import TOKEN_ENV, read_token
from flows.cli.output import messages, usage_error
from flows.configs.overrides import ConfigError
from flows.ops.deployments import POOL, deploy, find_prefect_yaml
from flows.ops.state import UpError

Pool = Annotated[str, typer.Option("--pool", help="Work pool; created, of type process, where there is none.")]


def deploy_command(
    storage: Annotated[str, typer.Option("--storage", help="Store of flows that name none; empty: unchanged.")] = "",
    engine: Annotated[str, typer.Option("--engine", help="Url of the engine of flows that name none.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the engine's token; else ${TOKEN_ENV}.", exists=True, dir_okay=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A prefect.yaml other than the one here.", exists=True, dir_okay=False)
    ] = None,
    pool: Pool = POOL,
    server: Annotated[str, typer.Option("--server", help="Prefect API url; else $PREFECT_API_URL.")] = "",
) -> None:
    """Creates or updates the deployments of prefect.yaml, where they work, and the automations that bring runs back."""
    url = server or os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise usage_error(
            "no Prefect server is named: give --server http://host:4200/api, or set PREFECT_API_URL; `ostinato up` "
            "starts one and deploys to it"
        )
    os.environ["PREFECT_API_URL"] = url  # before Prefect is imported, which reads it once
    try:
        token = read_token(token_file) or ""
        names = deploy(find_prefect_yaml(file), pool=pool, storage=storage, engine_url=engine, token=token)
    except ConfigError as error:
        raise usage_error(str(error)) from error
    except UpError as error:
        messages().print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    print(f"deployed to {url}: {', '.join(names)}")
