"""What `ostinato up` knows between calls: one JSON file, which only its owner can read, under .ostinato/up."""

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
"""Within the working directory."""


class UpError(RuntimeError):
    """A service did not come up, or the state is not usable. The message says what to do."""


class UpOptions(Frozen):
    """What a person chose: a second `up` with other choices is refused, not obeyed by half."""

    storage: str
    """The url that flows and engine use."""
    with_s3: bool = False
    database: str = ""
    """SQLAlchemy url of Prefect's database. Empty: SQLite in the state's folder."""
    port: int = 4200
    """Of the Prefect server, and of the one page to open."""
    engine_config: str = ""
    """File of the engine's keys."""
    pool: str = "ostinato"
    """Prefect work pool."""

    def differences(self, other: UpOptions) -> list[str]:
        """`name: this -> other`, without what may hold a password."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [
            f"{name}: changed" if name == "database" else f"{name}: {mine[name]!r} -> {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        ]


class Ports(Frozen):
    """Loopback ports; kept over restarts, so that what runs finds what was restarted."""

    engine: int
    worker: int
    """Where the worker answers whether it is well."""
    s3: int = 0
    master: int = 0
    volume: int = 0
    filer: int = 0


class UpState(Frozen):
    """One `up`: what it was asked for, where it listens, who runs."""

    id: str
    options: UpOptions
    ports: Ports
    token: str
    """The engine's bearer token."""
    s3_key: str = ""
    s3_secret: str = ""
    supervisor: ProcessIdentity | None = None
    services: dict[str, ProcessIdentity] = {}
    restarts: dict[str, int] = {}
    ready: bool = False
    """Whether all that was asked for answers and all deployments were made."""

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
    def s3_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.s3}"


def load_state(home: Path) -> UpState | None:
    """The state in that folder, or None where there is none. Raises UpError for one that cannot be read."""
    path = state_file(home)
    try:
        return UpState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UpError(
            f"{path} is not a state of `ostinato up`: {error.errors()[0]['msg']}; if none of its processes runs any "
            "more, remove the file"
        ) from error


def save_state(home: Path, state: UpState) -> None:
    """Replaces the file as a whole; only its owner may read it."""
    write_private(state_file(home), json.dumps(state.model_dump(mode="json"), indent=1))


def forget_state(home: Path) -> None:
    """Removes the state and its secrets; Prefect's history, the artifacts of an S3 server and the logs stay."""
    for path in (state_file(home), token_file(home)):
        path.unlink(missing_ok=True)


def token_file(home: Path) -> Path:
    """Where the engine reads its token."""
    return home / "engine-token"


def state_file(home: Path) -> Path:
    return home / "state.json"


def write_private(path: Path, text: str) -> None:
    """Writes with mode 0600, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
    """Whether this process is the one supervisor of the folder, for as long as the block runs. The kernel gives the
    lock back however the process ends."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def status(state: UpState) -> dict[str, dict[str, Any]]:
    """Each service by name: pid, whether it lives, how often it was started again."""
    marks = dict(state.services)
    if state.supervisor is not None:
        marks = {"supervisor": state.supervisor} | marks
    return {
        name: {"pid": mark.pid, "alive": mark.alive, "restarts": state.restarts.get(name, 0)}
        for name, mark in marks.items()
    }
