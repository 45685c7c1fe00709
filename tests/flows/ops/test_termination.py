"""Tests of SIGTERM while Prefect creates a task run."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.exceptions import TerminationSignal
from prefect.flow_runs import FlowRun

from flows.ops.termination import reraise_termination


@task
async def work(number: int) -> int:
    return number


@flow
async def ended() -> None:
    with reraise_termination():
        await work(1)


@flow
async def left_alone() -> None:
    await work(1)


async def arrives(*_: Any, **__: Any) -> None:
    raise TerminationSignal(signal=signal.SIGTERM)


async def last_run(name: str) -> FlowRun:
    """Of the flow of that name."""
    async with get_client() as client:
        of_flow = FlowFilter(name=FlowFilterName(any_=[name]))
        return (await client.read_flow_runs(flow_filter=of_flow, sort="START_TIME_DESC", limit=1))[0]  # type: ignore[arg-type]


def test_a_flow_that_sigterm_ends_while_a_task_run_is_created_has_crashed(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Crashed run goes on, a Failed one does not. `left_alone`: what Prefect makes of it; once that is mended there,
    flows need no help."""
    passed_on: list[int] = []  # Prefect passes the signal on to the earlier handler
    before = signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    monkeypatch.setattr("prefect.tasks.Task.create_local_run", arrives)
    try:
        with pytest.raises(ValueError, match="Task run is not set"):
            asyncio.run(left_alone())
        assert asyncio.run(last_run("left-alone")).state_name == "Failed"
        with pytest.raises(TerminationSignal):
            asyncio.run(ended())
        assert asyncio.run(last_run("ended")).state_name == "Crashed"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="another"), reraise_termination():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("another") from None
