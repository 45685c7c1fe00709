"""Starts the services of `ostinato up` and restarts those that end, after an increasing delay.

Services are identified by pid and start time and need not be children of this process. So a supervisor that replaces a
killed one takes over its services.
"""

from __future__ import annotations

import re
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
    rotate_log,
    run_and_follow,
    spawn,
    terminate_all,
)
from flows.ops.reconcile import TIMEOUT_SECONDS, fail_runs_that_never_began, reconcile, reschedule_crashed_runs
from flows.ops.schedules import pause_bad_schedules
from flows.ops.services import ServiceSpec, client_environment, is_free, services, worker_name
from flows.ops.state import UpError, UpState, forget_state, save_state

TICK_SECONDS = 1.0
RESCHEDULE_INTERVAL_SECONDS = 30.0
"""Interval of the search for crashed flow runs that no automation has rescheduled."""
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A service that has run for this long resets its backoff."""
FLOW_GRACE_SECONDS = 30.0
"""After SIGTERM, a flow gets this many seconds to release its run. The engine writes a checkpoint in this time."""
WAIT_MESSAGE_SECONDS = 10.0
"""Interval of the messages that say what the start waits for."""
SUPERVISOR_LOG = "supervisor.log"
"""Name of the log of the supervisor itself, where it runs in the background."""
LOG_TAIL = 3000
"""Bytes of a log, or characters of a command's output, that an error message shows."""

PROGRESS = re.compile(r"\d+ of \d+ deployments")
"""Begin of a line in which `ostinato deploy` says how far it is."""

Log = Callable[[str], None]


@dataclass
class Backoff:
    """The delay before the next start of a service. It doubles with each early end."""

    ends: int = 0
    not_before: float = 0.0

    def record_end(self, now: float, lived_seconds: float) -> float:
        """Records an end after `lived_seconds`; returns the delay in seconds."""
        self.ends = 1 if lived_seconds >= STEADY_SECONDS else self.ends + 1
        delay = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (self.ends - 1))
        self.not_before = now + delay
        return delay


@dataclass
class Supervisor:
    """Supervises the services: call `start`, then `watch` until `stop` is set, then `close`.

    `state` and the state file are always equal; creating a supervisor writes the file.
    """

    home: Path
    state: UpState
    log: Log
    deploy: Callable[[UpState], None]
    """Creates the work pool, the deployments and their settings on the Prefect server."""
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.services = services(self.state, self.home)
        self._backoff = {service.name: Backoff() for service in self.services}
        # an earlier worker may have left flow runs
        self._worker_lost = not self._alive("worker")
        self._lost_run_ids: set[str] = set()
        self._last_crash_search = self._start_time = time.monotonic()
        self._update_state(supervisor=ProcessIdentity.of(psutil.Process().pid), ready=False)

    def start(self) -> None:
        """Starts the services in the order of their dependencies; adopts those that run. Raises UpError."""
        self._start_time = time.monotonic()
        for service in self.services:
            if self._alive(service.name):
                self.log(f"the {service} is running already (pid {self.state.services[service.name].pid})")
            elif service.name == "server" and not is_free(self.state.options.port):
                raise UpError(
                    f"port {self.state.options.port} of 127.0.0.1 is in use by another program; end it, or give --port"
                )

        # the engine takes long to start, so it starts along with the server, and is awaited at the end
        by_name = {service.name: service for service in self.services}
        for batch in (("s3",), ("server", "engine")):
            for name in batch:
                if name in by_name and not self._alive(name):
                    self._spawn(by_name[name])
            for name in batch:
                if name in by_name and name != "engine":
                    self._wait(by_name[name])

        # the worker takes flow runs as soon as it starts, so everything that they need comes first
        self.log("creating the deployments on the Prefect server")
        self.deploy(self.state)
        self.log(f"the deployments are created ({self._elapsed()})")
        if not self._alive("worker"):
            self._end_orphaned_flows()
        last = [by_name[name] for name in ("engine", "worker", "page") if name in by_name]
        for service in last:
            if not self._alive(service.name):
                self._spawn(service)
        for service in last:
            self._wait(service)
        self._update_state(ready=True)

    def watch(self) -> None:
        """Checks the services every second until `stop` is set: restarts those that have ended, and reschedules crashed
        runs."""
        while not self.stop.wait(TICK_SECONDS):
            for service in self.services:
                self._restart_if_ended(service)
                rotate_log(self._log_file(service))
            rotate_log(self.home / SUPERVISOR_LOG)
            if time.monotonic() - self._last_crash_search > RESCHEDULE_INTERVAL_SECONDS:
                self._reschedule_crashed_runs()

    def close(self) -> None:
        """Ends the flows, then the services. The flows release their runs and continue at the next start."""
        try:
            if self._alive("worker"):
                # SIGKILL, because on SIGTERM the worker would kill its flows before they have released their runs
                kill_all(filter(None, [self.state.services["worker"].process()]))
            self._worker_lost = True
            self._end_orphaned_flows()
            self._fail_runs_that_never_began()
        finally:
            # end a service before the services that it depends on
            for service in reversed(self.services):
                identity = self.state.services.get(service.name)
                if identity is not None:
                    terminate_all(filter(None, [identity.process()]), grace_seconds=service.grace_seconds)
                    reap(identity)
            # processes that a service has left behind
            terminate_all(processes_of_up(self.state.id), grace_seconds=10.0)
            forget_state(self.home)

    def _restart_if_ended(self, service: ServiceSpec) -> None:
        """Restarts the service if it has ended, its delay is over and the service it needs answers."""
        if self._alive(service.name):
            return
        now, backoff = time.time(), self._backoff[service.name]

        # the first check after the end: record it, and start the delay
        identity = self.state.services.get(service.name)
        if identity is not None:
            how = reap(identity)
            delay = backoff.record_end(now, now - identity.created)
            ended = f"has ended {how}" if how else "has ended"
            self.log(f"{service.name} (pid {identity.pid}) {ended}; it is restarted in {delay:.0f} s")
            self._forget(service.name)
            if service.name == "worker":
                self._worker_lost = True
        if service.name == "worker" and self._worker_lost:
            self._end_orphaned_flows()

        if now < backoff.not_before or self._dependency_is_down(service) or self.stop.is_set():
            return
        self._spawn(service)
        restarts = self.state.restarts | {service.name: self.state.restarts.get(service.name, 0) + 1}
        self._update_state(restarts=restarts)

    def _dependency_is_down(self, service: ServiceSpec) -> bool:
        needed = [other for other in self.services if other.name == service.needs]
        return not all(self._alive(other.name) and other.healthy() for other in needed)

    def _end_orphaned_flows(self) -> None:
        """Ends the flows of a dead worker, so that they release their runs, and reschedules them on the server.

        If the server does not answer, the next check tries again.
        """
        # flows outlive a killed worker, and are found by their environment
        flows = [process for process in processes_of_up(self.state.id) if FLOW_RUN_ENV in process_environment(process)]
        self._lost_run_ids |= {process_environment(process).get(FLOW_RUN_ENV, "") for process in flows}
        # only the top process of each flow gets SIGTERM, and its children are ended by it
        pids = {process.pid for process in flows}
        roots = [process for process in flows if _parent_pid(process) not in pids]
        terminate_all(roots, grace_seconds=FLOW_GRACE_SECONDS)
        kill_all(flows)
        # tell the server, which does not notice the end of a worker
        try:
            lines = reconcile(
                self.state.api_url, self.state.options.pool, worker=worker_name(self.state), seen=self._lost_run_ids
            )
        except httpx.HTTPError as error:
            self.log(f"the runs of the dead worker are not rescheduled yet: {error!r}")
            return
        self._worker_lost, self._lost_run_ids = False, set()
        for line in lines:
            self.log(line)

    def _reschedule_crashed_runs(self) -> None:
        """Reschedules crashed runs, and pauses schedules whose runs can only fail. If server or worker do not answer,
        the next interval tries again."""
        self._last_crash_search = time.monotonic()
        if not self._alive("server") or not self._alive("worker"):
            return
        try:
            lines = reschedule_crashed_runs(self.state.api_url, self.state.options.pool)
            with httpx.Client(base_url=self.state.api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
                lines += pause_bad_schedules(client)
        except httpx.HTTPError:
            return
        for line in lines:
            self.log(line)

    def _fail_runs_that_never_began(self) -> None:
        """Fails runs that the next start would start in vain. If the server does not answer, they stay due."""
        try:
            lines = fail_runs_that_never_began(self.state.api_url, self.state.options.pool)
        except httpx.HTTPError:
            return
        for line in lines:
            self.log(line)

    def _spawn(self, service: ServiceSpec) -> None:
        log_file = self._log_file(service)
        identity = spawn(service.command, environment=service.environment, log=log_file, folder=Path.cwd())
        self._update_state(services=self.state.services | {service.name: identity})
        self.log(f"starting the {service} (pid {identity.pid})")

    def _wait(self, service: ServiceSpec) -> None:
        """Returns when the service answers. Raises UpError if it ends, takes too long, or `stop` is set."""
        deadline = time.monotonic() + service.start_seconds
        next_message = time.monotonic() + WAIT_MESSAGE_SECONDS
        while not service.healthy():
            if self.stop.is_set():
                raise UpError("stopped while it was starting")
            if not self._alive(service.name):
                log_end = describe_log_end(self._log_file(service))
                raise UpError(f"the {service} ended while it was starting; {log_end}")
            if time.monotonic() > deadline:
                raise UpError(
                    f"the {service} gave no answer within {service.start_seconds:.0f} s; "
                    f"{describe_log_end(self._log_file(service))}"
                )
            if time.monotonic() > next_message:
                self.log(f"waiting for the {service} ({self._elapsed()}); its log: {self._log_file(service)}")
                next_message += WAIT_MESSAGE_SECONDS
            # not time.sleep, so that `stop` ends the wait at once
            self.stop.wait(0.2)
        self.log(f"the {service} is ready ({self._elapsed()})")

    def _elapsed(self) -> str:
        """The time since `start` was called."""
        return f"{time.monotonic() - self._start_time:.0f} s"

    def _alive(self, name: str) -> bool:
        identity = self.state.services.get(name)
        return identity is not None and identity.alive

    def _forget(self, name: str) -> None:
        others = {other: identity for other, identity in self.state.services.items() if other != name}
        self._update_state(services=others)

    def _update_state(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)
        save_state(self.home, self.state)

    def _log_file(self, service: ServiceSpec) -> Path:
        return self.home / f"{service.name}.log"


def deploy_by_command(state: UpState, log: Log) -> None:
    """Runs `ostinato deploy` for the server of this `up`, and logs how far it is. Raises UpError.

    It runs in its own process, so that this one does not import Prefect."""
    command = [
        sys.executable, "-m", "flows.cli.main", "deploy", "--pool", state.options.pool,
        "--storage", state.options.storage, "--engine", state.engine_url,
    ]  # fmt: skip

    def log_progress(line: str) -> None:
        if PROGRESS.match(line):
            log(line.strip())

    status, printed = run_and_follow(
        command, environment=client_environment(state), folder=None, on_line=log_progress
    )
    if status:
        raise UpError(f"the deployments could not be made:\n{printed[-LOG_TAIL:]}")


def describe_log_end(log: Path) -> str:
    """Returns the path and the end of a log, for an error message."""
    text = log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"the end of its log, {log}:\n{text}" if text else f"its log, {log}, is empty"


def _parent_pid(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0
