"""Tests of `ostinato up` on this machine: a real server, worker and engine, and runs of a deployment that are killed.
The services take a minute to start, and each test takes a minute."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from flows.ops.processes import processes_of_up
from flows.ops.services import free_port
from flows.ops.state import UpState, load_state
from storage.chain.leases import current_epoch, is_held
from tests.fixtures.runs.deployed import Deployed, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS = 90
"""Steps of a run that is killed on its way. The run goes on while the server is away, at up to ten steps a second, and
must not end before the supervisor has noticed the end of the worker."""


class Up(Deployed):
    """A folder in which `ostinato up` runs."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        super().__init__(folder, tiny_folder)
        self.port = free_port()
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "flows"))

    def cli(self, *words: str, fine: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *words],
            cwd=self.folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert not fine or done.returncode == 0, done.stdout + done.stderr
        return done

    def up(self, *options: str) -> str:
        return self.cli("up", "--detach", "--port", str(self.port), *options).stdout

    @property
    def home(self) -> Path:
        return self.folder / ".ostinato" / "up"

    @property
    def state(self) -> UpState:
        state = load_state(self.home)
        assert state is not None
        return state

    @property
    def restarts(self) -> Counter[str]:
        """Number of restarts of each service since the start of the supervisor."""
        return Counter(self.state.restarts)

    @property
    def api_url(self) -> str:
        return self.state.api_url

    def kill(self, service: str, with_signal: int = signal.SIGKILL) -> None:
        os.kill(self.state.services[service].pid, with_signal)


@contextmanager
def folder_of_up(folder: Path, tiny_folder: Path) -> Iterator[Up]:
    """A folder in which nothing runs at the end of the block."""
    up = Up(folder, tiny_folder)
    try:
        yield up
    finally:
        state = load_state(up.home)
        up.cli("down", fine=False)
        if state is not None:
            if state.supervisor is not None and state.supervisor.alive:  # it would start again what is killed below
                os.kill(state.supervisor.pid, signal.SIGKILL)
            for process in processes_of_up(state.id):
                process.kill()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Up]:
    with folder_of_up(tmp_path_factory.mktemp("up"), tiny_folder) as place:
        yield place


@pytest.fixture
def place(shared_folder: Up) -> Up:
    """The folder of all tests but one. Its services run: their start takes longer than most of the tests."""
    shared_folder.up()
    return shared_folder


def test_a_deployed_run_survives_kill_nine_of_engine_server_and_worker(place: Up) -> None:
    before = place.state.services
    assert "nothing was changed" in place.up()
    assert place.state.services == before
    checks = json.loads(place.cli("doctor", "--json").stdout)["checks"]
    assert {(check["area"], check["name"]): check["verdict"] for check in checks if check["area"] != "versions"} == {
        **{("up", name): "ok" for name in ("supervisor", "server", "engine", "worker", "page")},
        **{("storage", name): "ok" for name in ("writable", "put-if-absent", "clock", "space")},
        **{("engine", name): "ok" for name in ("health", "ready", "calls")},
        ("prefect", "server"): "ok",
    }
    restarts = place.restarts
    run = place.start("killed", steps=STEPS)
    place.until(run, "Running")
    for victim in ("engine", "server", "worker"):
        reached = place.steps("killed")
        wait_for(lambda reached=reached: place.steps("killed") > reached)
        place.kill(victim)
    state, attempts = place.until(run, "Completed")
    assert (state, attempts) == ("Completed", 2)  # engine and server: the flow waits; the worker: run again
    assert place.steps("killed") == STEPS
    assert not is_held(place.store, "killed")
    assert place.restarts - restarts == {"engine": 1, "server": 1, "worker": 1}


def test_sigterm_to_the_worker_leaves_no_run_running(place: Up) -> None:
    restarts = place.restarts
    run = place.start("ended", steps=STEPS)
    wait_for(lambda: place.steps("ended") >= 3)
    place.kill("worker", signal.SIGTERM)
    assert place.until(run, "Completed") == ("Completed", 2)
    assert place.steps("ended") == STEPS
    assert not is_held(place.store, "ended")
    assert place.restarts - restarts == {"worker": 1}
    states = [state["name"] for state in place.ask("GET", f"/flow_run_states/?flow_run_id={run}")]
    assert states[states.index("Running") + 1] in ("AwaitingRetry", "Crashed")  # at once, by who saw the worker end


def test_cancel_frees_the_run_and_a_retry_goes_on(place: Up) -> None:
    run = place.start("cancelled", steps=60)
    wait_for(lambda: place.steps("cancelled") >= 3)
    place.set_state(run, type="CANCELLING", name="Cancelling")
    wait_for(lambda: not is_held(place.store, "cancelled"), seconds=10)
    place.until(run, "Cancelled")
    reached = place.steps("cancelled")
    assert reached < 60
    place.set_state(run, type="SCHEDULED", name="AwaitingRetry")
    assert place.until(run, "Completed") == ("Completed", 2)
    assert place.steps("cancelled") == 60
    assert current_epoch(place.store, "cancelled") == 2

    again = place.start("cancelled", steps=60)  # a finished key
    place.until(again, "Completed")
    assert current_epoch(place.store, "cancelled") == 3
    assert place.steps("cancelled") == 60


def test_a_paused_run_leaves_its_process_and_goes_on_when_resumed(place: Up) -> None:
    run = place.start("paused", steps=60)
    wait_for(lambda: place.steps("paused") >= 3)
    until = (datetime.now(UTC) + timedelta(minutes=10)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    place.set_state(run, type="PAUSED", name="Suspended", state_details=details)  # what the UI's button sends
    wait_for(lambda: not is_held(place.store, "paused"))
    assert 3 <= place.steps("paused") < 60
    assert place.status(run)[0] == "Suspended"
    place.ask("POST", f"/flow_runs/{run}/resume")
    place.until(run, "Completed")
    assert place.steps("paused") == 60


def test_down_and_a_killed_supervisor_lose_no_run(place: Up) -> None:
    run = place.start("moved", steps=60)
    wait_for(lambda: place.steps("moved") >= 3)
    first = place.state
    assert first.supervisor is not None
    os.kill(first.supervisor.pid, signal.SIGKILL)
    wait_for(lambda: first.supervisor is not None and not first.supervisor.alive)
    assert place.cli("up", "--status", fine=False).returncode == 1
    place.up()
    assert place.state.services == first.services  # taken over, not started again
    place.cli("down")
    assert processes_of_up(first.id) == []
    assert load_state(place.home) is None
    assert not is_held(place.store, "moved")
    place.up()
    place.until(run, "Completed")
    assert place.steps("moved") == 60


def test_postgres_and_s3_by_a_setting_each(postgres: str, tmp_path: Path, tiny_folder: Path) -> None:
    with folder_of_up(tmp_path, tiny_folder) as place:
        place.up("--database", postgres, "--with-s3")
        run = place.start("elsewhere", steps=4)
        place.until(run, "Completed")
        (report,) = place.ask("POST", "/artifacts/filter", artifacts={"key": {"any_": ["report"]}})
        link = re.search(r"\]\((http[^)]+)\)", report["data"])
        assert link, report["data"]
        page = httpx.get(link[1], trust_env=False)  # as a browser would: no token
        assert (page.status_code, page.headers["content-type"].split(";")[0]) == (200, "text/html")
        assert "elsewhere" in page.text
        assert httpx.get(link[1][:-1], trust_env=False).status_code == 404
        assert place.state.ports.engine == place.port + 1
        assert not (place.folder / "ostinato-data").exists()
        assert list((place.home / "prefect").glob("*.db")) == []
        assert set(place.state.services) == {"s3", "server", "engine", "worker", "page"}
