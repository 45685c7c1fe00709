"""Tests of flow runs that are cancelled, interrupted or ended by SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.exceptions import TerminationSignal
from prefect.flow_runs import FlowRun
from prefect.states import State

from flows.ops.processes import FLOW_RUN_ENV
from flows.ops.termination import FlowRunCancelled, cancellation_message, reraise_termination
from storage.store import keys
from storage.store.objects import ObjectStore, open_store


@task
async def work(number: int) -> int:
    return number


waiting_began = threading.Event()


@task
async def waiting() -> None:
    waiting_began.set()
    await asyncio.sleep(60)


@flow
async def ended() -> None:
    with reraise_termination():
        await work(1)


@flow
async def left_alone() -> None:
    await work(1)


@flow
async def child() -> None:
    with reraise_termination():
        await waiting()


@flow
async def parent() -> None:
    with reraise_termination():
        await child()


async def arrives(*_: Any, **__: Any) -> None:
    raise TerminationSignal(signal=signal.SIGTERM)


async def last_run(name: str) -> FlowRun:
    """Of the flow of that name."""
    async with get_client() as client:
        of_flow = FlowFilter(name=FlowFilterName(any_=[name]))
        return (await client.read_flow_runs(flow_filter=of_flow, sort="START_TIME_DESC", limit=1))[0]  # type: ignore[arg-type]


def state_of(name: str) -> State:
    state = asyncio.run(last_run(name)).state
    assert state is not None
    return state


@pytest.mark.parametrize(("deployed", "state"), [(True, "Crashed"), (False, "Cancelled")])
def test_sigterm_while_a_task_run_is_created_does_not_fail_the_run(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, deployed: bool, state: str
) -> None:
    """A Crashed run of a worker goes on, a Failed one does not. `left_alone`: what Prefect makes of it; once that is
    mended there, flows need no help."""
    passed_on: list[int] = []  # Prefect passes the signal on to the earlier handler
    before = signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    monkeypatch.setattr("prefect.tasks.Task.create_local_run", arrives)
    try:
        with pytest.raises(ValueError, match="Task run is not set"):
            asyncio.run(left_alone())
        assert state_of("left-alone").name == "Failed"
        if deployed:
            monkeypatch.setenv(FLOW_RUN_ENV, str(asyncio.run(last_run("left-alone")).id))
        with pytest.raises(TerminationSignal):
            asyncio.run(ended())
        assert state_of("ended").name == state
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="another"), reraise_termination():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("another") from None


async def cancelled_while_waiting() -> None:
    """As asyncio does at Ctrl-C. A busy server may take seconds until both runs exist and the task began."""
    waiting_began.clear()
    running = asyncio.ensure_future(parent())
    while not (waiting_began.is_set() or running.done()):
        await asyncio.sleep(0.1)
    running.cancel()
    await running


def test_an_interrupted_run_from_a_terminal_is_cancelled_with_its_children(prefect_server: str) -> None:
    with pytest.raises(FlowRunCancelled, match="cancelled; what is committed is kept"):
        asyncio.run(cancelled_while_waiting())
    for name in ("parent", "child"):
        assert state_of(name).name == "Cancelled"
        assert str(state_of(name).message).startswith("cancelled; ")


def test_a_run_without_steps_begins_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert cancellation_message(store, "r", "terminal") == (
        "cancelled; no step is committed. The same command begins the run again"
    )
    assert cancellation_message(store, "r", "deployed").endswith("Retry begins the run again")


def commit_steps(store: ObjectStore, stage: str, model: str, steps: int) -> None:
    """Commits records that only have the right keys."""
    for step in range(1, steps + 1):
        store.put(keys.chain_record("r", stage, model, step), b"{}")


def test_a_step_counts_when_all_models_that_take_it_have_committed_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    # cancelled after the policy's commit of the third step, and before that of the value model
    commit_steps(store, "0-ppo", "policy", 3)
    commit_steps(store, "0-ppo", "value", 2)
    assert cancellation_message(store, "r", "terminal").startswith("cancelled; 2 steps are committed")
    # a stage that is finished counts, too; the models of a recipe take their steps apart
    commit_steps(store, "1-recipe", "student", 4)
    store.put(keys.chain_root("r", "1-recipe", "teacher"), b"{}")
    assert cancellation_message(store, "r", "terminal").startswith("cancelled; 6 steps are committed")
