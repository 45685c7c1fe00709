"""One start of the ranks of a group: their actors, from the start of the first to the end of the last.

When one rank ends or hangs, all ranks of this start end. `rank_group` then starts new ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from engine.cluster.actors import ProcessLocation
from engine.cluster.placement import Placement
from engine.cluster.rank_progress import HangDetector, HungRank, RankPhase
from engine.errors import EngineError, WorkerDied

log = logging.getLogger(__name__)

Lane = Literal["transfers", "weights"]
"""Concurrency groups of `RankActor` for calls that run while a rank computes: files of checkpoints, and weights on
their way to samplers."""
COLLECTIVE_MARGIN = 60.0
"""Seconds that a collective may take longer than `hang_seconds`, so that the hang is reported first."""
NODE_DIED = "node has died"
"""Part of Ray's message about an actor whose machine is gone."""
NEVER_OWNED = "all references to the actor were removed"
"""Part of Ray's message about an actor that it ended because this process refused Ray's requests."""
STACK_TIMEOUT = 0.5
"""Seconds that a rank has to return its stacks."""
CAUSE_TIMEOUT = 2.0
"""Seconds to wait for the death of a rank after another rank reported that it lost its peers."""
CLOSE_TIMEOUT = 10.0
"""Seconds that the ranks may take to close their resources before they are killed."""
KILL_TIMEOUT = 60.0
"""Seconds that Ray may take to end an actor. A stopped process takes five seconds."""
MAX_POLL_INTERVAL = 0.2
"""Seconds between two polls of the ranks' progress, at most."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a group, equal for all its starts."""

    target: str
    options: dict[str, Any]
    ranks: int
    start_seconds: float
    hang_seconds: float
    environment: Mapping[str, str]
    gpu_share: float
    """Part of its bundle's GPU that a rank takes."""

    @property
    def poll_interval(self) -> float:
        """Seconds between two polls of the ranks' progress."""
        return min(MAX_POLL_INTERVAL, self.hang_seconds / 10)


class StartFailure(Exception):
    """Raised when the ranks did not start."""

    def __init__(self, reason: str, error: EngineError | None = None) -> None:
        super().__init__(reason)
        self.error = error
        """The EngineError that a rank raised, if it raised one. Another start would raise it again."""


class RankProcesses:
    """The actors of one start. Any thread may call `call_beside` and `fail`, and read `alive`; only the thread that
    calls the group may use the rest."""

    def __init__(self, number: int, settings: GroupSettings, placement: Placement, clock: Callable[[], float]) -> None:
        self.number = number
        """Number of this start of the group, from 1."""
        self.failure: str | None = None
        """Why the processes ended; None while they run."""
        self.lost_machine = False
        """Whether they ended because Ray lost a machine, or because a private Ray was lost."""
        self.ready = False
        """Whether every rank has built its object."""
        self.locations: dict[int, ProcessLocation] = {}
        """Where each rank runs, by rank."""
        self._settings = settings
        self._placement = placement
        self._actors: list[Any] = []
        self._clock = clock
        self._detector = HangDetector(settings.ranks, settings.hang_seconds, clock)
        self._poller = _ProgressPoller(self._actors, self._detector)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._life_calls: list[Any] = []
        """By rank: a call that ends when the actor does."""

    # -- start and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when every rank has built its object. After a StartFailure no process is left."""
        import ray

        # Rank 0 opens the store by which all ranks find each other, and then all ranks join.
        deadline = time.monotonic() + self._settings.start_seconds
        try:
            self._create_actors()
            self.locations = self._wait_for_start(self._call_all("location"), deadline)
            store_address = self._wait_for_start([self._actors[0].open_store.remote()], deadline)[0]
            outcomes = self._wait_for_start(self._call_all("start", store_address), deadline)
        except ray.exceptions.RayError as error:
            # The actor lives and its constructor or the call raised, or a private Ray is gone.
            self.lost_machine = bool(self._placement.cluster.loss())
            self.fail(self._placement.cluster.loss() or f"{type(error).__name__}: {error}")
            raise StartFailure(self.failure or "") from None
        except BaseException as error:
            self.fail(f"{type(error).__name__} in the engine while the ranks started")
            raise
        self._raise_failed_start(outcomes)
        self.ready = True

    def _create_actors(self) -> None:
        from engine.cluster.rank_actor import RankActor, RankLaunch

        settings = self._settings
        # Under the lock, so that `fail` in another thread either comes first or ends all of the actors.
        with self._lock:
            if self.failure is not None:
                raise StartFailure(self.failure)
            for rank in range(settings.ranks):
                launch = RankLaunch(
                    target=settings.target,
                    options=settings.options,
                    rank=rank,
                    world_size=settings.ranks,
                    start_timeout=settings.start_seconds,
                    collective_timeout=settings.hang_seconds + COLLECTIVE_MARGIN,
                    environment=settings.environment,
                )
                options = self._placement.options(rank, share=settings.gpu_share)
                self._actors.append(RankActor.options(**options).remote(launch))
            self._life_calls = [actor.wait_until_killed.remote() for actor in self._actors]

    def _wait_for_start(self, calls: list[Any], deadline: float) -> dict[int, Any]:
        """Results of the calls by rank; `calls` are to the first `len(calls)` ranks.

        Raises StartFailure when a rank dies or hangs, or the deadline passes.
        """
        import ray

        # The life calls are watched, too, so that a death ends the wait.
        pending = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        while pending and self.failure is None:
            remaining = max(0.0, deadline - time.monotonic())
            timeout = min(self._settings.poll_interval, remaining)
            done, _ = ray.wait([*pending, *self._life_calls], timeout=timeout)
            self._poller.poll_rank_0_progressed()
            if silent := self._detector.silent_ranks():
                self._fail_by_hang(silent)
            elif not done and time.monotonic() >= deadline:
                # What a rank raised explains more than the list of ranks that are missing.
                self._raise_failed_start(results)
                missing = sorted(pending.values())
                self.fail(f"not ready after start_seconds={self._settings.start_seconds:g}: ranks {missing}", missing)
            for call in done:
                if call not in pending:  # a life call: its actor is dead
                    self._fail_by_death()
                    break
                rank = pending.pop(call)
                try:
                    results[rank] = ray.get(call)
                except ray.exceptions.RayActorError:
                    self._fail_by_death(rank)
                    break
                failure = getattr(results[rank], "failure", None)
                if failure is not None and not failure.error_class and pending:
                    # The other ranks wait for this one in torch.distributed, so they cannot start any more.
                    self.fail(f"rank {rank} did not start: {failure.message}{self._log_tail(rank)}")
        if self.failure is not None:
            raise StartFailure(self.failure)
        return results

    def _raise_failed_start(self, results: Mapping[int, Any]) -> None:
        """Raises StartFailure if a rank could not build its object."""
        from engine.cluster.rank_actor import error_from_failure

        failures = {rank: result.failure for rank, result in results.items() if getattr(result, "failure", None)}
        if not failures:
            return
        # EngineErrors come first, then failures that are not consequences of another rank's.
        rank, failure = min(failures.items(), key=lambda item: (not item[1].error_class, not item[1].is_cause, item[0]))
        self.fail(f"rank {rank} did not start: {failure.message}{self._log_tail(rank)}")
        raise StartFailure(self.failure or "", error_from_failure(failure) if failure.error_class else None)

    def stop(self) -> None:
        """Lets the ranks close their resources, then ends them. Must not be called during a call."""
        import ray

        if self.alive:
            ray.wait(self._call_all("close"), num_returns=self._settings.ranks, timeout=CLOSE_TIMEOUT)
        self.fail("it was closed")
        self.wait_until_ended()

    def wait_until_ended(self) -> None:
        """Returns when no actor is left. Call it after `failure` is set."""
        self._ended.wait()

    def fail(self, reason: str, hung: list[int] | None = None) -> None:
        """Ends all ranks; the first reason is kept. Any thread may call it.

        If ranks are `hung`, the stacks of all ranks that reply are added to the reason first.
        """
        import ray

        # Only the first caller goes on. The others wait in `wait_until_ended` if they need the end.
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        try:
            if hung:
                self.failure += self._stacks(hung)
            alive: list[Any] = []
            # A private Ray that is lost takes its actors along.
            if self._life_calls and not self._placement.cluster.loss():
                for actor in self._actors:
                    ray.kill(actor)
                _, alive = ray.wait(self._life_calls, num_returns=len(self._life_calls), timeout=KILL_TIMEOUT)
            if alive:
                log.error("Ray has not ended %d ranks within %g s", len(alive), KILL_TIMEOUT)
        finally:
            self._ended.set()

    @property
    def alive(self) -> bool:
        """Whether all actors live, as far as Ray knows."""
        import ray

        if not self.ready or self.failure is not None:
            return False
        if self._placement.cluster.loss():
            self._fail_by_death()
            return False
        dead, _ = ray.wait(self._life_calls, timeout=0)
        if dead:
            self._fail_by_death()
        return self.failure is None

    # -- calls ------------------------------------------------------------------------------------------------

    def call(self, method: str, arguments: Sequence[Any], listener: Callable[[], None] | None) -> dict[int, Any]:
        """Runs a method on every rank. Returns the RankOutcome of each rank, by rank.

        Each of the `arguments` goes to equally many neighbouring ranks, of which the first returns its result. Raises
        WorkerDied if a rank ends or hangs; no process is left then.
        """
        import ray

        if not self.alive:
            raise WorkerDied(f"{self.failure}\nbefore {method}; the next call starts the ranks again")
        shared_arguments = [ray.put(part) for part in arguments]  # each is stored once for the ranks that share it
        try:
            return self._call(method, shared_arguments, listener)
        except BaseException as error:
            # The listener raised, or a user pressed Ctrl-C. The ranks are in the middle of a call, so they must end.
            self.fail(f"{type(error).__name__} in the engine during {method}")
            raise

    def _call(self, method: str, arguments: Sequence[Any], listener: Callable[[], None] | None) -> dict[int, Any]:
        import ray

        pending: dict[Any, int] = {}
        for rank, actor in enumerate(self._actors):
            part, place = divmod(rank, self._settings.ranks // len(arguments))
            pending[actor.run.remote(method, arguments[part], place == 0)] = rank
        outcomes: dict[int, Any] = {}
        listener_called = False
        self._detector.begin_call()
        while pending and self.failure is None:
            # Collect the ranks that returned.
            done, _ = ray.wait(list(pending), timeout=self._settings.poll_interval)
            for call in done:
                rank = pending.pop(call)
                outcomes[rank] = self._outcome(rank, call)
                self._detector.record_finish(rank)

            # Poll the progress of all ranks, and look for hung ones.
            if self._poller.poll_rank_0_progressed() and listener is not None and pending:
                listener_called = True
                listener()
            hung = self._detector.hung_ranks() if pending else []
            if hung:
                self._fail_by_hang(hung)
        if self.failure is not None:
            self.wait_until_ended()
            raise WorkerDied(f"{self.failure}\nduring {method}; the next call starts the ranks again")
        if listener is not None and not listener_called:
            listener()  # the call finished before the first poll
        return outcomes

    def call_beside(self, method: str, arguments: tuple[Any, ...], lane: Lane) -> dict[int, Any]:
        """Runs a method on every rank while they may compute. Returns the RankOutcome of each rank whose call ended.

        If a rank dies or its process does not reply for `hang_seconds`, all ranks are ended, and the outcomes so far
        are returned."""
        import ray

        if not self.alive:
            return {}
        detector = HangDetector(self._settings.ranks, self._settings.hang_seconds, self._clock)
        for rank in range(self._settings.ranks):  # all of them have replied before, when they started
            detector.record_reply(rank, 0, RankPhase.IDLE)
        poller = _ProgressPoller(self._actors, detector)
        pending: dict[Any, int] = {}
        for rank, actor in enumerate(self._actors):
            pending[actor.run_beside.options(concurrency_group=lane).remote(method, arguments)] = rank
        outcomes: dict[int, Any] = {}
        while pending and self.alive:
            done, _ = ray.wait(list(pending), timeout=self._settings.poll_interval)
            for call in done:
                rank = pending.pop(call)
                outcome = self._outcome(rank, call)
                if outcome is not None:
                    outcomes[rank] = outcome
            poller.poll_rank_0_progressed()
            if silent := detector.silent_ranks():
                self._fail_by_hang(silent)
        if self.failure is not None:
            self.wait_until_ended()  # no rank writes anything any more
        return outcomes

    def _outcome(self, rank: int, call: Any) -> Any:
        """The RankOutcome of one rank; None if the rank died."""
        import ray

        from engine.cluster.rank_actor import RankFailure, RankOutcome

        try:
            outcome = ray.get(call)
        except ray.exceptions.RayActorError:
            self._fail_by_death(rank)
            return None
        except ray.exceptions.RayTaskError as error:  # the result cannot be serialized
            return RankOutcome(failure=RankFailure("", f"rank {rank}: {type(error.cause).__name__}: {error.cause}"))
        failure = outcome.failure
        if failure is not None and failure.ends_group:
            # A rank that lost a peer often reports it before Ray notices the death of that peer.
            if not failure.is_cause and self._wait_for_a_death():
                self._fail_by_death()
            else:
                self.fail(f"rank {rank}: {failure.message}{self._log_tail(rank)}")
        return outcome

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors]

    # -- deaths -----------------------------------------------------------------------------------------------

    def _wait_for_a_death(self) -> bool:
        import ray

        return bool(ray.wait(self._life_calls, timeout=CAUSE_TIMEOUT)[0])

    def _fail_by_death(self, rank: int | None = None) -> None:
        """Ends all ranks because an actor is dead: `rank`, and those that Ray knows to be dead."""
        import ray

        # Ranks die with the raylet that started them, within milliseconds.
        if loss := self._placement.cluster.loss():
            self.lost_machine = True
            self.fail(loss)
            return
        dead_calls, _ = ray.wait(self._life_calls, num_returns=len(self._life_calls), timeout=0)
        dead_ranks = {self._life_calls.index(call) for call in dead_calls}
        if rank is not None:
            dead_ranks.add(rank)
        ranks = sorted(dead_ranks)
        causes = [_cause_of_death(self._life_calls[number]) for number in ranks]
        self.lost_machine = any(NODE_DIED in cause for cause in causes)
        reasons = [f"rank {number} died: {cause}" for number, cause in zip(ranks, causes, strict=True)]
        self.fail("; ".join(reasons) + self._log_tail(ranks[0]))

    def _fail_by_hang(self, hung: list[HungRank]) -> None:
        """Ends all ranks because some hang."""
        self.fail("; ".join(rank.describe() for rank in hung), [rank.rank for rank in hung])

    def _stacks(self, ranks: list[int]) -> str:
        """The stacks of all ranks that reply, and the end of the log of the first of `ranks`."""
        import ray

        calls = {self._actors[rank].stacks.remote(): rank for rank in range(self._settings.ranks)}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=STACK_TIMEOUT)
        texts = []
        for call in done:
            with suppress(ray.exceptions.RayError):
                texts.append(f"\nstacks of rank {calls[call]}:\n{ray.get(call)}")
        return "".join(texts) + self._log_tail(ranks[0])

    def _log_tail(self, rank: int) -> str:
        """The end of the rank's log; empty if it is on another machine."""
        if rank not in self.locations:
            return ""
        return self.locations[rank].log_tail()


class _ProgressPoller:
    """Asks the ranks for their progress during a call, and passes the replies to the hang detector."""

    def __init__(self, actors: list[Any], detector: HangDetector) -> None:
        self._actors, self._detector = actors, detector
        self._pending_polls: dict[int, Any] = {}

    def poll_rank_0_progressed(self) -> bool:
        """Reads the replies that have arrived, and polls those ranks again. Returns whether rank 0 made progress since
        the last call of this method."""
        import ray

        rank_0_progressed = False
        for rank, actor in enumerate(self._actors):
            poll = self._pending_polls.get(rank)
            if poll is not None:
                if not ray.wait([poll], timeout=0)[0]:
                    self._detector.record_no_reply(rank)
                    continue
                with suppress(ray.exceptions.RayError):  # the main call reports the death of a rank
                    made_progress = self._detector.record_reply(rank, *ray.get(poll))
                    rank_0_progressed = rank_0_progressed or (made_progress and rank == 0)
            self._pending_polls[rank] = actor.activity.remote()
        return rank_0_progressed


def _cause_of_death(life_call: Any) -> str:
    """Why an actor is dead, from Ray's message."""
    import ray

    try:
        ray.get(life_call, timeout=0)
    except ray.exceptions.RayError as error:
        # Ray's message is long. The last line that speaks of the end has the reason.
        message = str(error).strip()
        for line in str(error).splitlines():
            if "dead" in line or "died" in line or "exit" in line:
                message = line.strip()
        hint = ""
        if NEVER_OWNED in message:
            hint = " (this process and the cluster must both use a token or both not: give them the same RAY_AUTH_MODE)"
        elif NODE_DIED not in message:
            hint = " (unless it was killed on purpose, memory may have run out)"
        return message.partition(" Some common causes")[0] + hint
    return "it is gone"
