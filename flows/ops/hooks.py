"""What is done when a flow run ends badly, by whoever notices it: never by the process that ran it.

A flow that ends by itself, or by SIGTERM, leaves its run. One that was killed cannot: then the engine would keep what
it holds of the run until it needs the room, and the lease would say that somebody acts. Its child runs, which ran in
its process, would stay Running.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.states import Cancelled, Crashed
from pydantic import BaseModel, ValidationError

from engine.workspace import Workspace
from flows.configs.common import FlowConfig
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_keys import EVALUATION_KEY_PREFIX, run_key_of
from flows.runs.code_version import code_version
from flows.runs.session import release_run
from storage.chain.leases import current_epoch, is_held, lease_holder
from storage.chain.listing import list_runs
from storage.errors import StorageError
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)

PARENTS = frozenset({"recurring", "sweep"})
"""Flows that hold no run: their child runs do."""
CHILDREN = 200
"""Child runs that are looked at, the latest first: those before have ended."""
LEFT = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.CRASHED]
"""States of child runs whose process may have been killed."""
CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)


class _Where(FlowConfig):
    """The groups of any flow's config that say where it works and under which key."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


async def release_lease(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Gives back what a flow run that ended and its child runs hold: a hook for on_failure, on_crashed and
    on_cancellation. The names of its parameters are Prefect's. Does nothing where the lease is released already,
    another flow run holds it, or the flow run is due again."""
    try:
        held = _held(flow.name, flow_run)  # before the state is read: a later attempt has a higher epoch
        if not held and flow.name not in PARENTS:
            return
        async with get_client() as client:
            children = await _children(client, flow_run) if flow.name in PARENTS else []
            for child in children:
                held += _held((await client.read_flow(child.flow_id)).name, child)
            now = (await client.read_flow_run(flow_run.id)).state
            if now is not None and not (now.is_final() or now.is_cancelling()):
                return  # it runs again already
            for workspace in held:
                await release_run(workspace)
            await _end(client, children, cancelled=now is not None and now.type in CANCELLED)
    except (ValidationError, ValueError, StorageError, PrefectHTTPStatusError) as error:
        log.warning("flow run %s ended, and its lease is not released: %s", flow_run.name, error)


def _held(flow_name: str, flow_run: FlowRun) -> list[Workspace]:
    """The runs whose lease in force this flow run took, and did not release."""
    config = with_deployment_settings(_where(flow_run), deployed=flow_run.deployment_id is not None)
    if flow_name in PARENTS:
        return []  # all that was wanted of its place is the engine's token, which its children use
    provenance = Provenance(code_version=code_version(), config_digest="", seed=config.seed)
    place = Workspace(store=config.storage.url, engine=config.engine, run="any", provenance=provenance)
    store, found = place.open_store(), []
    for run in _runs(store, flow_name, config, flow_run):
        epoch = current_epoch(store, run)
        if is_held(store, run) and lease_holder(store, run, epoch).get("flow_run") == str(flow_run.id):
            found.append(place.model_copy(update={"run": run, "epoch": epoch}))
    return found


def _where(flow_run: FlowRun) -> _Where:
    """Of a flow that trains by child runs: where those work."""
    body = (flow_run.parameters or {}).get("config") or {}
    if isinstance(body, BaseModel):
        body = body.model_dump(mode="json")
    training = body.get("training") if isinstance(body, dict) else None
    return _Where.model_validate(training["config"] if isinstance(training, dict) and "config" in training else body)


def _runs(store: ObjectStore, flow_name: str, config: FlowConfig, flow_run: FlowRun) -> list[str]:
    """The keys under which this flow run may have worked."""
    if config.run:
        return [config.run]
    if flow_name == "evaluation":
        return list_runs(store, EVALUATION_KEY_PREFIX)  # named by their inputs, which may be others by now
    return [run_key_of(flow_name, flow_run)]


async def _children(client: PrefectClient, flow_run: FlowRun) -> list[FlowRun]:
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=LEFT)),
        ),
        sort=FlowRunSort.START_TIME_DESC,
        limit=CHILDREN,
    )


async def _end(client: PrefectClient, children: list[FlowRun], *, cancelled: bool) -> None:
    """Says of child runs that they ended with the process of their parent."""
    for child in children:
        if child.state is None or not child.state.is_final():
            message = "it ended with the flow run that started it"
            await client.set_flow_run_state(
                child.id, Cancelled(message=message) if cancelled else Crashed(message=message), force=True
            )


ON_END: dict[str, Any] = {
    "on_failure": [release_lease],
    "on_crashed": [release_lease],
    "on_cancellation": [release_lease],
}
"""Options of every flow."""
