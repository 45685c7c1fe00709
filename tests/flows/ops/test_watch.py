"""Tests of the watch on a training loop: a pause ends it after its step, and a step that hangs is reported once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prefect.exceptions import Pause
from prefect.states import Cancelling, Running, Suspended

from flows.training import watch
from flows.training.watch import STALLED_SECONDS, RunWatch
from tests.fixtures.clocks import Clock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    heard: list[dict[str, object]] = []
    monkeypatch.setattr(watch, "emit_run_stalled", lambda run, **body: heard.append({"run": run, **body}))
    return heard


def test_a_pause_ends_the_loop_after_the_step_that_runs() -> None:
    state, polled = Suspended(timeout_seconds=60), threading.Event()

    def paused() -> object:
        polled.set()
        return state

    with RunWatch("r", step=0, paused=paused, poll_seconds=0.001) as running:  # type: ignore[arg-type]
        assert polled.wait(10)
        while running._pause is None:
            assert running._thread.is_alive()
        with pytest.raises(Pause) as raised:
            running.stepped(0)
    assert raised.value.state is state


def test_a_cancelled_run_without_a_worker_ends_after_its_step() -> None:
    running = RunWatch("r", step=0, paused=lambda: Cancelling())
    running.stepped(0)
    running.check()
    with pytest.raises(asyncio.CancelledError):
        running.stepped(1)


def test_a_run_that_was_resumed_before_the_step_ended_goes_on() -> None:
    states = [Suspended(timeout_seconds=60), None]
    running = RunWatch("r", step=0, paused=lambda: states.pop(0))
    running.check()
    running.check()
    running.stepped(0)


def test_a_stall_is_told_once_and_again_after_a_step(told: list[dict[str, object]]) -> None:
    """The loop counts its steps from 0, and the event from 1."""
    clock = Clock()
    running = RunWatch("r", step=7, paused=lambda: None, clock=clock)
    clock.now = 100.0
    running.stepped(7)
    clock.now = 100.0 + 10 * 100.0  # ten times what a step takes: not more than that
    running.check()
    assert told == []
    clock.now += 1.0
    running.check()
    running.check()
    assert told == [{"run": "r", "step": 9, "silent_seconds": 1001.0, "usual_seconds": 100.0}]
    running.stepped(8)
    clock.now += STALLED_SECONDS * 100
    running.check()
    assert [each["step"] for each in told] == [9, 10]


def test_quick_steps_do_not_stall_within_minutes(told: list[dict[str, object]]) -> None:
    clock = Clock()
    running = RunWatch("r", step=0, paused=lambda: None, clock=clock)
    clock.now = 0.5
    running.stepped(0)
    clock.now += STALLED_SECONDS
    running.check()
    assert told == []


def test_only_a_paused_state_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read_flow_run(self, _id: object) -> object:
            return type("Run", (), {"state": state})

    context = type("Context", (), {"flow_run": type("Run", (), {"id": 1})})
    monkeypatch.setattr(watch.FlowRunContext, "get", classmethod(lambda _: context))
    monkeypatch.setattr(watch, "get_client", lambda sync_client: Client())
    state = Running()
    assert watch.paused_state() is None
    state = Suspended(timeout_seconds=60)
    assert watch.paused_state() is state
