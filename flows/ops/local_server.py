"""A real Prefect server for as long as a block runs, so that a run on one machine has a UI and a history.

Prefect's own fallback, the ephemeral server, loses most of what it is told when the process ends.
Prefect is imported only where it is used: its import takes seconds.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10.0
"""How long a server may take to end by SIGTERM, before SIGKILL."""
SETTLE_SECONDS = 15.0
"""How long to wait at most for the server to write down the events it was sent."""
LOG_TAIL_BYTES = 4000
BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
}
"""How many rows the server writes in one transaction. By default every task run is a transaction of its own: a third of
the server's CPU time suffices for batches, and SQLite no longer answers other requests that it is locked."""
SETTLE_POLL_SECONDS = 2.0
"""More than the flush interval, so that a batch that waits to be written is not taken for the end."""

# Runs in the child before it becomes the server. PR_SET_PDEATHSIG (1) outlives exec; SIGKILL, because nobody is left to
# insist when a server lingers on SIGTERM. The parent may have died before the call: then its pid is not ours any more.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class ServerError(RuntimeError):
    """The Prefect server did not start or did not answer. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerHandle:
    """A server that answers."""

    api_url: str  # ends in /api, what PREFECT_API_URL wants
    ui_url: str
    pid: int


@contextmanager
def local_prefect_server(home: Path, *, start_seconds: float = 120.0) -> Iterator[ServerHandle]:
    """Start `prefect server` on a free loopback port, and stop it at the end of the block.

    Its database and log are kept under `home`, so that the next server there shows the earlier runs. Two at once are
    fine, in one home or in two. Nothing of this process is changed: see `use_server`. The server also dies when this
    process does, by whatever signal (Linux); enter the block in a thread that outlives it, since Linux counts the end
    of the starting thread as the parent's death.

    Raises ServerError when the server ends, or does not answer within `start_seconds`.
    """
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    # Two first starts in one home would both create the tables; the second waits until the first is up.
    with _locked(home / "start.lock"), _reserved_port() as port:
        log = home / "server.log"
        process = _spawn(home, log, port)
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait_until_healthy(process, f"{url}/api/health", log, start_seconds=start_seconds)
        except BaseException:
            _stop(process)
            raise
    try:
        yield ServerHandle(api_url=f"{url}/api", ui_url=url, pid=process.pid)
    finally:
        _stop(process)


@contextmanager
def use_server(api_url: str) -> Iterator[None]:
    """Let every flow of this process, and of the processes it starts, report to the server at `api_url`.

    At the end of the block it sends what is left and, where the server is on this machine, waits at most
    `SETTLE_SECONDS` until it has written that down: Prefect reports task runs in the background, and a server stopped
    too early forgets the last of them.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with _environment(PREFECT_API_URL=api_url, DO_NOT_TRACK="1", **_no_proxy(api_url)):
            # A thread without a copy of our context sees Prefect's global settings, read when it was imported: a flow
            # there would quietly start an ephemeral server of its own.
            refresh_global_settings_context()
            with temporary_settings({PREFECT_API_URL: api_url}):
                try:
                    yield
                finally:
                    # In a thread: where an event loop runs, Prefect's drains would come back as coroutines instead.
                    settling = threading.Thread(target=_settle, args=(api_url,), name="settle-prefect-server")
                    settling.start()
                    settling.join()
    finally:
        refresh_global_settings_context()


def _spawn(home: Path, log: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = ["-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *arguments],
            cwd=home,  # away from a prefect.toml or .env of the working directory
            env=server_environment(home, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the run; the server must live to hear how it ended
        )


def server_environment(home: Path, port: int, *, database: str = "") -> dict[str, str]:
    """What a Prefect server on this machine needs: it answers its own page, and calls nobody.

    `database` is a SQLAlchemy url; without one it keeps a SQLite file in `home`.
    """
    client_side = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_DATABASE_CONNECTION_URL")
    inherited = {name: value for name, value in os.environ.items() if name not in client_side}
    return BATCHES | inherited | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database or f"sqlite+aiosqlite:///{home / _database()}",
        "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{port}/api",  # else the page asks port 4200 and stays blank
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # v2 calls an analytics host on every load; v1 calls nobody
        "DO_NOT_TRACK": "1",
    }


def _database() -> str:
    """A file for each version: Prefect refuses what a newer one has migrated, and two environments of one checkout may
    have two."""
    return f"prefect-{version('prefect')}.db"


def _wait_until_healthy(process: subprocess.Popen[bytes], health_url: str, log: Path, *, start_seconds: float) -> None:
    deadline = time.monotonic() + start_seconds
    while True:
        if process.poll() is not None:
            raise ServerError(f"the Prefect server ended with status {process.returncode}; {_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the Prefect server gave no answer within {start_seconds:.0f} s; {_tail(log)}")
        try:
            if _request_json(health_url) is True:
                return
        except (OSError, ValueError):
            time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # does nothing to a child that has ended, so a reused pid is never hit
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _settle(api_url: str) -> None:
    """Send what this process holds back, then wait until the server's count of ended task runs stands still."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SETTLE_SECONDS)
    EventsWorker.drain_all(timeout=SETTLE_SECONDS)
    if LOOPBACK not in api_url:
        return  # a server that others use, too, never stands still, and nobody is about to stop it
    ended = {"task_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}}}
    deadline = time.monotonic() + SETTLE_SECONDS
    last: object = None
    while time.monotonic() < deadline:
        try:
            count = _request_json(f"{api_url}/task_runs/count", post=ended)
        except (OSError, ValueError):
            return  # the server is gone: there is nothing left to wait for
        if count == last:
            return
        last = count
        time.sleep(SETTLE_POLL_SECONDS)


def _request_json(url: str, post: Mapping[str, object] | None = None) -> object:
    body = None if post is None else json.dumps(post).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    # No proxies: the address is ours, and an HTTP_PROXY of the environment would not find it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5.0) as answer:
        return json.loads(answer.read())


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"the end of its log, {log}:\n{text}" if text else f"its log, {log}, is empty"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A loopback port that nobody else is given while the block runs.

    Bound with SO_REUSEADDR but not listening: the server, which binds so too, may take it; a search for a free port
    passes it by.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _put_environment(values)
    try:
        yield
    finally:
        _put_environment(before)


def _put_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _no_proxy(api_url: str) -> dict[str, str | None]:
    """Prefect's client obeys HTTP_PROXY even for a server on this machine; NO_PROXY takes loopback out."""
    if LOOPBACK not in api_url:
        return {}
    return {name: ",".join(filter(None, (os.environ.get(name, ""), LOOPBACK))) for name in ("NO_PROXY", "no_proxy")}
