"""Sets up a Prefect server for Ostinato: work pool, deployments (prefect.yaml), store and engine, automations.

All of it may be repeated at any time: what exists already is updated.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from flows.configs.overrides import ConfigError
from flows.ops.packaged_files import packaged_file
from flows.ops.processes import run_and_follow
from flows.ops.schedules import check_schedules_of_file, pause_bad_schedules
from flows.ops.state import UpError

PREFECT_YAML = "prefect.yaml"
POOL = "ostinato"
CREATED = "Deployment '"
"""Start of what `prefect deploy` prints when it has created or updated a deployment."""


def find_prefect_yaml(path: Path | None = None) -> Path:
    """Returns the given file, else that of the working directory, else the installed one. Raises ConfigError."""
    candidates = [path] if path else [Path(PREFECT_YAML), packaged_file(PREFECT_YAML)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise ConfigError(f"no {PREFECT_YAML} found (tried {tried}); give the path of one by --file")


def deployments_in(path: Path) -> list[dict[str, Any]]:
    """Returns the deployments of a prefect.yaml. Raises ConfigError."""
    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    entries = body.get("deployments") if isinstance(body, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("name") for entry in entries):
        raise ConfigError(f"{path} has no list of deployments with names; see Prefect's documentation of prefect.yaml")
    return entries


def deploy(
    file: Path | None,
    *,
    pool: str,
    storage: str,
    engine_url: str,
    token: str,
    on_created: Callable[[int, int], None] = lambda created, total: None,
) -> tuple[list[str], list[str]]:
    """Sets up the server of $PREFECT_API_URL; returns the names of the deployments, and a line for each schedule that
    is paused because its runs could only fail. Raises UpError, and ConfigError also for such a schedule in the file.

    Without a `file`, runs work in the present working directory, else in the folder of the file. After each deployment,
    `on_created` is called with the number of those that are created or updated, and of all.
    """
    path = find_prefect_yaml(file)
    folder = path.parent if file else Path.cwd()
    entries = deployments_in(path)
    check_schedules_of_file(entries)
    names = [str(entry["name"]) for entry in entries]
    # imported here, since the import of Prefect takes seconds
    from prefect import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    # `prefect deploy` resets what people changed in the UI, so it is read before and restored after
    try:
        before = asyncio.run(_prepare(pool, names))
        _deploy_all(path, pool, folder, lambda created: on_created(created, len(names)))
        asyncio.run(_restore(before))
        from flows.ops.deployment_settings import save_deployment_settings

        save_deployment_settings(storage, engine_url, token)
        with get_client(sync_client=True) as client:
            paused = pause_bad_schedules(client._client)
    except PrefectHTTPStatusError as error:
        raise UpError(f"the Prefect server refused: {error}") from error
    return names, paused


async def _restore(before: list[Any]) -> None:
    from prefect import get_client

    from flows.ops.deployment_settings import restore_choices

    async with get_client() as client:
        await restore_choices(client, before)


async def _prepare(pool: str, names: list[str]) -> list[Any]:
    """Creates the work pool and the automations; returns the deployments as they are before the update."""
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    from flows.ops.automations import save_automations
    from flows.ops.deployment_settings import read_deployments

    # the pool's template is that of a process worker
    async with get_client() as client:
        template = ProcessWorker.get_default_base_job_template()
        # an existing pool keeps its type and template
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        await save_automations(client)
        return await read_deployments(client, names)


def _deploy_all(path: Path, pool: str, folder: Path, on_created: Callable[[int], None]) -> None:
    """Runs `prefect deploy`, which supports everything that prefect.yaml may contain. Raises UpError."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
    environment = dict(os.environ) | {"OSTINATO_POOL": pool, "OSTINATO_FOLDER": str(folder), "PYTHONUNBUFFERED": "1"}
    created = itertools.count(1)

    def count(line: str) -> None:
        if CREATED in line:
            on_created(next(created))

    status, printed = run_and_follow(command, environment=environment, folder=folder, on_line=count)
    if status:
        raise UpError(f"'prefect deploy' failed on {path}:\n{printed[-3000:]}")
