"""Tests of the supervisor with plain programs as services: starts, restarts, adoption, and an orderly end."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.ops import supervisor as module
from flows.ops.processes import FLOW_RUN_ENV, UP_ID_ENV, ProcessIdentity, processes_of_up, spawn
from flows.ops.services import ServiceSpec
from flows.ops.state import Ports, UpError, UpOptions, UpState, load_state
from flows.ops.supervisor import MAX_BACKOFF_SECONDS, STEADY_SECONDS, Backoff, Supervisor
from tests.fixtures.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
BROKEN = "import sys; sys.exit('no room at the inn')"


class World:
    """Services made of little programs, and what the server would have been told."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.told, self.said, self.deployed = home, [], [], 0
        self.programs = {"server": SLEEP, "engine": SLEEP, "worker": SLEEP}
        self.id = f"world-{os.getpid()}-{home.name}"
        monkeypatch.setattr(module, "services", self._services)
        monkeypatch.setattr(module, "reconcile", self._reconcile)
        monkeypatch.setattr(module, "is_free", lambda port: True)
        monkeypatch.setattr(module, "FLOW_GRACE_SECONDS", 5.0)
        monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
        monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)

    def supervisor(self) -> Supervisor:
        state = load_state(self.home) or UpState(
            id=self.id, options=UpOptions(storage="/data"), ports=Ports(engine=1, worker=2), token="t"
        )
        return Supervisor(self.home, state, self.said.append, self._deploy)

    def flow(self, flow_run: str) -> ProcessIdentity:
        environment = dict(os.environ) | {UP_ID_ENV: self.id, FLOW_RUN_ENV: flow_run}
        command = [sys.executable, "-c", SLEEP]
        return spawn(command, environment=environment, log=self.home / "flow.log", folder=self.home)

    def _deploy(self, _state: UpState) -> None:
        self.deployed += 1

    def _reconcile(self, _api: str, pool: str, *, worker: str, seen: set[str]) -> list[str]:
        self.told.append((pool, worker, set(seen)))
        return []

    def _services(self, _state: UpState, _home: Path) -> list[ServiceSpec]:
        environment = dict(os.environ) | {UP_ID_ENV: self.id}
        return [
            ServiceSpec(name, (sys.executable, "-c", program), environment, lambda: True, 10.0, grace_seconds=5.0)
            for name, program in self.programs.items()
        ]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    for process in processes_of_up(world.id):
        process.kill()


def watching(supervisor: Supervisor) -> threading.Thread:
    thread = threading.Thread(target=supervisor.watch)
    thread.start()
    return thread


def test_backoff_doubles_up_to_a_minute_and_begins_anew_after_a_steady_life() -> None:
    backoff = Backoff()
    waits = [backoff.record_end(100.0, lived_seconds=3.0) for _ in range(8)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS]
    assert backoff.not_before == 160.0
    assert backoff.record_end(100.0, lived_seconds=STEADY_SECONDS) == 1.0


def test_what_is_killed_is_started_again_and_counted(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start()
    first = dict(supervisor.state.services)
    assert load_state(world.home) == supervisor.state
    assert supervisor.state.ready
    assert (set(first), world.deployed) == ({"server", "engine", "worker"}, 1)
    thread = watching(supervisor)
    try:
        for name, mark in first.items():
            os.kill(mark.pid, signal.SIGKILL)
            wait_until(lambda name=name: supervisor.state.restarts.get(name) == 1)
        assert all(mark.alive for mark in supervisor.state.services.values())
        assert not set(first.values()) & set(supervisor.state.services.values())
    finally:
        supervisor.stop.set()
        thread.join()
        supervisor.close()
    assert processes_of_up(world.id) == []
    assert load_state(world.home) is None


def test_a_log_that_has_grown_too_long_is_rotated_while_its_process_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.ops.processes.MAX_LOG_BYTES", 1000)
    world.programs["engine"] = "import time\nwhile True: print('a line' * 10, flush=True); time.sleep(0.001)"
    supervisor = world.supervisor()
    supervisor.start()
    thread = watching(supervisor)
    log = world.home / "engine.log"
    try:
        wait_until(lambda: log.with_name("engine.log.1").exists())
        # the process goes on in the same file, from its beginning
        wait_until(lambda: 0 < log.stat().st_size < 1000)
        assert supervisor.state.restarts == {}
    finally:
        supervisor.stop.set()
        thread.join()
        supervisor.close()
    assert log.read_bytes().startswith((b"a line", b"\n")) and b"\0" not in log.read_bytes()


def test_flows_of_a_dead_worker_are_ended_and_the_server_is_told_of_them(world: World) -> None:
    supervisor = world.supervisor()
    supervisor.start()
    world.told.clear()
    flow = world.flow("run-1")
    thread = watching(supervisor)
    try:
        os.kill(supervisor.state.services["worker"].pid, signal.SIGKILL)
        wait_until(lambda: supervisor.state.restarts.get("worker") == 1)
        assert not flow.alive
        assert world.told == [("ostinato", f"ostinato-{world.id}", {"run-1"})]
    finally:
        supervisor.stop.set()
        thread.join()
        supervisor.close()


def test_a_server_that_is_away_is_told_later_of_every_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = world.supervisor()
    supervisor.start()
    answers = iter([module.httpx.ConnectError("away"), None])

    def reconcile(_api: str, _pool: str, *, worker: str, seen: set[str]) -> list[str]:
        world.told.append(set(seen))
        if error := next(answers, None):
            raise error
        return []

    world.told.clear()
    monkeypatch.setattr(module, "reconcile", reconcile)
    world.flow("run-1")
    thread = watching(supervisor)
    try:
        os.kill(supervisor.state.services["worker"].pid, signal.SIGKILL)
        wait_until(lambda: len(world.told) == 2)
        assert world.told == [{"run-1"}, {"run-1"}]  # the second time its process is gone already
    finally:
        supervisor.stop.set()
        thread.join()
        supervisor.close()


def test_the_next_supervisor_takes_over_what_a_killed_one_left(world: World) -> None:
    first = world.supervisor()
    first.start()
    os.kill(first.state.services["engine"].pid, signal.SIGKILL)
    wait_until(lambda: not first.state.services["engine"].alive)
    world.told.clear()
    flow = world.flow("run-1")
    second = world.supervisor()
    second.start()
    try:
        assert second.state.services["server"] == first.state.services["server"]
        assert second.state.services["worker"] == first.state.services["worker"]
        assert second.state.services["engine"].alive
        assert second.state.services["engine"] != first.state.services["engine"]
        assert (flow.alive, world.told) == (True, [])  # its worker lives: the run goes on
    finally:
        second.close()
    assert not flow.alive
    assert world.told[-1][2] == {"run-1"}


def test_a_service_that_ends_at_its_start_is_an_error_with_its_log(world: World) -> None:
    world.programs["engine"] = BROKEN
    supervisor = world.supervisor()
    supervisor.services[1] = ServiceSpec(
        "engine", supervisor.services[1].command, supervisor.services[1].environment, lambda: False, 10.0
    )
    with pytest.raises(UpError, match=r"(?s)engine ended while it was starting.*engine\.log.*no room at the inn"):
        supervisor.start()
    supervisor.close()
    assert processes_of_up(world.id) == []


def test_the_start_says_what_it_waits_for_and_how_long_it_took(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_MESSAGE_SECONDS", 0.0)
    supervisor = world.supervisor()
    answers = iter([False, False, True])
    engine = supervisor.services[1]
    slow = replace(engine, healthy=lambda: next(answers, True), title="engine at http://127.0.0.1:1")
    supervisor.services[1] = slow
    try:
        supervisor.start()
    finally:
        supervisor.close()
    said = [re.sub(r"pid \d+", "pid N", re.sub(r"\(\d+ s\)", "(N s)", line)) for line in world.said]
    waiting = f"waiting for the engine at http://127.0.0.1:1 (N s); its log: {world.home / 'engine.log'}"
    assert said[:4] == [
        "starting the server (pid N)", "starting the engine at http://127.0.0.1:1 (pid N)",
        "the server is ready (N s)", "creating the deployments on the Prefect server",
    ]  # fmt: skip
    assert said[4:6] == ["the deployments are created (N s)", "starting the worker (pid N)"]
    assert waiting in said[6:]
    assert said[-2:] == ["the engine at http://127.0.0.1:1 is ready (N s)", "the worker is ready (N s)"]


def test_a_port_of_somebody_else_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_free", lambda port: False)
    with pytest.raises(UpError, match=r"port 4200 of 127\.0\.0\.1 is in use.*--port"):
        world.supervisor().start()
    assert processes_of_up(world.id) == []
