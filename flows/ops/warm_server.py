"""Keeps the Prefect server of a folder running between commands, so that the next one does not wait for its start.

The server belongs to a process of its own, the keeper (`python -m flows.ops.warm_server HOME`), which any command may
start. Each user of the server holds a shared lock on a file, which the system releases however the user ends. When no
process has held it for `IDLE_SECONDS_ENV` seconds, the keeper stops the server and ends.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.ops.local_server import ServerError, ServerHandle, local_prefect_server, locked, log_tail
from flows.ops.processes import ProcessIdentity, open_log

IDLE_SECONDS_ENV = "OSTINATO_SERVER_IDLE_SECONDS"
"""Environment variable: seconds for which a server without users is kept. 0: it ends with its last user."""
IDLE_SECONDS = 600.0
POLL_SECONDS = 0.25
START_SECONDS = 120.0
USERS = "users.lock"
KEEPER_LOG = "keeper.log"


@contextmanager
def warm_prefect_server(home: Path) -> Iterator[ServerHandle]:
    """Uses the running server of `home` within the block, or starts one that later blocks and processes use too.

    Raises ServerError if a new server ends, or does not answer within `START_SECONDS`.
    """
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    with (home / USERS).open("ab") as users:
        # waits while a keeper decides to end, so that no user gets a server that is about to stop
        fcntl.flock(users, fcntl.LOCK_SH)
        # of two commands that start at once, one starts the server
        with locked(home / "keeper.lock"):
            handle = _running_server(home) or _start_keeper(home)
        yield handle


def _running_server(home: Path) -> ServerHandle | None:
    """The server of a living keeper. It is not asked whether it is well: a busy server that others use may be slow."""
    state = _read_state(home)
    if state is None or not ProcessIdentity.model_validate(state["keeper"]).alive:
        return None
    return ServerHandle(**state["server"])


def _state_file(home: Path) -> Path:
    """The file that tells of the server of this version of Prefect, as each version has a database of its own."""
    return home / f"server-{version('prefect')}.json"


def _read_state(home: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(_state_file(home).read_text()))
    except FileNotFoundError:
        return None


def _start_keeper(home: Path) -> ServerHandle:
    log = home / KEEPER_LOG
    with open_log(log) as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "flows.ops.warm_server", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends the command, not the server
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        handle = _running_server(home)
        if handle is not None:
            return handle
        if keeper.poll() is not None:
            ending = f"the keeper of the Prefect server ended with status {keeper.returncode}"
            raise ServerError(f"{ending}; {log_tail(log)}")
        time.sleep(POLL_SECONDS)
    keeper.terminate()
    raise ServerError(f"the Prefect server gave no answer within {START_SECONDS:.0f} s; {log_tail(log)}")


def keep_server(home: Path, idle_seconds: float) -> None:
    """Runs the server of `home` until no process has used it for `idle_seconds`, it dies, or its state file is gone."""
    state_file = _state_file(home)
    with (home / USERS).open("ab") as users, local_prefect_server(home, start_seconds=START_SECONDS) as server:
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process has a start time"
        state = {"server": dataclasses.asdict(server), "keeper": identity.model_dump()}
        temporary = state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(state_file)
        process = ProcessIdentity.of(server.pid)
        used = time.monotonic()
        try:
            while process is not None and process.alive and state_file.exists():
                time.sleep(POLL_SECONDS)
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    used = time.monotonic()
                    continue
                # without the file, a user that waits for the lock starts another server
                if time.monotonic() - used >= idle_seconds:
                    state_file.unlink(missing_ok=True)
                fcntl.flock(users, fcntl.LOCK_UN)
        finally:
            # also on SIGTERM: no user gets a server that is about to stop
            if _read_state(home) == state:
                state_file.unlink(missing_ok=True)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    keep_server(Path(sys.argv[1]), float(os.environ.get(IDLE_SECONDS_ENV, IDLE_SECONDS)))
