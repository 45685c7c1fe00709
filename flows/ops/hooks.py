"""What is done when a flow run ends badly, by whoever notices it: never by the process that ran it.

A flow that ends by itself, or by SIGTERM, leaves its run. One that was killed cannot: then the engine would keep what
it holds of the run until it needs the room, and the lease would say that somebody acts.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from pydantic import ValidationError

from engine.workspace import Workspace
from flows.config import FlowConfig
from flows.ops.place import placed
from flows.ops.run_keys import key_of
from flows.session import leave
from flows.version import code_version
from storage.artifacts import Provenance
from storage.errors import StorageError
from storage.leases import current_epoch, holder, is_held

log = logging.getLogger(__name__)


class _Where(FlowConfig):
    """The groups of any flow's config that say where it works and under which key."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


async def release_lease(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Gives back the run of a flow run that ended: a hook for on_failure, on_crashed and on_cancellation. The names of
    its parameters are Prefect's. Does nothing when the lease is released already, or another flow run holds it."""
    body = (flow_run.parameters or {}).get("config")
    try:
        config = body if isinstance(body, FlowConfig) else _Where.model_validate(body or {})
        config = placed(config, deployed=flow_run.deployment_id is not None)
        run = config.run or key_of(flow.name, flow_run)
        await _release(run, config, flow_run)
    except (ValidationError, ValueError, StorageError) as error:
        log.warning("flow run %s ended, and its lease is not released: %s", flow_run.name, error)


async def _release(run: str, config: FlowConfig, flow_run: FlowRun) -> None:
    provenance = Provenance(code_version=code_version(), config_digest="", seed=config.seed)
    workspace = Workspace(store=config.storage.url, engine=config.engine, run=run, provenance=provenance)
    store = workspace.open_store()
    epoch = current_epoch(store, run)  # before the state is read: a later attempt has a higher one
    if not is_held(store, run) or holder(store, run, epoch).get("flow_run") != str(flow_run.id):
        return
    async with get_client() as client:
        now = await client.read_flow_run(flow_run.id)
    if now.state is not None and not (now.state.is_final() or now.state.is_cancelling()):
        return  # it runs again already
    await leave(workspace.model_copy(update={"epoch": epoch}))


ON_END: dict[str, Any] = {
    "on_failure": [release_lease],
    "on_crashed": [release_lease],
    "on_cancellation": [release_lease],
}
"""Options of every flow that holds a run."""
