"""Hooks that release the run of a flow whose process was killed, and that pause a schedule whose runs keep failing.
They run in the process that notices the end.

A flow that ends normally or by SIGTERM releases its run itself. After a kill, the engine would keep the run's weights
until it needs the memory, the lease would stay taken, and child runs, which ran in the same process, would stay
Running.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
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
from flows.ops.run_names import EVALUATION_KEY_PREFIX, run_key_of
from flows.ops.schedules import pause_bad_schedules
from flows.runs.code_version import code_version
from flows.runs.session import release_run
from storage.chain.leases import current_epoch, is_held, lease_holder
from storage.chain.listing import list_runs
from storage.errors import StorageError
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)

PARENTS = frozenset({"recurring", "sweep"})
"""Flows that have no run of their own, only child flow runs."""
MAX_CHILDREN = 200
"""Number of the latest child runs that are examined. Earlier ones have ended."""
UNFINISHED_STATES = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.CRASHED]
"""States in which a killed process may have left its child runs."""
CANCELLATION_STATES = (StateType.CANCELLING, StateType.CANCELLED)


class _LocationConfig(FlowConfig):
    """The groups that the configs of all flows share: store, engine and run key. Others are ignored."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


async def release_lease(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Releases the runs that an ended flow run and its child runs hold: a hook for failure, crash and cancellation.

    Prefect defines the names of the parameters. Does nothing if the lease is released already, if another flow run
    holds it, or if the flow run is scheduled again.
    """
    try:
        # read the leases before the state: a later attempt would have a higher epoch
        held_runs = _held_runs(flow.name, flow_run)
        is_parent = flow.name in PARENTS
        if not held_runs and not is_parent:
            return
        async with get_client() as client:
            children = await _unfinished_children(client, flow_run) if is_parent else []
            for child in children:
                child_flow = await client.read_flow(child.flow_id)
                held_runs += _held_runs(child_flow.name, child)

            current = (await client.read_flow_run(flow_run.id)).state
            if current is not None and not (current.is_final() or current.is_cancelling()):
                # another attempt is scheduled or running
                return
            for workspace in held_runs:
                await release_run(workspace)
            is_cancelled = current is not None and current.type in CANCELLATION_STATES
            await _end_children(client, children, cancelled=is_cancelled)
    except (ValueError, StorageError, PrefectHTTPStatusError) as error:
        log.warning("flow run %s ended, and its lease is not released: %s", flow_run.name, error)


def _held_runs(flow_name: str, flow_run: FlowRun) -> list[Workspace]:
    """Workspaces of the runs whose current lease this flow run holds."""
    try:
        location = _location_config(flow_run)
    except ValidationError:
        # the flow has refused this config before it took a lease
        return []
    # this call also puts the engine's token into the environment, where the children of PARENTS need it
    config = with_deployment_settings(location, deployed=flow_run.deployment_id is not None)
    if flow_name in PARENTS:
        return []
    provenance = Provenance(code_version=code_version(), config_digest="", seed=config.seed)
    template = Workspace(store=config.storage.url, engine=config.engine, run="any", provenance=provenance)
    store = template.open_store()
    held_runs = []
    for run in _candidate_runs(store, flow_name, config, flow_run):
        epoch = current_epoch(store, run)
        if is_held(store, run) and lease_holder(store, run, epoch).get("flow_run") == str(flow_run.id):
            held_runs.append(template.model_copy(update={"run": run, "epoch": epoch}))
    return held_runs


def _location_config(flow_run: FlowRun) -> _LocationConfig:
    """Store, engine and run key of a flow run. For a flow that trains by child runs, those of the children."""
    body = (flow_run.parameters or {}).get("config") or {}
    if isinstance(body, BaseModel):
        body = body.model_dump(mode="json")
    training = body.get("training") if isinstance(body, dict) else None
    if isinstance(training, dict) and "config" in training:
        body = training["config"]
    return _LocationConfig.model_validate(body)


def _candidate_runs(store: ObjectStore, flow_name: str, config: FlowConfig, flow_run: FlowRun) -> list[str]:
    """The keys of the runs that this flow run may hold."""
    if config.run:
        return [config.run]
    if flow_name == "evaluation":
        # the key is a digest of the inputs, which may have changed since the flow run began
        return list_runs(store, EVALUATION_KEY_PREFIX)
    return [run_key_of(flow_name, flow_run)]


async def _unfinished_children(client: PrefectClient, flow_run: FlowRun) -> list[FlowRun]:
    """The latest child runs of a flow run that are not in a final state, or crashed."""
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED_STATES)),
        ),
        sort=FlowRunSort.START_TIME_DESC,
        limit=MAX_CHILDREN,
    )


async def _end_children(client: PrefectClient, children: list[FlowRun], *, cancelled: bool) -> None:
    """Marks child runs as Cancelled or Crashed, because they ended with the process of their parent.

    A child that has ended, or whose state has changed since it was read, keeps its state."""
    message = "it ended with the flow run that started it"
    for child in children:
        current = (await client.read_flow_run(child.id)).state
        if current is not None and (child.state is None or current.id != child.state.id or current.is_final()):
            continue
        state: State = Cancelled(message=message) if cancelled else Crashed(message=message)
        await client.set_flow_run_state(child.id, state, force=True)


async def pause_schedule(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Pauses the schedule of a failed flow run if its runs keep failing in the same way: a hook for failure.

    Prefect defines the names of the parameters."""
    if not flow_run.auto_scheduled:
        return
    try:
        with get_client(sync_client=True) as client:
            lines = await asyncio.to_thread(pause_bad_schedules, client._client)
    except httpx.HTTPError as error:
        log.warning("flow run %s failed, and its schedule is not checked: %s", flow_run.name, error)
        return
    for line in lines:
        log.warning("%s", line)


ON_END: dict[str, Any] = {
    "on_failure": [release_lease, pause_schedule],
    "on_crashed": [release_lease],
    "on_cancellation": [release_lease],
}
"""Options of the `@flow` decorator of every flow."""
