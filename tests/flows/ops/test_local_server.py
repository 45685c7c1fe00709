"""Tests of a real Prefect server: it records runs, keeps its history, and leaves no process behind. A start takes eight
seconds."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flows.ops import local_server as server
from flows.ops.local_server import ServerError, ServerHandle, local_prefect_server

# Run as a program of its own: it starts a server, tells of it, and waits to be killed.
HOLDER = """
import sys, time
from pathlib import Path
from flows.ops.local_server import local_prefect_server
assert "prefect" not in sys.modules, "importing flows.ops.local_server must not cost seconds"
with local_prefect_server(Path(sys.argv[1])) as handle:
    print(handle.pid, handle.api_url, flush=True)
    time.sleep(600)
"""

# A flow in a thread without our context: it finds the server all the same, and the environment is put back.
FLOW = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from prefect import flow, get_run_logger, task
from flows.ops.local_server import use_server

@task
def double(number):
    return 2 * number

@flow(name=sys.argv[2])
def doubles():
    get_run_logger().warning("said by %s", sys.argv[2])
    return sum(double(number) for number in range(5))

before = dict(os.environ)
with use_server(sys.argv[1]), ThreadPoolExecutor(1) as pool:
    assert os.environ["PREFECT_API_URL"] == sys.argv[1]
    assert pool.submit(doubles).result() == 20
assert os.environ == before
"""


def gone(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # dead, and not yet reaped by its new parent
            return True
        time.sleep(0.05)
    return False


def ask(handle: ServerHandle, path: str, **body: Any) -> Any:
    return server.request_json(f"{handle.api_url}/{path}", post=body)


def run_flow(handle: ServerHandle, name: str) -> None:
    """In a process of its own, as people run flows: one process reports to one server in its life."""
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    done = subprocess.run(
        [sys.executable, "-c", FLOW, handle.api_url, name],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def recorded(handle: ServerHandle) -> tuple[set[str], int, set[str]]:
    """Names of the flows known, completed task runs, and what was logged."""
    flows = {flow["name"] for flow in ask(handle, "flows/filter")}
    tasks = ask(handle, "task_runs/count", task_runs={"state": {"type": {"any_": ["COMPLETED"]}}})
    messages = {log["message"] for log in ask(handle, "logs/filter") if log["message"].startswith("said by")}
    return flows, tasks, messages


@pytest.mark.slow
def test_flows_are_recorded_on_a_server_that_stops_with_its_block(tmp_path: Path) -> None:
    before = dict(os.environ)
    with local_prefect_server(tmp_path) as handle:
        assert os.environ == before
        run_flow(handle, "alpha")
        assert os.environ == before
        assert recorded(handle) == ({"alpha"}, 5, {"said by alpha"})
    assert gone(handle.pid, within=0.1)


@pytest.mark.slow  # three server starts and a fourth: about 25 s on two idle cores
def test_servers_share_a_home_keep_its_history_and_die_with_their_process(tmp_path: Path) -> None:
    home = tmp_path / "home"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "other home")], stdout=subprocess.PIPE, text=True
    )
    # Two at once and in one home, the harder case: the first start also creates the tables.
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        waiting = [pool.submit(stack.enter_context, local_prefect_server(home)) for _ in range(2)]
        first, second = (future.result() for future in waiting)
        assert len({first.api_url, second.api_url}) == 2
        run_flow(first, "alpha")
        run_flow(second, "beta")
        assert recorded(first) == ({"alpha", "beta"}, 10, {"said by alpha", "said by beta"})

        assert holder.stdout is not None
        pid = int(holder.stdout.readline().split()[0])
        assert not gone(pid, within=0.2)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert gone(pid)

    with local_prefect_server(home) as third:
        assert recorded(third)[:2] == ({"alpha", "beta"}, 10)


def test_the_child_dies_with_a_parent_that_is_killed() -> None:
    child = [server.DIE_WITH_PARENT, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    code = (
        "import os, subprocess, sys, time; boot, *rest = sys.argv[1:]; "
        "subprocess.Popen([sys.executable, '-c', boot, str(os.getpid()), *rest]); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, *child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid, within=0.2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(pid)


def test_a_server_that_ends_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DIE_WITH_PARENT", "import sys; print('no room at the inn'); sys.exit(3)")
    words = r"(?s)status 3.*server\.log.*no room at the inn"
    with pytest.raises(ServerError, match=words), local_prefect_server(tmp_path):
        pass


def test_a_server_that_never_answers_is_stopped_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True)"
    stubborn += "; time.sleep(60)"
    monkeypatch.setattr(server, "DIE_WITH_PARENT", stubborn)
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    with pytest.raises(ServerError, match="no answer within 1 s"), local_prefect_server(tmp_path, start_seconds=1.0):
        pass
    assert gone(int((tmp_path / "server.log").read_text()))


def test_a_server_whose_parent_is_gone_already_does_not_start() -> None:
    code = [sys.executable, "-c", server.DIE_WITH_PARENT, "-1", "-c", "print('started')"]
    result = subprocess.run(code, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "started" not in result.stdout


def test_the_child_is_kept_apart_from_our_settings_and_from_the_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://elsewhere/api")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    environment = server.server_environment(tmp_path, 1234)
    assert "PREFECT_API_URL" not in environment
    assert "PREFECT_API_KEY" not in environment
    assert environment["PREFECT_HOME"] == str(tmp_path)
    assert environment["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:1234/api"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_another_version_of_prefect_keeps_its_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one refuses a database that a newer one has migrated."""
    urls = []
    for installed in ("3.7.7", "3.8.8", "3.8.8"):
        monkeypatch.setattr(server, "version", lambda package, installed=installed: installed)
        urls.append(server.server_environment(tmp_path, 1)["PREFECT_SERVER_DATABASE_CONNECTION_URL"])
    assert urls[0] != urls[1] == urls[2]
    assert all(str(tmp_path) in url for url in urls)
