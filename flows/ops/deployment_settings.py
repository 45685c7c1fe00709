"""Where deployed flows work, when their config does not say: a Variable and a Secret block of the Prefect server.

`ostinato deploy` writes both. A run from a terminal never asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

from prefect.blocks.system import Secret
from prefect.context import FlowRunContext
from prefect.variables import Variable

from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec
from flows.configs.common import StorageConfig
from flows.ops.processes import FLOW_RUN_ENV

STORAGE_VARIABLE = "ostinato_storage"
"""Variable: the store's url."""
ENGINE_SECRET = "ostinato-engine"
"""Secret block: {"url": …, "token": …} of the engine."""


class Placeable(Protocol):
    """A config that says where its flow works."""

    @property
    def storage(self) -> StorageConfig: ...

    @property
    def engine(self) -> EngineSpec: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Config = TypeVar("Config", bound=Placeable)


def with_deployment_settings(config: Config, *, deployed: bool | None = None) -> Config:
    """The config with the deployment's store and engine, where it leaves them at their defaults: a form fills defaults
    in, so that a person who named none and one who named the default cannot be told apart.

    `deployed` None: whether this process runs a deployed flow. The token of the engine goes into this process's
    environment, never into a config.
    """
    if not (is_deployed() if deployed is None else deployed):
        return config
    changes: dict[str, Any] = {}
    if config.storage == StorageConfig():
        url = _now(Variable.get, STORAGE_VARIABLE)
        if isinstance(url, str) and url:
            changes["storage"] = StorageConfig(url=url)
    if config.engine == LocalEngineSpec():
        engine = _engine()
        if engine is not None:
            changes["engine"] = engine
    return config.model_copy(update=changes) if changes else config


def is_deployed() -> bool:
    """Whether a worker started this process for a flow run, or the flow that runs here is a deployment's."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return FLOW_RUN_ENV in os.environ or (run is not None and run.deployment_id is not None)


def save_deployment_settings(storage: str, engine_url: str, token: str) -> None:
    """Writes where deployed flows work; again: replaces it. Empty values leave what is there."""
    if storage:
        _now(Variable.set, STORAGE_VARIABLE, storage, overwrite=True)
    if engine_url:
        _now(Secret(value={"url": engine_url, "token": token}).save, ENGINE_SECRET, overwrite=True)


def _engine() -> HttpEngineSpec | None:
    try:
        body = _now(Secret.load, ENGINE_SECRET).get()
    except ValueError:  # Prefect's way to say that there is no such block
        return None
    if not isinstance(body, dict) or not body.get("url"):
        raise ValueError(
            f"the Secret block {ENGINE_SECRET!r} holds no engine: expected a JSON object with url and token; run "
            "`ostinato deploy --engine URL`"
        )
    spec = HttpEngineSpec(url=body["url"])
    if body.get("token"):
        os.environ.setdefault(spec.token_env, body["token"])
    return spec


def _now(call: Any, *arguments: Any, **options: Any) -> Any:
    """Waits for it even where an event loop runs: Prefect would hand out a coroutine there."""
    return call(*arguments, **options, _sync=True)
