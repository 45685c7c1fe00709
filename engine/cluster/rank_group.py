"""The group of processes that a trainer of several ranks runs in: Ray actors behind one object.

    group = RankGroup("package.module:Trainer", {"folder": "…"}, ranks=2, start_seconds=300, hang_seconds=1800)
    group.call("update", samples)      # calls Trainer.update(samples) on every rank, and returns rank 0's result

The first call starts the ranks. Each rank initialises torch.distributed (gloo on the CPU, NCCL on GPUs) and builds
`Trainer(options, rank=…, world_size=…)`. When a rank dies or hangs, all ranks end, and the next call starts new ones.
Methods that take long call `rank_progress.report_progress()` regularly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from engine.cluster.connection import Cluster, connect, require_ray
from engine.cluster.placement import Bundle, Placement
from engine.cluster.rank_processes import GroupSettings, Lane, RankProcesses, StartFailure
from engine.errors import EngineError, PermanentEngineError, WorkerDied
from engine.protocol import ActorCount
from engine.specs.engine import ClusterSpec

log = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
MAX_FAILED_STARTS = 3
"""Number of failed starts in a row after which the error is permanent."""
MAX_BACKOFF = 30.0
"""Seconds between a failed start and the next one, at most."""


@dataclass(frozen=True, slots=True)
class PartialFailure:
    """A call that finished on some ranks and failed on others. What the call should change is undefined."""

    method: str
    finished: tuple[int, ...]
    """Ranks on which the call finished."""
    failed: tuple[int, ...]
    """Ranks on which the call raised an exception."""


class RankGroup:
    """N ranks behind one object. One thread at a time may call it; any thread may use `call_beside`, `alive` and
    `close`."""

    def __init__(  # noqa: PLR0913 - a constructor like a config
        self,
        target: str,
        options: dict[str, Any],
        *,
        ranks: int,
        start_seconds: float,
        hang_seconds: float,
        cluster: ClusterSpec = ClusterSpec(),
        gpus: float = 0.0,
        gpu_share: float = 1.0,
        environment: Mapping[str, str] = {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing starts yet.

        Args:
            target: "package.module:Class" of the object that every rank builds.
            options: first argument of that class.
            start_seconds: seconds that the ranks may take to start.
            hang_seconds: seconds without progress after which a rank counts as hung.
            gpus: GPUs in the bundle of each rank.
            gpu_share: the part of these GPUs that the rank itself takes.
            environment: environment variables of the ranks.
            clock: the clock of the hang detector, in seconds.

        Raises:
            BadSpec: Ray is not installed.
        """
        require_ray()
        self.start_number = 0
        """Number of starts so far, failed ones included. The state of the ranks of an earlier start is lost."""
        self.partial_failure: PartialFailure | None = None
        """The last call since the ranks started that finished on some ranks and failed on others."""

        # Everything that a start needs.
        self._settings = GroupSettings(
            target=target,
            options=options,
            ranks=ranks,
            start_seconds=start_seconds,
            hang_seconds=hang_seconds,
            environment=dict(environment),
            gpu_share=gpu_share,
        )
        self._cluster_spec = cluster
        self._bundles = [Bundle(gpus=gpus)] * ranks
        self._clock = clock

        # The state of the current start, and of starts that failed.
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._placement: Placement | None = None
        self._current: RankProcesses | None = None
        self._closed = threading.Event()
        self._failed_starts = 0
        self._retry_at = 0.0
        self._listener: Callable[[], None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the ranks run, so that their state is still there."""
        current = self._current
        return current is not None and current.alive

    def actor_count(self) -> ActorCount:
        """The number of ranks, of those that run, and of restarts. Does not call Ray. Any thread may use it."""
        current = self._current
        is_up = current is not None and current.ready and current.failure is None
        ranks = self._settings.ranks
        return ActorCount(wanted=ranks, alive=ranks if is_up else 0, restarts=max(0, self.start_number - 1))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the last start. Each is valid on the machine of its rank."""
        locations = self._current.locations if self._current is not None else {}
        return {rank: location.pid for rank, location in locations.items()}

    def reserve(self) -> Placement:
        """Reserves the bundles of the ranks and waits until they are reserved. Raises as `connect` and
        `Placement.wait`."""
        if self._cluster is not None and self._cluster.loss():
            lost_cluster, self._cluster, self._placement = self._cluster, None, None
            lost_cluster.release()
        if self._cluster is None:
            self._cluster = connect(self._cluster_spec)
        if self._placement is None:
            self._placement = Placement(self._cluster, "trainer ranks", self._bundles)
        # Wait also for an existing placement: Ray may be moving bundles away from a machine that was lost.
        self._placement.wait(self._settings.start_seconds)
        return self._placement

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method on every rank and returns rank 0's result. Starts the ranks if they do not run.

        Raises:
            WorkerDied: a rank ended, the group hung, or it did not start. No rank is left; the next call starts them.
            EngineBusy: the cluster has no room for the ranks.
            EngineError: a rank raised it. Any other exception of a rank is raised as a PermanentEngineError. If only
                some ranks failed, a note of the error says so, and `partial_failure` is set.
        """
        with self._lock:
            return self._run(self._ensure_started(), method, [(args, kwargs)])[0]

    def call_unless_restarted(self, start_number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `call`, for methods that need the state of the ranks of one start.

        Raises WorkerDied if those ranks are gone, and starts no others.
        """
        return self._call_start(start_number, method, [(args, kwargs)])[0]

    def scatter(self, start_number: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `call_unless_restarted`, with different arguments for different ranks: each of the `arguments` goes to
        equally many neighbouring ranks, and to no others. Returns the result of the first rank of each."""
        return self._call_start(start_number, method, [(args, {}) for args in arguments])

    def _call_start(self, start_number: int, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        with self._lock:
            current = self._current
            if current is None or current.number != start_number or not current.alive:
                reason = _failure_reason(current, start_number)
                raise WorkerDied(f"the ranks of start {start_number} are gone, and their state with them{reason}")
            return self._run(current, method, arguments)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._settings.ranks

    def call_beside(self, method: str, *args: Any, lane: Lane = "transfers") -> dict[int, Any]:
        """Runs a method on every rank while another call may compute. The method must not use torch's default group, in
        which the ranks compute. Starts no ranks. Calls of one `lane` do not wait for those of the other.

        Returns the results by rank. Ranks that died, failed or do not run are left out; failures are logged. If a rank
        dies or hangs, all ranks end, as in `call`."""
        current = self._current
        results: dict[int, Any] = {}
        if current is None:
            return results
        for rank, outcome in current.call_beside(method, args, lane).items():
            if outcome.failure is None:
                results[rank] = outcome.result
            else:
                log.warning("%s failed on rank %d: %s", method, rank, outcome.failure.message)
        return results

    def start(self) -> int:
        """Starts the ranks if they do not run. Returns the number of their start. Raises as `call`."""
        with self._lock:
            return self._ensure_started().number

    @contextmanager
    def progress_callback(self, listener: Callable[[], None]) -> Iterator[None]:
        """Inside the block, each call runs `listener` in the calling thread whenever rank 0 has made progress, a few
        times per second at most and at least once per call. An exception of `listener` ends the ranks."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def close(self) -> None:
        """Ends all ranks and frees their resources. A call that runs in another thread raises WorkerDied."""
        # A call in another thread holds the lock until the ranks end, so end them first.
        self._closed.set()
        if not self._lock.acquire(blocking=False):
            if self._current is not None:
                self._current.fail("the group was closed during a call")
            self._lock.acquire()
        try:
            with ExitStack() as steps:  # runs in reverse order, every step even if another one raises
                if self._cluster is not None:
                    steps.callback(self._cluster.release)
                if self._placement is not None:
                    steps.callback(self._placement.remove)
                if self._current is not None:
                    steps.callback(self._current.stop)
            self._placement = self._cluster = None
        finally:
            self._lock.release()

    def _run(self, processes: RankProcesses, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        from engine.cluster.rank_actor import error_from_failure

        outcomes = processes.call(method, arguments, self._listener)
        failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if not failures:
            return [outcomes[rank].result for rank in range(0, self.size, self.size // len(arguments))]

        # Raise the error of one rank. EngineErrors come first, since they usually caused the errors of the other ranks.
        _, failure = min(failures.items(), key=lambda item: (not item[1].error_class, item[0]))
        error = error_from_failure(failure)

        # Ranks that finished have changed their state. The caller must not use the ranks as if nothing had happened.
        finished = tuple(sorted(set(outcomes) - set(failures)))
        if finished:
            self.partial_failure = PartialFailure(method, finished, tuple(sorted(failures)))
            error.add_note(
                f"ranks {sorted(failures)} failed and ranks {list(finished)} finished {method}: what it changed is "
                "undefined"
            )
        raise error

    def _ensure_started(self) -> RankProcesses:
        """The ranks that run. Starts them if there are none."""
        if self._closed.is_set():
            raise WorkerDied("the group is closed")
        if self._current is not None and self._current.alive:
            return self._current

        # Wait for the end of the previous ranks, which hold memory, and after a failed start for the backoff.
        if self._current is not None:
            self._current.wait_until_ended()
        if self._closed.wait(max(0.0, self._retry_at - time.monotonic())):
            raise WorkerDied("the group is closed")

        # Start new ranks. A `close` may come at any moment, so check before and after the wait for resources.
        self.start_number += 1
        self.partial_failure = None
        self._current = RankProcesses(self.start_number, self._settings, self.reserve(), self._clock)
        if self._closed.is_set():
            raise WorkerDied("the group is closed")
        try:
            self._current.start()
        except StartFailure as failure:
            raise self._start_error(failure, self._current) from None
        self._failed_starts = 0
        return self._current

    def _start_error(self, failure: StartFailure, processes: RankProcesses) -> EngineError:
        """The error to raise for a failed start. Sets the time of the next start."""
        if failure.error is not None:
            return failure.error
        # The next start may meet the lost machine again, because Ray removes it seconds after its processes. So this
        # start does not count as failed.
        if processes.lost_machine:
            return WorkerDied(f"the ranks did not start: {failure}")
        # Wait 1, 2, 4, … seconds before the next start.
        self._failed_starts += 1
        self._retry_at = time.monotonic() + min(MAX_BACKOFF, 2.0 ** min(self._failed_starts - 1, 10))
        if self._failed_starts < MAX_FAILED_STARTS or self._closed.is_set():
            return WorkerDied(f"the ranks did not start: {failure}")
        return PermanentEngineError(f"the ranks did not start, {self._failed_starts} times in a row: {failure}")


def _failure_reason(processes: RankProcesses | None, start_number: int) -> str:
    """Why the ranks of this start ended, as the end of a sentence; empty if they are not those of the last start."""
    if processes is None or processes.number != start_number:
        return ""
    processes.wait_until_ended()
    return f": {processes.failure}"
