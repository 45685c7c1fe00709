"""Keeps the services of one machine alive: what ends is started again, more slowly each time.

Services are watched by pid and start time, not as children, so a supervisor that takes over from one that was killed
watches what that one had started.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from flows.ops.processes import (
    FLOW_RUN_ENV,
    ProcessIdentity,
    kill_all,
    process_environment,
    processes_of_up,
    reap,
    spawn,
    terminate_all,
)
from flows.ops.reconcile import reconcile, reschedule_crashed_runs
from flows.ops.services import ServiceSpec, client_environment, is_free, services, worker_name
from flows.ops.state import UpError, UpState, forget_state, save_state

TICK_SECONDS = 1.0
BRING_BACK_SECONDS = 30.0
"""Between two looks at runs that crashed and that no automation brought back."""
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""Who lives so long has started well: its next end is the first again."""
FLOW_GRACE_SECONDS = 30.0
"""How long a flow may take to leave its run: the engine checkpoints what it holds of it."""
LOG_TAIL = 3000

Say = Callable[[str], None]


@dataclass
class Backoff:
    """How long to wait before the next start: doubled with each end that comes soon after a start."""

    ends: int = 0
    not_before: float = 0.0

    def ended(self, now: float, lived_seconds: float) -> float:
        self.ends = 1 if lived_seconds >= STEADY_SECONDS else self.ends + 1
        wait = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (self.ends - 1))
        self.not_before = now + wait
        return wait


@dataclass
class Supervisor:
    """`start`, then `watch` until `stop` is set, then `close`. `state` is what the file says, at any moment."""

    home: Path
    state: UpState
    say: Say
    deploy: Callable[[UpState], None]
    """Tells the Prefect server of the work pool, the deployments and what they use."""
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.services = services(self.state, self.home)
        self._backoff = {service.name: Backoff() for service in self.services}
        self._lost_worker = not self._alive("worker")  # runs may wait for a worker that an earlier life lost
        self._seen: set[str] = set()
        self._brought_back = time.monotonic()
        self._save(supervisor=ProcessIdentity.of(psutil.Process().pid), ready=False)

    def start(self) -> None:
        """All services, each once those it needs answer; adopts what lives. Raises UpError."""
        for service in self.services:
            if self._alive(service.name):
                self.say(f"{service.name} runs already (pid {self.state.services[service.name].pid})")
            elif service.name == "server" and not is_free(self.state.options.port):
                raise UpError(
                    f"port {self.state.options.port} of 127.0.0.1 is in use by another program; end it, or give --port"
                )
        by_name = {service.name: service for service in self.services}
        for batch in (("s3",), ("server", "engine")):
            for name in batch:
                if name in by_name and not self._alive(name):
                    self._spawn(by_name[name])
            for name in batch:
                if name in by_name and name != "engine":
                    self._wait(by_name[name])
        self.deploy(self.state)
        if not self._alive("worker"):
            self._find_lost_runs()
            self._spawn(by_name["worker"])
        for name in ("engine", "worker"):
            self._wait(by_name[name])
        self._save(ready=True)

    def watch(self) -> None:
        """Until `stop` is set: looks every second, and starts again what has ended."""
        while not self.stop.wait(TICK_SECONDS):
            for service in self.services:
                self._look(service)
            if time.monotonic() - self._brought_back > BRING_BACK_SECONDS:
                self._bring_back()

    def close(self) -> None:
        """Ends everything: first the flows, which leave their runs and go on at the next start; then the services."""
        try:
            if self._alive("worker"):
                # SIGKILL: on SIGTERM the worker would kill its flows before they have left their runs
                kill_all(filter(None, [self.state.services["worker"].process()]))
            self._lost_worker = True
            self._find_lost_runs()
        finally:
            for service in reversed(self.services):
                mark = self.state.services.get(service.name)
                if mark is not None:
                    terminate_all(filter(None, [mark.process()]), grace_seconds=service.grace_seconds)
                    reap(mark)
            terminate_all(processes_of_up(self.state.id), grace_seconds=10.0)
            forget_state(self.home)

    def _look(self, service: ServiceSpec) -> None:
        if self._alive(service.name):
            return
        now, backoff = time.time(), self._backoff[service.name]
        mark = self.state.services.get(service.name)
        if mark is not None:
            reap(mark)
            wait = backoff.ended(now, now - mark.created)
            self.say(f"{service.name} (pid {mark.pid}) has ended; it is started again in {wait:.0f} s")
            self._forget(service.name)
            if service.name == "worker":
                self._lost_worker = True
        if service.name == "worker" and self._lost_worker:
            self._find_lost_runs()
        if now < backoff.not_before or self._lacks(service) or self.stop.is_set():
            return
        self._spawn(service)
        restarts = self.state.restarts | {service.name: self.state.restarts.get(service.name, 0) + 1}
        self._save(restarts=restarts)

    def _lacks(self, service: ServiceSpec) -> bool:
        needed = [other for other in self.services if other.name == service.needs]
        return not all(self._alive(other.name) and other.healthy() for other in needed)

    def _find_lost_runs(self) -> None:
        """The worker is gone: its flows, which nobody can cancel any more, are asked to leave their runs, and the
        server is told that these wait. Where the server is away, it is told later."""
        flows = [process for process in processes_of_up(self.state.id) if FLOW_RUN_ENV in process_environment(process)]
        self._seen |= {process_environment(process).get(FLOW_RUN_ENV, "") for process in flows}
        pids = {process.pid for process in flows}
        terminate_all((process for process in flows if _parent(process) not in pids), grace_seconds=FLOW_GRACE_SECONDS)
        kill_all(flows)
        try:
            said = reconcile(
                self.state.api_url, self.state.options.pool, worker=worker_name(self.state), seen=self._seen
            )
        except httpx.HTTPError as error:
            self.say(f"the server is not told yet of the runs that the worker left: {error!r}")
            return
        self._lost_worker, self._seen = False, set()
        for line in said:
            self.say(line)

    def _bring_back(self) -> None:
        """Where the server is away, later."""
        self._brought_back = time.monotonic()
        if not self._alive("server") or not self._alive("worker"):
            return
        try:
            said = reschedule_crashed_runs(self.state.api_url, self.state.options.pool)
        except httpx.HTTPError:
            return
        for line in said:
            self.say(line)

    def _spawn(self, service: ServiceSpec) -> None:
        mark = spawn(service.command, environment=service.environment, log=self._log(service), folder=Path.cwd())
        self._save(services=self.state.services | {service.name: mark})
        self.say(f"{service.name} is started (pid {mark.pid})")

    def _wait(self, service: ServiceSpec) -> None:
        deadline = time.monotonic() + service.start_seconds
        while not service.healthy():
            if self.stop.is_set():
                raise UpError("stopped while it was starting")
            if not self._alive(service.name):
                raise UpError(f"{service.name} ended while it was starting; {tail(self._log(service))}")
            if time.monotonic() > deadline:
                raise UpError(
                    f"{service.name} gave no answer within {service.start_seconds:.0f} s; {tail(self._log(service))}"
                )
            self.stop.wait(0.2)

    def _alive(self, name: str) -> bool:
        mark = self.state.services.get(name)
        return mark is not None and mark.alive

    def _forget(self, name: str) -> None:
        self._save(services={other: mark for other, mark in self.state.services.items() if other != name})

    def _save(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)
        save_state(self.home, self.state)

    def _log(self, service: ServiceSpec) -> Path:
        return self.home / f"{service.name}.log"


def deploy_by_command(state: UpState) -> None:
    """Runs `ostinato deploy` against the server of this `up`, in a process of its own: Prefect's import stays there.
    Raises UpError."""
    command = [
        sys.executable, "-m", "flows.cli.main", "deploy", "--pool", state.options.pool,
        "--storage", state.options.storage, "--engine", state.engine_url,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=client_environment(state), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UpError(f"the deployments could not be made:\n{(done.stderr or done.stdout).strip()[-LOG_TAIL:]}")


def tail(log: Path) -> str:
    """The end of a log, for an error."""
    text = log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"the end of its log, {log}:\n{text}" if text else f"its log, {log}, is empty"


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0
