"""The fair queue of calls of one lane of the engine: its trainer lane, or its sampler lane.

It implements start-time fair queueing (Goyal, Vin, Cheng 1996) with measured costs. Each run has a virtual time: the
compute seconds that it has used. The run with the lowest virtual time goes next. A run that had no calls waiting starts
again at the virtual time of the call that began last, so that it is owed nothing for its absence.

Calls of one run begin in the order of `_Job.order`, and a running call is never interrupted. A run that had no calls
therefore waits for at most one call of each other run. A run that was just served also waits until each other run has
used as many seconds as its own last call took.

A queue with several threads runs calls of the same group at the same time: in the sampler lane these are the calls that
sample from the same weights. Calls of another group begin when those of the running group have ended. Of the group that
begins, as many waiting calls as there are threads go first, so that runs with different weights do not change them for
every call.

`GenerationBatcher` combines concurrent generation calls for the same policy and the same sampling parameters into one
batch, so that runs that share weights fill the device together. Which calls share a batch changes only the rounding,
never the distribution. An engine with `deterministic=true` does not use it, since it promises equal bytes.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.backends.protocol import Interrupted, Sampler
from engine.errors import EngineBusy, PermanentEngineError, TransientEngineError
from engine.models.images import Images, check_images_accepted
from engine.protocol import Completion, GenerateRequest, OnToken, TokenIds

R = TypeVar("R")


class Abandoned(TransientEngineError):
    """Raised within a call whose caller was cancelled."""


@dataclass(slots=True)
class _Job:
    """One call in the queue."""

    function: Callable[[], Any]
    group: Hashable = None
    """Calls of the same group may run at the same time. None: the call runs alone."""
    cost: Callable[[Any], float] | None = None
    """Returns the cost of the call from its result. None: its seconds."""
    order: tuple[int, ...] = ()
    """The waiting calls of a run begin by this order, and equal ones in the order in which they came."""
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    """Whether its caller was cancelled."""


@dataclass(slots=True)
class _Line:
    """The waiting calls of one run, and its virtual time in seconds, or in what the `cost` of its calls counts."""

    jobs: deque[_Job] = field(default_factory=deque)
    virtual: float = 0.0
    running: int = 0
    """Number of its calls that have begun and not ended."""


class FairQueue:
    """Runs calls in threads of its own, those of the least served run first. `clock` returns seconds."""

    def __init__(
        self,
        *,
        name: str,
        threads: int = 1,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: the largest number of calls of one group that run at the same time. Each thread calls `prepare`
        first."""
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._running: list[_Job] = []
        self._first: list[_Job] = []
        """Waiting calls of the running group that go before all others."""
        self._of_thread = threading.local()
        self._floor = 0.0
        """Virtual time of the call that began last. A run without waiting calls starts from it."""
        self._clock = clock
        self._threads = []
        for number in range(threads):
            thread_name = name if threads == 1 else f"{name}-{number}"
            thread = threading.Thread(target=self._work, args=(prepare,), name=thread_name, daemon=True)
            self._threads.append(thread)
            thread.start()

    async def run(
        self,
        line: str,
        function: Callable[[], R],
        *,
        group: Hashable = None,
        cost: Callable[[R], float] | None = None,
        order: tuple[int, ...] = (),
    ) -> R:
        """Calls `function` in a thread of the queue when it is the turn of `line`, and returns its result. For `group`,
        `cost` and `order`, see `_Job`; a call that fails costs its seconds.

        Cancelling the caller removes a waiting call from the queue. A running call ends at its next `check`."""
        job = _Job(function, group, cost, order)
        with self._changed:
            if self._closed:
                raise EngineBusy("the engine is closing; call again when it is back")
            entry = self._lines.setdefault(line, _Line(virtual=self._floor))
            # An idle run must not save up time and then keep all others waiting.
            if not entry.jobs:
                entry.virtual = max(entry.virtual, self._floor)
            entry.jobs.insert(bisect_right(entry.jobs, order, key=lambda waiting: waiting.order), job)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandoned = True
            raise

    def check(self) -> None:
        """Raises Abandoned when the caller of this thread's call was cancelled. Long calls call it now and then."""
        job: _Job | None = getattr(self._of_thread, "job", None)
        if job is not None and job.abandoned:
            raise Abandoned("the caller of this call is gone")

    def waiting(self) -> int:
        """Number of calls that have not begun."""
        with self._changed:
            return sum(len(line.jobs) for line in self._lines.values())

    def close(self) -> None:
        """Refuses new calls, ends waiting ones with EngineBusy, and returns when the running calls have ended."""
        with self._changed:
            self._closed = True
            dropped: list[_Job] = []
            for line in self._lines.values():
                dropped += line.jobs
            self._lines.clear()
            self._changed.notify_all()
        # Set the errors outside the lock: a callback of a future may call the queue again.
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineBusy("the engine closed before this call began; call again"))
        for thread in self._threads:
            thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        """The loop of one thread."""
        prepare()
        while True:
            entry = self._next()
            if entry is None:
                return
            line, job = entry
            try:
                if job.future.set_running_or_notify_cancel():  # otherwise its caller was cancelled
                    self._call(line, job)
            finally:
                with self._changed:
                    self._running.remove(job)
                    line.running -= 1
                    self._changed.notify_all()
            del entry, line, job  # while the thread waits, it must not keep what the call used

    def _call(self, line: _Line, job: _Job) -> None:
        """Runs a call, and charges its run for it, also when it failed."""
        self._of_thread.job, start = job, self._clock()
        cost: float | None = None
        result: Any = None
        failure: BaseException | None = None
        try:
            result = job.function()
            cost = job.cost(result) if job.cost is not None else None
        except BaseException as error:  # noqa: BLE001 - every error is passed to the caller
            _clear_frames(error)
            failure = error
        self._of_thread.job = None
        with self._changed:
            line.virtual += self._clock() - start if cost is None else cost
        if failure is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(failure)

    def _next(self) -> tuple[_Line, _Job] | None:
        """Waits for a call that may begin, and takes it out of its line. None when the queue is closed."""
        with self._changed:
            while not self._closed:
                name = self._line_that_may_begin()
                if name is not None:
                    line = self._lines[name]
                    job = line.jobs.popleft()
                    self._floor = max(self._floor, line.virtual) if self._running else line.virtual
                    line.running += 1
                    self._begin(job)
                    self._forget_idle(keep=name)
                    return line, job
                self._changed.wait()
            return None

    def _line_that_may_begin(self) -> str | None:
        """The name of the line whose first call may begin now."""
        # The least served run, and of equal ones the first by name.
        order = sorted((line.virtual, name) for name, line in self._lines.items() if line.jobs)
        names = [name for _, name in order]
        if not self._running:
            return names[0] if names else None
        for name in names:
            if self._lines[name].jobs[0] in self._first:
                return name
        # Once the next call in turn is one of another group, no call begins until the running ones have ended.
        group = self._running[0].group
        if names and group is not None and self._lines[names[0]].jobs[0].group == group:
            return names[0]
        return None

    def _begin(self, job: _Job) -> None:
        if not self._running:
            # Another group begins, or the same one again.
            waiting = [other for line in self._lines.values() for other in line.jobs]
            same = [other for other in waiting if other.group is not None and other.group == job.group]
            self._first = same[: len(self._threads) - 1]
        elif job in self._first:
            self._first.remove(job)
        self._running.append(job)

    def _forget_idle(self, *, keep: str) -> None:
        """Deletes the lines that have no calls and are not ahead of the floor. A service sees very many runs."""
        idle = []
        for name, line in self._lines.items():
            if not line.jobs and not line.running and name != keep and line.virtual <= self._floor:
                idle.append(name)
        for name in idle:
            del self._lines[name]


def _clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames in the error's traceback, which would keep weights in memory."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


class Interruption:
    """Tells an interruptible call when to end: after `seconds` of sampling, or when `set` was called. Thread-safe."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._deadline: float | None = None
        self._event = threading.Event()

    def begin(self) -> None:
        """Starts the time limit, when the call begins to sample."""
        if self._seconds is not None:
            self._deadline = self._clock() + self._seconds

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set() or (self._deadline is not None and self._clock() >= self._deadline)


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """The generation request of one caller, and its completions once a batch contained it."""

    request: GenerateRequest
    on_token: OnToken | None = None
    interruption: Interruption | None = None
    """None: the call is not interruptible."""
    completions: list[Completion] | None = None
    abandoned: bool = False
    """Whether its caller was cancelled."""

    @property
    def is_interrupted(self) -> bool:
        return self.interruption is not None and self.interruption.is_set()

    def without_tokens(self) -> list[Completion]:
        """The answer to an interruptible call that sampled nothing."""
        return [Completion([], [], "interrupted") for _ in self.request.prompts]


RunSampler = Callable[[GenerateRequest, OnToken, Interrupted | None], list[Completion]]


def _images_of_prompts(batch: Sequence[PendingGeneration]) -> list[Images] | None:
    """The images of all prompts of the batch, in order. None when no call has images."""
    if all(call.request.images is None for call in batch):
        return None
    images: list[Images] = []
    for call in batch:
        images += call.request.images or [()] * len(call.request.prompts)
    return images


def _sampled_of_prompts(batch: Sequence[PendingGeneration]) -> list[TokenIds] | None:
    """The tokens that the completions of the batch have already, in order. None when all completions begin."""
    if all(call.request.sampled is None for call in batch):
        return None
    sampled: list[TokenIds] = []
    for call in batch:
        sampled += call.request.sampled or [[] for _ in call.request.prompts]
    return sampled


def sample_completions(
    sampler: Sampler, request: GenerateRequest, on_token: OnToken, interrupted: Interrupted | None = None
) -> list[Completion]:
    """The sampler's completions of the request. Raises UnsupportedFragment if it does not accept the images."""
    options: dict[str, Any] = {}
    if request.images is not None and any(request.images):
        check_images_accepted(sampler, request.images, "prompts")
        options["images"] = request.images
    if request.sampled is not None:
        options["sampled"] = request.sampled
    if interrupted is not None:
        options["interrupted"] = interrupted
    return sampler.sample(request.prompts, request.seeds, request.sampling, on_token, **options)


class GenerationBatcher:
    """The waiting generation calls of an engine, grouped by policy state and sampling parameters.

    The event loop calls `add` and `remove`, and the threads of the lanes call `complete`.
    """

    def __init__(self, *, max_rows: int) -> None:
        self._waiting: dict[Hashable, list[PendingGeneration]] = {}
        self._max_rows = max_rows

    @staticmethod
    def _key(call: PendingGeneration) -> Hashable:
        request = call.request
        key: tuple[Hashable, ...] = (request.policy.state, request.sampling, request.tensor_parallel)
        # Calls that share a batch are interrupted together.
        if request.interruptible:
            key = (*key, request.policy, request.interrupt_after)
        return key

    def add(self, call: PendingGeneration) -> None:
        self._waiting.setdefault(self._key(call), []).append(call)

    def remove(self, call: PendingGeneration) -> None:
        """Forgets a call that has its completions or whose caller was cancelled. Idempotent."""
        waiting = self._waiting.get(self._key(call), [])
        if call in waiting:
            waiting.remove(call)
        if not waiting:
            self._waiting.pop(self._key(call), None)

    def complete(self, call: PendingGeneration, run_sampler: RunSampler) -> list[Completion]:
        """The call's completions, sampled together with those of compatible waiting calls."""
        if call.completions is None:
            self._sample_batch(self._batch_with(call), run_sampler)
        assert call.completions is not None  # _sample_batch sets them for every call of its batch, or raises
        return call.completions

    def complete_alone(self, call: PendingGeneration, run_sampler: RunSampler) -> list[Completion]:
        """The call's completions, sampled in a batch of its own."""
        if call.completions is None:
            self._sample_batch([call], run_sampler)
        assert call.completions is not None
        return call.completions

    def _batch_with(self, call: PendingGeneration) -> list[PendingGeneration]:
        """The call and the waiting calls that fit into one decoding batch with it.

        A call that was never added is alone in its batch."""
        batch, rows = [call], len(call.request.prompts)
        waiting = self._waiting.get(self._key(call), [])
        if call not in waiting:
            return batch
        # sorted: also a copy, because the event loop may add and remove calls meanwhile
        for other in sorted(waiting, key=lambda waiting_call: waiting_call.request.order):
            fits = rows + len(other.request.prompts) <= self._max_rows
            if other is not call and other.completions is None and fits:
                batch.append(other)
                rows += len(other.request.prompts)
        return batch

    def _sample_batch(self, batch: list[PendingGeneration], run_sampler: RunSampler) -> None:
        """Samples one batch and gives each of its calls its completions."""
        # Join the requests into one. Each prompt has its own seed, so its completion does not depend on the others.
        first = batch[0].request
        prompts: list[TokenIds] = []
        seeds: list[int] = []
        for call in batch:
            prompts += call.request.prompts
            seeds += call.request.seeds
        request = replace(
            first, prompts=prompts, seeds=seeds, images=_images_of_prompts(batch), sampled=_sampled_of_prompts(batch)
        )
        interruptions = [call.interruption for call in batch if call.interruption is not None]

        def interrupted() -> bool:
            return any(interruption.is_set() for interruption in interruptions)

        def on_token(index: int, token: int, logprob: float) -> None:
            if all(call.abandoned for call in batch):
                raise Abandoned("the callers of this generation are gone")
            if batch[0].on_token is not None:  # such a call is alone in its batch: see LocalEngine.generate
                batch[0].on_token(index, token, logprob)

        for interruption in interruptions:
            interruption.begin()
        try:
            completions = run_sampler(request, on_token, interrupted if interruptions else None)
        except PermanentEngineError:
            if len(batch) == 1:
                raise
            # A prompt of one call is at fault. Each call is now sampled alone, so that only that call fails.
            self._sample_batch(batch[:1], run_sampler)
            return

        # Split the completions by call.
        for call in batch:
            count = len(call.request.prompts)
            call.completions, completions = completions[:count], completions[count:]
