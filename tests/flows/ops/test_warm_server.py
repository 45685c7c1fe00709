"""Tests of the server that commands share: who starts it, how long it lives, and what ends it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.ops import warm_server
from flows.ops.local_server import ServerError, ServerHandle
from flows.ops.warm_server import keep_server, warm_prefect_server
from tests.fixtures.waiting import alive, wait_until

# Uses the server of a folder until it is killed.
USER = """
import sys, time
from pathlib import Path
from flows.ops.warm_server import warm_prefect_server
assert "prefect" not in sys.modules, "importing flows.ops.warm_server must not cost seconds"
with warm_prefect_server(Path(sys.argv[1])) as handle:
    print(handle.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """A keeper in a thread, which ends a second after its last user; a sleeping process takes the server's place."""
    process = subprocess.Popen(["sleep", "600"])

    @contextmanager
    def sleeping_server(home: Path, *, start_seconds: float) -> Iterator[ServerHandle]:
        yield ServerHandle(api_url="http://127.0.0.1:1/api", ui_url="http://127.0.0.1:1", pid=process.pid)

    monkeypatch.setattr(warm_server, "local_prefect_server", sleeping_server)
    thread = threading.Thread(target=keep_server, args=(tmp_path, 1.0), daemon=True)
    thread.start()
    wait_until(lambda: bool(list(tmp_path.glob("server-*.json"))), seconds=10)
    yield thread
    process.kill()
    process.wait()
    thread.join(10)


def test_users_get_the_running_server_and_the_keeper_ends_after_the_last_of_them(
    tmp_path: Path, keeper: threading.Thread
) -> None:
    with warm_prefect_server(tmp_path) as first:
        with warm_prefect_server(tmp_path) as second:
            assert first == second
        time.sleep(2)
        assert keeper.is_alive()
    keeper.join(10)
    assert not keeper.is_alive()
    assert not list(tmp_path.glob("server-*.json"))


def test_the_keeper_ends_with_its_server(tmp_path: Path, keeper: threading.Thread) -> None:
    with warm_prefect_server(tmp_path) as handle:
        os.kill(handle.pid, signal.SIGKILL)
        keeper.join(10)
        assert not keeper.is_alive()


def test_the_keeper_of_a_deleted_folder_ends(tmp_path: Path, keeper: threading.Thread) -> None:
    with warm_prefect_server(tmp_path):
        for file in tmp_path.glob("server-*.json"):
            file.unlink()
        keeper.join(10)
        assert not keeper.is_alive()


def test_the_server_of_a_dead_keeper_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_server, "version", lambda package: "1.2")
    state = {
        "server": {"api_url": "http://127.0.0.1:1/api", "ui_url": "", "pid": 1},
        "keeper": {"pid": os.getpid(), "created": 0.0},
    }
    (tmp_path / "server-1.2.json").write_text(json.dumps(state))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServerError, match="status 1"), warm_prefect_server(tmp_path):
        pass


@pytest.mark.slow  # a server starts in eight seconds
def test_commands_that_start_at_once_share_a_server_which_outlives_the_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(warm_server.IDLE_SECONDS_ENV, "3")
    users = [
        subprocess.Popen([sys.executable, "-c", USER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda user: int(user.stdout.readline()), users)
    assert first == second
    for user in users:
        user.kill()
        user.wait()
        assert alive(first)
    wait_until(lambda: not alive(first), seconds=30)
