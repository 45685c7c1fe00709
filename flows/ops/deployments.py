"""What a Prefect server is told of Ostinato: work pool, deployments (prefect.yaml), store and engine, automations.

Everything may be said again at any time: what is there already is made what it is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from flows.configs.overrides import ConfigError
from flows.ops.state import UpError

PREFECT_YAML = "prefect.yaml"
POOL = "ostinato"


def find_prefect_yaml(given: Path | None = None) -> Path:
    """The file given, or of the working directory, or of the checkout this code runs from. Raises ConfigError."""
    places = [given] if given else [Path(PREFECT_YAML), Path(__file__).resolve().parents[2] / PREFECT_YAML]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = ", ".join(str(place) for place in places)
    raise ConfigError(f"no {PREFECT_YAML} found (looked at {looked}); run this in Ostinato's folder, or give --file")


def deployments_in(path: Path) -> list[dict[str, Any]]:
    """The entries of the file. Raises ConfigError."""
    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found = body.get("deployments") if isinstance(body, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) and entry.get("name") for entry in found):
        raise ConfigError(f"{path} has no list of deployments with names; Prefect's documentation says how it looks")
    return found


def deploy(path: Path, *, pool: str, storage: str, engine_url: str, token: str) -> list[str]:
    """Tells the server of PREFECT_API_URL everything; returns the names of the deployments. Raises UpError,
    ConfigError."""
    names = [str(entry["name"]) for entry in deployments_in(path)]
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        before = asyncio.run(_prepare(pool, names))
        _deploy_all(path, pool)
        asyncio.run(_restore(before))
        from flows.ops.deployment_settings import save_deployment_settings

        save_deployment_settings(storage, engine_url, token)
    except PrefectHTTPStatusError as error:
        raise UpError(f"the Prefect server refused: {error}") from error
    return names


async def _restore(before: list[Any]) -> None:
    from prefect import get_client

    from flows.ops.deployment_schedules import restore

    async with get_client() as client:
        await restore(client, before)


async def _prepare(pool: str, names: list[str]) -> list[Any]:
    """Makes what deployments need; returns them as they are."""
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    from flows.ops.automations import save_automations
    from flows.ops.deployment_schedules import remember

    async with get_client() as client:
        template = ProcessWorker.get_default_base_job_template()
        with contextlib.suppress(ObjectAlreadyExists):  # its type and template are its operator's
            await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        await save_automations(client)
        return await remember(client, names)


def _deploy_all(path: Path, pool: str) -> None:
    """Prefect's own `prefect deploy`: it alone knows all that may stand in the file."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
    environment = dict(os.environ) | {"OSTINATO_POOL": pool, "OSTINATO_FOLDER": str(path.parent)}
    done = subprocess.run(
        command, cwd=path.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UpError(f"`prefect deploy` failed on {path}:\n{(done.stderr + done.stdout).strip()[-3000:]}")
