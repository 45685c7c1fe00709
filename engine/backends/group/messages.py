"""What a rank process and the process that started it tell each other, pickled, over a pipe that only they hold."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PIPE_ENV = "OSTINATO_GROUP_PIPE"
"""File descriptors of a rank: its pipe and its node's progress file, as "3,4"."""
TOKEN_ENV = "OSTINATO_GROUP_TOKEN"
CLOSE_SECONDS = 10.0
"""How long the ranks may take to close what they hold, before they are killed."""
CUT_OFF = 75
"""Exit status of a rank that lost the others: not the one to blame. EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message to a rank: who it is and what it builds."""

    target: str
    options: dict[str, Any]
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_host: str
    """Where rank 0 opens the store of torch.distributed."""
    start_seconds: float
    collective_seconds: float
    """How long one collective may take: longer than the watchdog waits, so that the watchdog speaks first."""


@dataclass(frozen=True, slots=True)
class MasterAt:
    """Where the ranks meet: rank 0 tells its parent, which tells everyone else."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has built its object."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The rank could not build its object; it ends."""

    error: Exception
    """An EngineError as it was raised; anything else as a PermanentEngineError that describes it."""
    on_purpose: bool
    """It was an EngineError: the same start fails again."""


@dataclass(frozen=True, slots=True)
class Call:
    """To rank 0: run this method on every rank. No bytes at all instead of a call: end."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progressed:
    """Rank 0 called `progress()` during a call."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, from rank 0."""

    result: bytes = b""
    """Rank 0's result, pickled; empty when any rank failed."""
    errors: tuple[tuple[int, Exception], ...] = ()
    """(rank, error) of every rank that failed, by rank."""


Message = Launch | MasterAt | Ready | StartFailed | Call | Progressed | Outcome


def send(pipe: Connection, message: Message) -> None:
    """Raises OSError when the other side is gone."""
    pipe.send_bytes(pickle.dumps(message, protocol=5))


def receive(pipe: Connection) -> Any:
    """Raises EOFError or OSError when the other side is gone."""
    return pickle.loads(pipe.recv_bytes())


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A rank process that ended by itself."""

    rank: int
    returncode: int
    """As subprocess has it: minus the signal, or the exit status."""
    log: tuple[str, ...] = ()
    """Its last lines."""

    @property
    def to_blame(self) -> bool:
        return self.returncode != CUT_OFF

    def describe(self) -> str:
        if self.returncode == CUT_OFF:
            return f"rank {self.rank} lost the other ranks"
        if self.returncode >= 0:
            return f"rank {self.rank} exited with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        hint = " (if nobody sent it, memory ran out: see the kernel's log)" if name == "SIGKILL" else ""
        return f"rank {self.rank} was killed by {name}{hint}"


def blame(deaths: list[RankDeath]) -> str:
    """Who died of what, those to blame first, with the last log lines of the first."""
    ordered = sorted(deaths, key=lambda death: (not death.to_blame, death.returncode >= 0, death.rank))
    culprits = [death for death in ordered if death.to_blame] or ordered
    said = "; ".join(death.describe() for death in culprits)
    return said + log_tail(culprits[0].rank, culprits[0].log)


def log_tail(rank: int, lines: tuple[str, ...]) -> str:
    return f"\nlast lines of rank {rank}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
