"""The state of `ostinato up` between commands: a JSON file under .ostinato/up that only its owner can read."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.ops.processes import ProcessIdentity
from storage.serialization import Frozen

HOME = Path(".ostinato") / "up"
"""Folder of the state, relative to the working directory."""
TOKEN_ENV = "OSTINATO_ENGINE_TOKEN"
"""Environment variable with the engine's token, in every process that uses the engine of an `up`."""
TOKEN_FILE_ENV = "OSTINATO_ENGINE_TOKEN_FILE"
"""Environment variable with the path of the file that holds this token, in the flow runs of an `up`. Their logs name
the file, because the variable with the token is not set in a user's shell."""


class UpError(RuntimeError):
    """A service did not start, or the state is not usable. The message says what to do."""


class UpOptions(Frozen):
    """The options of `ostinato up`. A second `up` with other options is refused while the first one runs."""

    storage: str
    """Url of the store that flows and engine use."""
    with_s3: bool = False
    """Whether an S3 server is started for the artifacts."""
    database: str = ""
    """SQLAlchemy url of Prefect's database. Empty: a SQLite file in the folder of the state."""
    port: int = 4200
    """Port of the Prefect server and its UI."""
    engine_config: str = ""
    """Path of the engine's config file. Empty: the defaults."""
    pool: str = "ostinato"
    """Name of the Prefect work pool."""

    def differences(self, other: UpOptions) -> list[str]:
        """Returns a line `name: this -> other` for each option that differs. The database url is not shown."""
        others = other.model_dump()
        lines = []
        for name, value in self.model_dump().items():
            if value == others[name]:
                continue
            # the url of the database may contain a password
            lines.append(f"{name}: changed" if name == "database" else f"{name}: {value!r} -> {others[name]!r}")
        return lines


class Ports(Frozen):
    """Loopback ports of the services. They stay the same when a service restarts."""

    engine: int
    worker: int
    """Port of the worker's health check."""
    page: int = 0
    s3: int = 0
    master: int = 0
    volume: int = 0
    filer: int = 0


class UpState(Frozen):
    """One `ostinato up`: its options, its ports, its secrets and its processes."""

    id: str
    """Random id. All processes of this `up` have it in their environment."""
    options: UpOptions
    ports: Ports
    token: str
    """The engine's bearer token."""
    s3_key: str = ""
    s3_secret: str = ""
    supervisor: ProcessIdentity | None = None
    services: dict[str, ProcessIdentity] = {}
    """The running process of each service, by name."""
    restarts: dict[str, int] = {}
    """How often each service was restarted, by name."""
    ready: bool = False
    """Whether all services answer and all deployments were made."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.options.port}"

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.engine}"

    @property
    def page_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.page}"

    @property
    def worker_health_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.worker}/health"

    @property
    def s3_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.s3}"


def load_state(home: Path) -> UpState | None:
    """Returns the state in a folder, or None if there is none. Raises UpError if it cannot be read."""
    path = state_file(home)
    try:
        return UpState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UpError(
            f"{path} is not a state of 'ostinato up': {error.errors()[0]['msg']}; if none of its processes is running, "
            "remove the file"
        ) from error


def save_state(home: Path, state: UpState) -> None:
    """Replaces the state file. Only its owner may read it."""
    write_private(state_file(home), json.dumps(state.model_dump(mode="json"), indent=1))


def forget_state(home: Path) -> None:
    """Removes the state and its secrets. Prefect's history, the S3 server's artifacts and the logs stay."""
    for path in (state_file(home), token_file(home)):
        path.unlink(missing_ok=True)


def token_file(home: Path) -> Path:
    """Returns the path of the file from which the engine reads its token."""
    return home / "engine-token"


def state_file(home: Path) -> Path:
    return home / "state.json"


def write_private(path: Path, text: str) -> None:
    """Writes a file with mode 0600. The file is replaced as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # written completely under another name, and then renamed
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def supervising(home: Path) -> Iterator[bool]:
    """Takes the supervisor's lock of the folder within the block; yields False if another process holds it.

    The kernel releases the lock when the process ends for any reason.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def status(state: UpState) -> dict[str, dict[str, Any]]:
    """Returns pid, liveness and number of restarts of the supervisor and of each service, by name."""
    # the supervisor comes first
    processes = dict(state.services)
    if state.supervisor is not None:
        processes = {"supervisor": state.supervisor} | processes
    return {
        name: {"pid": process.pid, "alive": process.alive, "restarts": state.restarts.get(name, 0)}
        for name, process in processes.items()
    }
