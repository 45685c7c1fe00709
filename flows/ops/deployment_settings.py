"""The settings of deployments: the default store and engine, and what people changed in the Prefect UI.

`ostinato deploy` writes the store into a Variable and the engine into a Secret block of the Prefect server. A run from
a terminal never reads them. prefect.yaml only says how a schedule begins: `prefect deploy` alone would reset every
switch, and delete the schedules that a person added.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from prefect.blocks.system import Secret
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import FlowRunContext
from prefect.variables import Variable

from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec
from flows.configs.common import StorageConfig
from flows.ops.processes import FLOW_RUN_ENV

STORAGE_VARIABLE = "ostinato_storage"
"""Name of the Variable with the store's url."""
ENGINE_SECRET = "ostinato-engine"
"""Name of the Secret block with the engine: {"url": …, "token": …}."""


class StorageAndEngine(Protocol):
    """A config with a store and an engine."""

    @property
    def storage(self) -> StorageConfig: ...

    @property
    def engine(self) -> EngineSpec: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Config = TypeVar("Config", bound=StorageAndEngine)


def with_deployment_settings(config: Config, *, deployed: bool | None = None) -> Config:
    """Returns the config of a deployed flow with the deployment's store and engine in place of default values.

    A form fills in default values, so a store that was left out cannot be told from one that was set to the default.
    `deployed` None means that the environment of this process decides. The engine's token is put into this process's
    environment and never into a config.
    """
    if not (is_deployed() if deployed is None else deployed):
        return config
    changes: dict[str, Any] = {}
    # only default values are replaced
    if config.storage == StorageConfig():
        url = _sync(Variable.get, STORAGE_VARIABLE)
        if isinstance(url, str) and url:
            changes["storage"] = StorageConfig(url=url)
    if config.engine == LocalEngineSpec():
        engine = _read_engine()
        if engine is not None:
            changes["engine"] = engine
    if changes:
        return config.model_copy(update=changes)
    return config


def is_deployed() -> bool:
    """Whether a worker started this process for a flow run, or the current flow run belongs to a deployment."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return FLOW_RUN_ENV in os.environ or (run is not None and run.deployment_id is not None)


def save_deployment_settings(storage: str, engine_url: str, token: str) -> None:
    """Writes the default store and engine of deployed flows. An empty value leaves the present one unchanged."""
    if storage:
        _sync(Variable.set, STORAGE_VARIABLE, storage, overwrite=True)
    if engine_url:
        _sync(Secret(value={"url": engine_url, "token": token}).save, ENGINE_SECRET, overwrite=True)


def _read_engine() -> HttpEngineSpec | None:
    """The engine of the Secret block, or None if there is no block. Its token goes into the environment."""
    try:
        body = _sync(Secret.load, ENGINE_SECRET).get()
    except ValueError:
        # Prefect raises it for a block that does not exist
        return None
    if not isinstance(body, dict) or not body.get("url"):
        raise ValueError(
            f"the Secret block {ENGINE_SECRET!r} holds no engine: expected a JSON object with url and token; run "
            "'ostinato deploy --engine URL'"
        )
    # a token that the environment has already comes first
    spec = HttpEngineSpec(url=body["url"])
    if body.get("token"):
        os.environ.setdefault(spec.token_env, body["token"])
    return spec


def _sync(call: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function of Prefect and waits. Without _sync it returns a coroutine while an event loop runs."""
    return call(*arguments, **options, _sync=True)


async def read_deployments(client: PrefectClient, names: Sequence[str]) -> list[DeploymentResponse]:
    """Returns the deployments with these names as they are on the server."""
    return await client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names)))
    )


async def restore_choices(client: PrefectClient, before: Iterable[DeploymentResponse]) -> None:
    """Restores people's choices in deployments that were updated: paused or not, the state and parameters of the
    schedules, and the schedules that a person added. Those have no slug."""
    for old in before:
        new = await client.read_deployment(old.id)
        # the switch of the deployment
        if new.paused != old.paused:
            await (client.pause_deployment(new.id) if old.paused else client.resume_deployment(new.id))

        # schedules of prefect.yaml are recognised by their slug
        new_schedules = {schedule.slug: schedule for schedule in new.schedules if schedule.slug}
        for schedule in old.schedules:
            if schedule.slug in new_schedules:
                await _restore_schedule(client, new, new_schedules[schedule.slug], schedule)

        # schedules without a slug were added by a person, and deleted by the update
        present = [schedule.schedule for schedule in new.schedules]
        added = [schedule for schedule in old.schedules if not schedule.slug]
        deleted = [schedule for schedule in added if schedule.schedule not in present]
        if deleted:
            fields = {"schedule", "active", "parameters", "max_scheduled_runs"}
            body = [schedule.model_dump(mode="json", include=fields) for schedule in deleted]
            await client.request("POST", "/deployments/{id}/schedules", path_params={"id": new.id}, json=body)


async def _restore_schedule(
    client: PrefectClient, deployment: DeploymentResponse, new: DeploymentSchedule, old: DeploymentSchedule
) -> None:
    changes: dict[str, Any] = {}
    if new.active != old.active:
        changes["active"] = old.active
    # a schedule without parameters of its own keeps those of prefect.yaml
    if old.parameters and new.parameters != old.parameters:
        changes["parameters"] = old.parameters
    if changes:
        # the server would clear parameters that are not sent
        changes.setdefault("parameters", new.parameters)
        path = {"id": deployment.id, "schedule_id": new.id}
        await client.request("PATCH", "/deployments/{id}/schedules/{schedule_id}", path_params=path, json=changes)
