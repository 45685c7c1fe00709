"""Runs a Prefect server within a block, so that a run on one machine has a UI and a history.

Without a configured server Prefect starts an ephemeral one, which loses most of its data when the process ends. Prefect
is imported only where it is used, because its import takes seconds.
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

from flows.ops.processes import open_log
from tasks.child_process import DIE_WITH_PARENT, LOOPBACK, no_proxy_with_loopback

SERVER_HOME = Path(".ostinato") / "prefect"
"""Folder of the database of a server that a command or a recipe starts, relative to the working directory: it shows
earlier runs, too."""
STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL to the server."""
SETTLE_SECONDS = 15.0
"""Longest wait until the server has stored the events that it was sent."""
LOG_TAIL_BYTES = 4000
BATCH_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
}
"""Settings that make the server write many rows in one transaction. By default every task run is a transaction. Batches
need a third of the server's CPU time, and other requests no longer fail because SQLite is locked."""
SETTLE_POLL_SECONDS = 2.0
"""Longer than the flush interval, so that a batch that is not written yet does not look like the end."""


class ServerError(RuntimeError):
    """The Prefect server did not start or did not answer. The message contains the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerHandle:
    """A server that is ready."""

    api_url: str  # the value for PREFECT_API_URL; ends in /api
    ui_url: str
    pid: int


@contextmanager
def local_prefect_server(home: Path, *, start_seconds: float = 120.0) -> Iterator[ServerHandle]:
    """Starts `prefect server` on a free loopback port, and stops it at the end of the block.

    Its database and log are in `home`, so that a later server with the same home shows the earlier runs. Several
    servers may run at once, also with one home. The environment of this process is not changed: see `use_server`. On
    Linux the server is killed when this process ends for any reason. Linux counts the end of the starting thread as
    the end of the process, so enter the block in a thread that outlives it.

    Raises ServerError if the server ends, or does not answer within `start_seconds`.
    """
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    # two servers that start in a new home would both create the tables, so the second one waits for the first
    with locked(home / "start.lock"), _reserved_port() as port:
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
    """Makes the flows of this process and of its children report to the server at `api_url`.

    Prefect reports task runs in the background, and a server that is stopped too early loses the last of them. So the
    end of the block sends the remaining data and, if the server is on this machine, waits at most `SETTLE_SECONDS`
    until the server has stored it.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with environment_variables(PREFECT_API_URL=api_url, DO_NOT_TRACK="1", **_no_proxy(api_url)):
            # a thread without a copy of our context uses the global settings, which Prefect read when it was imported;
            # a flow in such a thread would start an ephemeral server
            refresh_global_settings_context()
            with temporary_settings({PREFECT_API_URL: api_url}):
                try:
                    yield
                finally:
                    # in a thread, because Prefect's drain functions return coroutines while an event loop runs
                    settling = threading.Thread(target=_settle, args=(api_url,), name="settle-prefect-server")
                    settling.start()
                    settling.join()
    finally:
        refresh_global_settings_context()


def _spawn(home: Path, log: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = ["-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]
    # the bootstrap program makes the server end with this process, and then becomes the server
    with open_log(log) as output:
        return subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *arguments],
            # away from a prefect.toml or .env of the working directory
            cwd=home,
            env=server_environment(home, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends the run, whose end the server must still record
            start_new_session=True,
        )


def server_environment(home: Path, port: int, *, database: str = "") -> dict[str, str]:
    """Returns the environment of a Prefect server on this machine that sends no data elsewhere.

    `database` is a SQLAlchemy url. If it is empty, the database is a SQLite file in `home`.
    """
    # settings of clients would make the server talk to another server
    client_side = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_DATABASE_CONNECTION_URL")
    inherited = {name: value for name, value in os.environ.items() if name not in client_side}
    return BATCH_SETTINGS | inherited | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database or f"sqlite+aiosqlite:///{home / _database_name()}",
        "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{port}/api",  # default: port 4200
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # v2 calls an analytics host on every load, v1 does not
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _database_name() -> str:
    """The database file of this version of Prefect, which cannot read a database that a newer version has migrated."""
    return f"prefect-{version('prefect')}.db"


def _wait_until_healthy(process: subprocess.Popen[bytes], health_url: str, log: Path, *, start_seconds: float) -> None:
    """Returns when the server answers. Raises ServerError if it ends or takes too long."""
    deadline = time.monotonic() + start_seconds
    # the process is checked first: one that has ended never answers
    while True:
        if process.poll() is not None:
            raise ServerError(f"the Prefect server ended with status {process.returncode}; {log_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the Prefect server gave no answer within {start_seconds:.0f} s; {log_tail(log)}")
        try:
            if request_json(health_url) is True:
                return
        except (OSError, ValueError):
            time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # does nothing if the child has ended, so a reused pid is safe
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _settle(api_url: str) -> None:
    """Sends the buffered logs and events, then waits until the server's count of ended task runs stays the same."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SETTLE_SECONDS)
    EventsWorker.drain_all(timeout=SETTLE_SECONDS)
    if LOOPBACK not in api_url:
        # a shared server is not about to be stopped, and its count never stays the same
        return
    # task runs are stored in batches: two equal counts, more than a flush interval apart, mean that all are stored
    ended_runs = {"task_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}}}
    deadline = time.monotonic() + SETTLE_SECONDS
    last_count: object = None
    while time.monotonic() < deadline:
        try:
            count = request_json(f"{api_url}/task_runs/count", post=ended_runs)
        except (OSError, ValueError):
            # the server has ended, so there is nothing to wait for
            return
        if count == last_count:
            return
        last_count = count
        time.sleep(SETTLE_POLL_SECONDS)


def request_json(url: str, post: Mapping[str, object] | None = None) -> object:
    """Sends a GET, or a POST with a JSON body, and returns the JSON reply. Raises OSError, ValueError."""
    # urllib instead of httpx, so that this module is imported quickly
    body = None if post is None else json.dumps(post).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    # without the environment's proxies, which cannot reach a loopback address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5.0) as answer:
        return json.loads(answer.read())


def log_tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"the end of its log, {log}:\n{text}" if text else f"its log, {log}, is empty"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a free loopback port within the block.

    The port is bound with SO_REUSEADDR and does not listen. So the server, which uses SO_REUSEADDR too, can bind it,
    while a search for a free port does not return it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((LOOPBACK, 0))
        yield reservation.getsockname()[1]


@contextmanager
def environment_variables(**values: str | None) -> Iterator[None]:
    """Sets environment variables within the block. The value None removes a variable."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _no_proxy(api_url: str) -> dict[str, str | None]:
    """Excludes loopback from proxies, because Prefect's client uses HTTP_PROXY even for a server on this machine."""
    if LOOPBACK not in api_url:
        return {}
    return {name: no_proxy_with_loopback(name) for name in ("NO_PROXY", "no_proxy")}
