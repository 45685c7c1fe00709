"""The process group that a trainer of several ranks runs in: Ray actors behind one object, started at the first call,
watched, and started again as a whole.

    group = RankGroup("package.module:Trainer", {"folder": "…"}, ranks=2, start_seconds=300, hang_seconds=1800)
    group.call("update", samples)      # Trainer.update(samples) on every rank; rank 0's result

Every rank builds `Trainer(options, rank=…, world_size=…)` once torch.distributed is initialised, gloo on the CPU and
NCCL on GPUs. What it does for longer than moments calls `rank_progress.progress()` now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from engine.cluster.connection import Cluster, connect, require_ray
from engine.cluster.placement import Bundle, Placement
from engine.cluster.rank_processes import GroupSettings, RankProcesses, StartFailure
from engine.errors import EngineError, PermanentEngineError, WorkerDied
from engine.protocol import ActorCount
from engine.specs.cluster import ClusterSpec

STARTS = 3
"""Starts in a row that may fail before the next failure is called permanent."""
MAX_BACKOFF = 30.0


@dataclass(frozen=True, slots=True)
class PartialFailure:
    """A call that some ranks ran to the end and others did not: what it was to change is undefined."""

    method: str
    finished: tuple[int, ...]
    failed: tuple[int, ...]


class RankGroup:
    """N ranks, as one object. Calls come from one thread at a time; `alive` and `close` from any."""

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
        """`gpus`: GPUs in the bundle of each rank. `gpu_share`: the part of them that the rank itself takes.

        Raises BadSpec where Ray is not installed.
        """
        require_ray()
        self.start_number = 0
        """Grows at each start, also of one that fails. What the ranks of an older one held is gone."""
        self.partial_failure: PartialFailure | None = None
        """Of this generation's calls, the last one that ended differently on different ranks."""
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
        """Whether its ranks are up: what they hold can be asked for."""
        current = self._current
        return current is not None and current.alive

    def actor_count(self) -> ActorCount:
        """Its ranks, without asking Ray. Any thread may ask."""
        current = self._current
        up = current is not None and current.ready and current.failure is None
        ranks = self._settings.ranks
        return ActorCount(wanted=ranks, alive=ranks if up else 0, restarts=max(0, self.start_number - 1))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the last generation. They are of the machines that the ranks are on."""
        processes = self._current.processes if self._current is not None else {}
        return {rank: process.pid for rank, process in processes.items()}

    def reserve(self) -> Placement:
        """The bundles of the ranks, which this waits for. Raises as `connect` and `Placement.wait`."""
        if self._cluster is None:
            self._cluster = connect(self._cluster_spec)
        if self._placement is None:
            self._placement = Placement(self._cluster, "trainer ranks", self._bundles)
        self._placement.wait(self._settings.start_seconds)  # Ray may be moving it away from a machine that was lost
        return self._placement

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method on every rank; returns rank 0's result. Starts the ranks when they are not up.

        Raises:
            WorkerDied: a rank ended, or the group hung, or did not start; no rank is left, the next call starts them.
            EngineBusy: the cluster has no room for the ranks.
            EngineError: as a rank raised it; any other exception of a rank comes as a PermanentEngineError. When the
                ranks did not all fail, a note of the error says so, and `partial_failure`.
        """
        with self._lock:
            return self._run(self._up(), method, args, kwargs)

    def call_unless_restarted(self, generation: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """`call`, for what needs the state that the ranks of this generation hold: raises WorkerDied where they are
        gone, and starts nothing."""
        with self._lock:
            current = self._current
            if current is None or current.number != generation or not current.alive:
                raise WorkerDied(
                    f"the ranks of generation {generation} are gone, and what they held with them"
                    + _reason_of(current, generation)
                )
            return self._run(current, method, args, kwargs)

    def start(self) -> int:
        """Starts the ranks when they are not up; returns the generation. Raises as `call`."""
        with self._lock:
            return self._up().number

    @contextmanager
    def progress_callback(self, listener: Callable[[], None]) -> Iterator[None]:
        """In the block, each call runs `listener` in the calling thread while rank 0 makes progress, several times a
        second at most and once at least. What it raises ends the group."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def close(self) -> None:
        """Ends all ranks and gives their places back. A call that runs in another thread raises WorkerDied."""
        self._closed.set()
        if not self._lock.acquire(blocking=False):
            if self._current is not None:
                self._current.fail("the group was closed during a call")
            self._lock.acquire()
        try:
            with ExitStack() as steps:  # each is done even if one before it raises
                if self._cluster is not None:
                    steps.callback(self._cluster.release)
                if self._placement is not None:
                    steps.callback(self._placement.remove)
                if self._current is not None:
                    steps.callback(self._current.stop)
            self._placement = self._cluster = None
        finally:
            self._lock.release()

    def _run(self, generation: RankProcesses, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from engine.cluster.rank_actor import error_of

        outcomes = generation.call(method, (args, kwargs), self._listener)
        failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if not failures:
            return outcomes[0].result
        # an EngineError is the cause of what the others ran into, more often than not
        _, failure = min(failures.items(), key=lambda item: (not item[1].kind, item[0]))
        error = error_of(failure)
        finished = tuple(sorted(set(outcomes) - set(failures)))
        if finished:
            self.partial_failure = PartialFailure(method, finished, tuple(sorted(failures)))
            error.add_note(
                f"ranks {sorted(failures)} failed and ranks {list(finished)} finished {method}: what it changed is "
                "undefined"
            )
        raise error

    def _up(self) -> RankProcesses:
        """The generation that runs, started if there is none."""
        if self._closed.is_set():
            raise WorkerDied("the group is closed")
        if self._current is not None and self._current.alive:
            return self._current
        if self._current is not None:
            self._current.wait_gone()
        if self._closed.wait(max(0.0, self._retry_at - time.monotonic())):
            raise WorkerDied("the group is closed")
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

    def _start_error(self, failure: StartFailure, generation: RankProcesses) -> EngineError:
        if failure.error is not None:
            return failure.error
        if generation.lost_machine:  # Ray notices that a machine is gone only seconds after its processes are
            return WorkerDied(f"the ranks did not start: {failure}")
        self._failed_starts += 1
        self._retry_at = time.monotonic() + min(MAX_BACKOFF, 2.0 ** min(self._failed_starts - 1, 10))
        if self._failed_starts < STARTS or self._closed.is_set():
            return WorkerDied(f"the ranks did not start: {failure}")
        return PermanentEngineError(f"the ranks did not start, {self._failed_starts} times in a row: {failure}")


def _reason_of(generation: RankProcesses | None, number: int) -> str:
    """Why the generation of this number is gone, where it is the last one."""
    if generation is None or generation.number != number:
        return ""
    generation.wait_gone()
    return f": {generation.failure}"
