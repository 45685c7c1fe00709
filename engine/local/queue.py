"""The fair queue of calls for the engine's one compute thread.

It implements start-time fair queueing (Goyal, Vin, Cheng 1996) with measured costs. Each run has a virtual time: the
compute seconds that it has used. The run with the lowest virtual time goes next. A run that had no calls waiting starts
again at the virtual time of the call that began last, so that it is owed nothing for its absence.

Calls of one run stay in order, and a running call is never interrupted. A run that had no calls therefore waits for at
most one call of each other run. A run that was just served also waits until each other run has used as many seconds
as its own last call took.

`GenerationBatcher` combines concurrent generation calls for the same policy and the same sampling parameters into one
batch, so that runs that share weights fill the device together. Which calls share a batch changes only the rounding,
never the distribution. An engine with `deterministic=true` does not use it, since it promises equal bytes.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.backends.protocol import Sampler
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
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    """Whether its caller was cancelled."""


@dataclass(slots=True)
class _Line:
    """The waiting calls of one run, and its virtual time in seconds."""

    jobs: deque[_Job] = field(default_factory=deque)
    virtual: float = 0.0


class FairQueue:
    """Runs calls in a thread of its own, those of the least served run first. `clock` returns seconds."""

    def __init__(
        self, *, name: str, prepare: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._running: _Job | None = None
        self._floor = 0.0
        """Virtual time of the call that began last. A run without waiting calls starts from it."""
        self._clock = clock
        self._thread = threading.Thread(target=self._work, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    async def run(self, line: str, function: Callable[[], R]) -> R:
        """Calls `function` in the compute thread when it is the turn of `line`, and returns its result.

        Cancelling the caller removes a waiting call from the queue. A running call ends at its next `check`."""
        job = _Job(function)
        with self._changed:
            if self._closed:
                raise EngineBusy("the engine is closing; call again when it is back")
            entry = self._lines.setdefault(line, _Line(virtual=self._floor))
            # An idle run must not save up time and then keep all others waiting.
            if not entry.jobs:
                entry.virtual = max(entry.virtual, self._floor)
            entry.jobs.append(job)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandoned = True
            raise

    def check(self) -> None:
        """Raises Abandoned when the caller of the running call was cancelled. Long calls call it now and then."""
        if self._running is not None and self._running.abandoned:
            raise Abandoned("the caller of this call is gone")

    def waiting(self) -> int:
        """Number of calls that have not begun."""
        with self._changed:
            return sum(len(line.jobs) for line in self._lines.values())

    def close(self) -> None:
        """Refuses new calls, ends waiting ones with EngineBusy, and returns when the running call has ended."""
        with self._changed:
            self._closed = True
            dropped: list[_Job] = []
            for line in self._lines.values():
                dropped += line.jobs
            self._lines.clear()
            self._changed.notify()
        # Set the errors outside the lock: a callback of a future may call the queue again.
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineBusy("the engine closed before this call began; call again"))
        self._thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        """The loop of the compute thread."""
        prepare()
        while True:
            entry = self._next()
            if entry is None:
                return
            line, job = entry
            if not job.future.set_running_or_notify_cancel():
                continue  # its caller was cancelled

            # Charge the run for the seconds that its call took, also when the call failed.
            self._running, start = job, self._clock()
            try:
                result = job.function()
            except BaseException as error:  # noqa: BLE001 - every error is passed to the caller
                _clear_frames(error)
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            line.virtual += self._clock() - start

    def _next(self) -> tuple[_Line, _Job] | None:
        """Waits for a call and takes it out of its line. None when the queue is closed."""
        with self._changed:
            while not self._closed and not any(line.jobs for line in self._lines.values()):
                self._changed.wait()
            if self._closed:
                return None

            # The least served run, and of equal ones the first by name.
            waiting = [(line.virtual, name) for name, line in self._lines.items() if line.jobs]
            self._floor, name = min(waiting)
            line = self._lines[name]
            self._forget_idle(keep=name)
            return line, line.jobs.popleft()

    def _forget_idle(self, *, keep: str) -> None:
        """Deletes the lines that have no calls and are not ahead of the floor. A service sees very many runs."""
        idle = []
        for name, line in self._lines.items():
            if not line.jobs and name != keep and line.virtual <= self._floor:
                idle.append(name)
        for name in idle:
            del self._lines[name]


def _clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames in the error's traceback, which would keep weights in memory."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """The generation request of one caller, and its completions once a batch contained it."""

    request: GenerateRequest
    on_token: OnToken | None = None
    completions: list[Completion] | None = None
    abandoned: bool = False
    """Whether its caller was cancelled."""


RunSampler = Callable[[GenerateRequest, OnToken], list[Completion]]


def _images_of_prompts(batch: Sequence[PendingGeneration]) -> list[Images] | None:
    """The images of all prompts of the batch, in order. None when no call has images."""
    if all(call.request.images is None for call in batch):
        return None
    images: list[Images] = []
    for call in batch:
        images += call.request.images or [()] * len(call.request.prompts)
    return images


def sample_completions(sampler: Sampler, request: GenerateRequest, on_token: OnToken) -> list[Completion]:
    """The sampler's completions of the request. Raises UnsupportedFragment if it does not accept the images."""
    images: dict[str, Any] = {}
    if request.images is not None and any(request.images):
        check_images_accepted(sampler, request.images, "prompts")
        images = {"images": request.images}
    return sampler.sample(request.prompts, request.seeds, request.sampling, on_token, **images)


class GenerationBatcher:
    """The waiting generation calls of an engine, grouped by policy state and sampling parameters.

    The event loop calls `add` and `remove`. The compute thread calls `complete`.
    """

    def __init__(self, *, max_rows: int) -> None:
        self._waiting: dict[Hashable, list[PendingGeneration]] = {}
        self._max_rows = max_rows

    @staticmethod
    def _key(call: PendingGeneration) -> Hashable:
        return call.request.policy.state, call.request.sampling, call.request.tensor_parallel

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

    def _batch_with(self, call: PendingGeneration) -> list[PendingGeneration]:
        """The call and the waiting calls that fit into one decoding batch with it.

        A call that was never added is alone in its batch."""
        batch, rows = [call], len(call.request.prompts)
        waiting = self._waiting.get(self._key(call), [])
        if call not in waiting:
            return batch
        for other in waiting[:]:  # a copy, because the event loop may add and remove calls meanwhile
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
        images = _images_of_prompts(batch)
        request = GenerateRequest(first.policy, prompts, seeds, first.sampling, first.tensor_parallel, images)

        def on_token(index: int, token: int, logprob: float) -> None:
            if all(call.abandoned for call in batch):
                raise Abandoned("the callers of this generation are gone")
            if batch[0].on_token is not None:  # such a call is alone in its batch: see LocalEngine.generate
                batch[0].on_token(index, token, logprob)

        try:
            completions = run_sampler(request, on_token)
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
