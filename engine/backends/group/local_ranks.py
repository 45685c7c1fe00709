"""The rank processes of one node and one generation: spawned, watched, and killed to the last descendant.

One thread spawns them and lives until all have ended, because Linux sends a child's death signal when the thread that
forked it ends. One more thread per rank reads its pipe, and one its log, so that no rank can hold up the watching one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import IO

import psutil

from engine.backends.group import messages
from engine.backends.group.messages import (
    CLOSE_SECONDS,
    CUT_OFF,
    PIPE_ENV,
    TOKEN_ENV,
    Launch,
    MasterAt,
    Message,
    RankDeath,
)
from engine.backends.group.progress import Activity, ProgressFile

output_of_ranks = logging.getLogger(__name__)

LOG_LINES = 40
STACK_SECONDS = 0.5
"""How long a hung rank has to write its stacks down."""
DRAIN_SECONDS = 2.0
"""How long to wait for the last words of a rank that has ended."""
CULPRIT_SECONDS = 2.0
"""Ranks that lost another one may be seen to end before it."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a rank."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class NotSpawned:
    """The system did not start a process."""

    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """Ranks ended by themselves; the others of this node are gone too by now."""

    deaths: tuple[RankDeath, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """How far the ranks are, a few times per second."""

    activities: tuple[Activity, ...]


Event = Said | NotSpawned | Died | Tick


class _Rank:
    """One process, its pipe and its log."""

    def __init__(self, launch: Launch, progress: ProgressFile, env: Mapping[str, str]) -> None:
        self.number = launch.rank
        self.pipe, theirs = Pipe()
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        fds = (theirs.fileno(), progress.fileno())
        own = {PIPE_ENV: f"{fds[0]},{fds[1]}", "RANK": str(launch.rank), "LOCAL_RANK": str(launch.local_rank)}
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.backends.group.rank"],
                env={**env, **own},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.logger = threading.Thread(target=self._read_log, args=(self.process.stdout,), daemon=True)
        self.logger.start()
        self.reader: threading.Thread | None = None
        self._launch = launch

    def greet(self) -> None:
        """Blocks until a rank that is told much has imported torch. One that is gone is the keeper's business."""
        with suppress(OSError):
            messages.send(self.pipe, self._launch)

    def listen(self, on_event: Callable[[Event], None], on_end: Callable[[], None]) -> None:
        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    on_event(Said(self.number, messages.receive(self.pipe)))
            on_end()

        reader = threading.Thread(target=read, name=f"rank-{self.number}", daemon=True)
        reader.start()
        self.reader = reader  # started: `drain` joins it

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                self.log.append(line)
                output_of_ranks.warning("[rank %d] %s", self.number, line)

    def ended(self) -> bool:
        """Looks without reaping: until then nobody else gets its pid, which names what it started too."""
        with self._lock:
            if self.process.returncode is not None:
                return True
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stopped(self) -> bool:
        """By SIGSTOP or a debugger (Linux)."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def signal(self, number: int) -> None:
        """To the rank alone."""
        with self._lock:
            if self.process.returncode is None:
                os.kill(self.process.pid, number)

    def finish(self) -> int:
        """Kills it and all that it started, waits, and returns what `subprocess` calls the return code."""
        with self._lock:
            if self.process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()

    def drain(self, seconds: float) -> None:
        """Its last message is handled and its last line read."""
        for thread in (self.reader, self.logger):
            if thread is not None and thread is not threading.current_thread():
                thread.join(seconds)


class LocalRanks:
    """The ranks of `launches`, from the call of `start` on. `on_event` runs in several threads; it must not block."""

    def __init__(
        self,
        launches: Sequence[Launch],
        env: Mapping[str, str],
        on_event: Callable[[Event], None],
        *,
        tick_seconds: float,
        address: str,
    ) -> None:
        """`address`: this node's, which the other nodes reach."""
        self._launches = launches
        self._env = rank_env(env, launches[0], address)
        self._on_event = on_event
        self._tick_seconds = tick_seconds
        self._ranks: list[_Rank] = []
        self._progress = ProgressFile.create(len(launches))
        self._expected = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._spawned = threading.Event()
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="group-keeper", daemon=True)
        self._starting = threading.Lock()

    def start(self) -> None:
        """Spawns them in a thread; without effect after `kill`."""
        with self._starting:
            if not self._stopping.is_set():
                self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank.number: rank.process.pid for rank in self._ranks}

    def send_bytes(self, rank: int, data: bytes) -> None:
        """Raises OSError when the rank is gone."""
        self._ranks[rank - self._launches[0].rank].pipe.send_bytes(data)

    def announce(self, master: MasterAt) -> None:
        """To all but rank 0, which has said it. One that is gone is the keeper's business."""
        self._greeted.wait()
        for rank in self._ranks:
            if rank.number:
                with suppress(OSError):
                    messages.send(rank.pipe, master)

    def logs(self) -> dict[int, tuple[str, ...]]:
        """The last lines of each rank."""
        return {rank.number: tuple(rank.log) for rank in self._ranks}

    def dump_stacks(self) -> None:
        """Every rank writes its stacks to its log; one that is stopped cannot."""
        for rank in self._ranks:
            rank.signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)

    def expect_end(self, expected: bool = True) -> None:
        """The ranks are told to end: one that does has not died, and `kill` gives them CLOSE_SECONDS."""
        self._expected = expected

    def kill(self) -> None:
        """Everything that this node's ranks are and have started is gone when it returns. May be called again."""
        with self._starting:
            self._stopping.set()
            if self._thread.ident is None:
                return  # never started
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._expected and time.monotonic() < deadline and not all(rank.ended() for rank in self._ranks):
            time.sleep(0.02)
        self._wake.set()
        self._spawned.wait()
        for rank in self._ranks:
            rank.finish()
        for rank in self._ranks:
            rank.drain(DRAIN_SECONDS)
        if self._thread is not threading.current_thread():
            self._thread.join(DRAIN_SECONDS)

    def _keep(self) -> None:
        try:
            try:
                self._spawn()
            finally:
                self._spawned.set()
            self._greet()
            while not self._stopping.is_set():
                self._wake.wait(self._tick_seconds)
                self._wake.clear()
                if not self._stopping.is_set():
                    self._look()
        except OSError as error:
            self.kill()
            self._on_event(NotSpawned(f"{type(error).__name__}: {error}"))
        finally:
            self._greeted.set()
            self.kill()  # also: waits for the one that does, since their death signal hangs on this thread
            for rank in self._ranks:
                rank.pipe.close()
            self._progress.close()

    def _spawn(self) -> None:
        for launch in self._launches:
            if not self._stopping.is_set():
                self._ranks.append(_Rank(launch, self._progress, self._env))

    def _greet(self) -> None:
        """All of them, before any is heard: what rank 0 says next is sent to the others over the same pipes."""
        for rank in self._ranks:
            rank.greet()
        self._greeted.set()
        for rank in self._ranks:
            rank.listen(self._on_event, self._wake.set)

    def _look(self) -> None:
        dead = [rank for rank in self._ranks if rank.ended()]
        if not dead or self._expected:
            self._on_event(Tick(self._activities()))
            return
        codes = {rank.number: rank.finish() for rank in dead}
        deadline = time.monotonic() + CULPRIT_SECONDS
        while set(codes.values()) == {CUT_OFF} and len(codes) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            codes |= {rank.number: rank.finish() for rank in self._ranks if rank.number not in codes and rank.ended()}
        self.kill()
        logs = self.logs()
        self._on_event(Died(tuple(RankDeath(number, code, logs[number]) for number, code in codes.items())))

    def _activities(self) -> tuple[Activity, ...]:
        seen = [
            Activity(rank.number, *self._progress.read(slot), stopped=rank.stopped())
            for slot, rank in enumerate(self._ranks)
        ]
        return tuple(seen)  # one made of a generator grows, and CPython fails where gc.get_objects lists it meanwhile


def rank_env(env: Mapping[str, str], first: Launch, address: str) -> dict[str, str]:
    """What the ranks' processes see: this process's environment, `env` over it, never the group's token."""
    merged = {
        # each rank has its share of the cores: a pool of all cores per rank makes every rank slow
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // first.local_world_size)),
        **interface_env(address),
        **os.environ,
        **env,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "PYTHONUNBUFFERED": "1",
        "WORLD_SIZE": str(first.world_size),
        "LOCAL_WORLD_SIZE": str(first.local_world_size),
    }
    merged.pop(TOKEN_ENV, None)
    return merged


def interface_env(address: str) -> dict[str, str]:
    """Gloo would take the address that the host's name resolves to, on many machines one that others cannot reach."""
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(address, None)}
    except OSError:
        wanted = set()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address in wanted for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}
