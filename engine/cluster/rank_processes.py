"""One life of a group of ranks: from the start of its actors to the end of the first of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.cluster.actors import Whereabouts
from engine.cluster.hang_detector import HangDetector
from engine.cluster.placement import Placement
from engine.errors import EngineError, WorkerDied

log = logging.getLogger(__name__)

COLLECTIVE_MARGIN = 60.0
NODE_DIED = "node has died"
"""In Ray's words about an actor whose machine is gone."""
NEVER_OWNED = "all references to the actor were removed"
"""In Ray's words about an actor that it ended because this process refused its questions."""
STACK_SECONDS = 0.5
"""How long a rank has to tell its stacks."""
CULPRIT_SECONDS = 2.0
"""Ranks that lost another one may say so before that one's death is noticed."""
CLOSE_SECONDS = 10.0
"""How long the ranks may take to close what they hold, before they are killed."""
KILL_SECONDS = 60.0
"""How long Ray may take to end an actor. A stopped process takes it five seconds."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What every generation of a group has in common."""

    target: str
    options: dict[str, Any]
    ranks: int
    start_seconds: float
    hang_seconds: float
    environment: Mapping[str, str]
    gpu_share: float
    """Part of its bundle's GPU that a rank takes."""

    @property
    def tick_seconds(self) -> float:
        """Time between two looks at the progress of the ranks."""
        return min(0.2, self.hang_seconds / 10)


class StartFailure(Exception):
    """The group did not come up."""

    def __init__(self, reason: str, error: EngineError | None = None) -> None:
        super().__init__(reason)
        self.error = error
        """What a rank raised on purpose, and would raise again."""


class RankProcesses:
    """The actors of one start. `fail` and `alive` are for any thread, all else for the one that calls the group."""

    def __init__(
        self, number: int, settings: GroupSettings, placement: Placement, clock: Callable[[], float]
    ) -> None:
        self.number = number
        self.failure: str | None = None
        """Why it ended."""
        self.lost_machine = False
        """Whether it ended because Ray lost a machine."""
        self.ready = False
        self.processes: dict[int, Whereabouts] = {}
        """Where each rank runs, by rank."""
        self._settings = settings
        self._placement = placement
        self._watch = HangDetector(settings.ranks, settings.hang_seconds, clock)
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._actors: list[Any] = []
        self._lives: list[Any] = []
        """By rank: a call that ends when the actor does."""

    # -- start and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when every rank has built its object. Raises StartFailure, and nothing of it is left then."""
        import ray

        deadline = time.monotonic() + self._settings.start_seconds
        try:
            self._create_actors()
            self.processes = self._starting(self._all("whereabouts"), deadline)
            meeting = self._starting([self._actors[0].open_store.remote()], deadline)[0]
            outcomes = self._starting(self._all("start", meeting), deadline)
        except ray.exceptions.RayError as error:  # of an actor that lives: its start raised
            self.fail(f"{type(error).__name__}: {error}")
            raise StartFailure(self.failure or "") from None
        except BaseException as error:
            self.fail(f"{type(error).__name__} in the engine while the ranks started")
            raise
        self._refuse_failed_start(outcomes)
        self.ready = True

    def _create_actors(self) -> None:
        from engine.cluster.rank_actor import Launch, RankActor

        settings = self._settings
        with self._lock:  # `fail` in another thread ends all of them or comes first
            if self.failure is not None:
                raise StartFailure(self.failure)
            for rank in range(settings.ranks):
                launch = Launch(
                    target=settings.target,
                    options=settings.options,
                    rank=rank,
                    world_size=settings.ranks,
                    start_seconds=settings.start_seconds,
                    collective_seconds=settings.hang_seconds + COLLECTIVE_MARGIN,
                    environment=settings.environment,
                )
                options = self._placement.options(rank, share=settings.gpu_share)
                self._actors.append(RankActor.options(**options).remote(launch))
            self._lives = [actor.wait_until_killed.remote() for actor in self._actors]

    def _starting(self, calls: list[Any], deadline: float) -> dict[int, Any]:
        """The answers of the first `len(calls)` ranks. Raises StartFailure when one dies or the time is over."""
        import ray

        pending = {call: rank for rank, call in enumerate(calls)}
        answers: dict[int, Any] = {}
        while pending and self.failure is None:
            done, _ = ray.wait([*pending, *self._lives], timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self._refuse_failed_start(answers)  # what a rank raised on purpose says more than who is missing
                missing = sorted(pending.values())
                self.fail(f"not ready after start_seconds={self._settings.start_seconds:g}: ranks {missing}", missing)
            for call in done:
                if call not in pending:
                    self._fail_by_death()
                    break
                rank = pending.pop(call)
                try:
                    answers[rank] = ray.get(call)
                except ray.exceptions.RayActorError:
                    self._fail_by_death(rank)
                    break
                failure = getattr(answers[rank], "failure", None)
                if failure is not None and not failure.kind and pending:
                    # the others wait for it in torch.distributed: they cannot start any more
                    self.fail(f"rank {rank} did not start: {failure.message}{self._log_tail(rank)}")
        if self.failure is not None:
            raise StartFailure(self.failure)
        return answers

    def _refuse_failed_start(self, answers: Mapping[int, Any]) -> None:
        """Raises StartFailure when a rank could not build its object."""
        from engine.cluster.rank_actor import error_of

        failures = {rank: answer.failure for rank, answer in answers.items() if getattr(answer, "failure", None)}
        if not failures:
            return
        rank, failure = min(failures.items(), key=lambda item: (not item[1].kind, not item[1].is_cause, item[0]))
        self.fail(f"rank {rank} did not start: {failure.message}{self._log_tail(rank)}")
        raise StartFailure(self.failure or "", error_of(failure) if failure.kind else None)

    def stop(self) -> None:
        """Lets the ranks close what they hold, between calls; then nothing of it is left."""
        import ray

        if self.failure is None and self.ready:
            ray.wait(self._all("close"), num_returns=self._settings.ranks, timeout=CLOSE_SECONDS)
        self.fail("it was closed")
        self.wait_gone()

    def wait_gone(self) -> None:
        """After `failure` is set: returns when no actor of it is left."""
        self._gone.wait()

    def fail(self, reason: str, stuck: list[int] | None = None) -> None:
        """Ends it, from any thread; the first reason counts. If ranks are `stuck`, all ranks that answer tell their
        stacks first."""
        import ray

        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        try:
            if stuck:
                self.failure += self._stacks(stuck)
            for actor in self._actors:
                ray.kill(actor)
            alive = self._lives and ray.wait(self._lives, num_returns=len(self._lives), timeout=KILL_SECONDS)[1]
            if alive:
                log.error("Ray has not ended %d ranks within %g s", len(alive), KILL_SECONDS)
        finally:
            self._gone.set()

    @property
    def alive(self) -> bool:
        """Whether all its actors live, as far as Ray knows."""
        import ray

        if not self.ready or self.failure is not None:
            return False
        dead, _ = ray.wait(self._lives, timeout=0)
        if dead:
            self._fail_by_death()
        return self.failure is None

    # -- calls ------------------------------------------------------------------------------------------------

    def call(self, method: str, arguments: Any, listener: Callable[[], None] | None) -> dict[int, Any]:
        """The Outcome of each rank. Raises WorkerDied when the generation ends before, and is over then."""
        import ray

        sent = ray.put(arguments)  # once for all ranks
        try:
            return self._call(method, sent, listener)
        except BaseException as error:  # a listener's, or Ctrl-C: the ranks are in the middle of a call
            self.fail(f"{type(error).__name__} in the engine during {method}")
            raise

    def _call(self, method: str, arguments: Any, listener: Callable[[], None] | None) -> dict[int, Any]:
        import ray

        pending = {call: rank for rank, call in enumerate(self._all("run", method, arguments))}
        polls = _Polls(self._actors, self._watch)
        outcomes: dict[int, Any] = {}
        listened = False
        self._watch.begin()
        while pending and self.failure is None:
            done, _ = ray.wait(list(pending), timeout=self._settings.tick_seconds)
            for call in done:
                rank = pending.pop(call)
                outcomes[rank] = self._outcome(rank, call)
                self._watch.finished(rank)
            if polls.rank_0_moved() and listener is not None and pending:
                listened = True
                listener()
            if stuck := self._watch.stuck() if pending else []:
                self.fail("; ".join(rank.describe() for rank in stuck), [rank.rank for rank in stuck])
        if self.failure is not None:
            self.wait_gone()
            raise WorkerDied(f"{self.failure}\nduring {method}; the next call starts the ranks again")
        if listener is not None and not listened:
            listener()  # a call that was over before the first look
        return outcomes

    def _outcome(self, rank: int, call: Any) -> Any:
        """What the rank returned; None when it, or the group, is over."""
        import ray

        from engine.cluster.rank_actor import Failure, Outcome

        try:
            outcome = ray.get(call)
        except ray.exceptions.RayActorError:
            self._fail_by_death(rank)
            return None
        except ray.exceptions.RayTaskError as error:  # what it returned cannot be sent
            return Outcome(failure=Failure("", f"rank {rank}: {type(error.cause).__name__}: {error.cause}"))
        failure = outcome.failure
        if failure is not None and failure.ends_group:
            if not failure.is_cause and self._wait_for_a_death():
                self._fail_by_death()
            else:
                self.fail(f"rank {rank}: {failure.message}{self._log_tail(rank)}")
        return outcome

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors]

    # -- deaths -----------------------------------------------------------------------------------------------

    def _wait_for_a_death(self) -> bool:
        import ray

        return bool(ray.wait(self._lives, timeout=CULPRIT_SECONDS)[0])

    def _fail_by_death(self, rank: int | None = None) -> None:
        """Ends the generation because an actor is dead: `rank`, or those that Ray knows of."""
        import ray

        dead, _ = ray.wait(self._lives, num_returns=len(self._lives), timeout=0)
        ranks = sorted({self._lives.index(life) for life in dead} | ({rank} if rank is not None else set()))
        causes = [_cause(self._lives[number]) for number in ranks]
        self.lost_machine = any(NODE_DIED in cause for cause in causes)
        reasons = [f"rank {number} died: {cause}" for number, cause in zip(ranks, causes, strict=True)]
        self.fail("; ".join(reasons) + self._log_tail(ranks[0]))

    def _stacks(self, ranks: list[int]) -> str:
        """The stacks of all ranks that answer, and the end of the log of the first of `ranks`."""
        import ray

        calls = {self._actors[rank].stacks.remote(): rank for rank in range(self._settings.ranks)}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=STACK_SECONDS)
        texts = []
        for call in done:
            with suppress(ray.exceptions.RayError):
                texts.append(f"\nstacks of rank {calls[call]}:\n{ray.get(call)}")
        return "".join(texts) + self._log_tail(ranks[0])

    def _log_tail(self, rank: int) -> str:
        """The end of what the rank printed, where its logs are on this machine."""
        return self.processes[rank].log_tail() if rank in self.processes else ""


class _Polls:
    """Questions to the ranks during a call: how far are you?"""

    def __init__(self, actors: list[Any], watch: HangDetector) -> None:
        self._actors, self._watch = actors, watch
        self._asked: dict[int, Any] = {}

    def rank_0_moved(self) -> bool:
        """Takes the answers there are, and asks again. Returns whether rank 0 made progress since the last time."""
        import ray

        moved = False
        for rank, actor in enumerate(self._actors):
            call = self._asked.get(rank)
            if call is not None:
                if not ray.wait([call], timeout=0)[0]:
                    self._watch.heard_nothing(rank)
                    continue
                with suppress(ray.exceptions.RayError):  # its death is told by the call itself
                    further = self._watch.saw(rank, *ray.get(call))
                    moved = moved or (further and rank == 0)
            self._asked[rank] = actor.activity.remote()
        return moved


def _cause(life: Any) -> str:
    """Why an actor is dead, in Ray's words."""
    import ray

    try:
        ray.get(life, timeout=0)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if "dead" in line or "died" in line or "exit" in line]
        words = (lines or [str(error)])[-1].strip()
        if NEVER_OWNED in words:
            hint = " (this process and the cluster must both use a token or both not: give them the same RAY_AUTH_MODE)"
        else:
            hint = "" if NODE_DIED in words else " (if nobody ended it, memory may have run out)"
        return words.partition(" Some common causes")[0] + hint
    return "it is gone"
