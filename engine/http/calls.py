"""Calls as jobs: submitted once under their id, asked for until they are done, kept for a while after that.

A lost connection or acknowledgement costs a question, never a second effect. The table is bounded: in calls that wait
and the bytes they hold, and in finished answers by number, bytes and age.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.errors import EngineBusy
from engine.http.errors import BodyTooLarge, CallConflict, UnknownCall


@dataclass(frozen=True)
class Answer:
    """A finished call, as it goes over the wire."""

    status: int
    body: bytes
    media_type: str = "application/json"

    @property
    def transient(self) -> bool:
        return self.status >= 500


@dataclass(frozen=True)
class CallLimits:
    """Bounds of the table."""

    waiting: int = 256
    waiting_bytes: int = 2 << 30
    """Memory of the bodies of calls that are not finished, and of what they decode to; bodies that still arrive
    included."""
    finished: int = 1024
    finished_bytes: int = 256 << 20
    finished_seconds: float = 900
    abandoned_seconds: float = 600
    """A call that nobody asked for so long is taken back: its caller died."""


@dataclass
class Call:
    """One logical call."""

    id: str
    verb: str
    digest: str
    run: str
    size: int
    """Memory of its body and of what it decodes to, in bytes."""
    task: asyncio.Task[Answer]
    asked: float
    """When somebody last submitted or asked for it."""
    started: float
    askers: int = 0
    delivered: bool = False

    @property
    def answer(self) -> Answer | None:
        return self.task.result() if self.task.done() and not self.task.cancelled() else None


@dataclass
class CallTable:
    """Every call this server knows. Lives in one event loop."""

    limits: CallLimits = field(default_factory=CallLimits)
    clock: Callable[[], float] = time.monotonic
    calls: OrderedDict[str, Call] = field(default_factory=OrderedDict)
    arriving_bytes: int = 0
    """Memory of bodies that are being read or belong to unfinished calls, and of what those decode to."""

    def submit(
        self, id: str, work: Callable[[], Awaitable[Answer]], *, verb: str, digest: str, run: str, size: int
    ) -> Call:
        """Starts the call, or joins the one of this id. A transient failure is not joined: the caller tries again.

        Raises CallConflict, EngineBusy, BodyTooLarge.
        """
        known = self.calls.get(id)
        if known is not None:
            if (known.verb, known.digest) != (verb, digest):
                raise CallConflict(f"the request id {id} belongs to another {known.verb} call; make a new id per call")
            if known.answer is None or not known.answer.transient:
                known.asked = self.clock()
                return known
            del self.calls[id]
        if self.waiting() >= self.limits.waiting:
            raise EngineBusy(f"{self.limits.waiting} calls wait for this engine already; call again in a moment")
        self._check_room(verb, size)
        now = self.clock()
        task = asyncio.create_task(_run(work), name=f"{verb} {id}")
        call = Call(id, verb, digest, run, size, task, asked=now, started=now)
        self.hold(size)
        task.add_done_callback(lambda _: self.hold(-size))
        self.calls[id] = call
        return call

    async def wait(self, call: Call, seconds: float) -> Answer | None:
        """The answer, or None when there is none after so many seconds. Raises UnknownCall when it was taken back."""
        call.askers += 1
        try:
            await asyncio.wait({call.task}, timeout=seconds)
        finally:
            call.askers -= 1
            call.asked = self.clock()
        if call.task.cancelled():
            raise UnknownCall(f"the call {call.id} was taken back; submit it again")
        if call.answer is not None:
            call.delivered = True
        return call.answer

    def find(self, id: str) -> Call:
        """Raises UnknownCall."""
        call = self.calls.get(id)
        if call is None:
            raise UnknownCall(f"this server knows no call {id}; submit it again")
        call.asked = self.clock()
        return call

    def drop(self, id: str) -> None:
        """Takes the call back if it has not begun, and forgets it. An unknown one is fine."""
        call = self.calls.pop(id, None)
        if call is not None:
            call.task.cancel()

    def waiting(self) -> int:
        """Calls that are not finished."""
        return sum(not call.task.done() for call in self.calls.values())

    def hold(self, size: int) -> None:
        self.arriving_bytes += size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Counts a body that has arrived and whose call is not submitted yet."""
        self.hold(size)
        try:
            yield
        finally:
            self.hold(-size)

    def has_room(self, size: int) -> bool:
        return self.arriving_bytes + size <= self.limits.waiting_bytes

    def _check_room(self, verb: str, size: int) -> None:
        most = self.limits.waiting_bytes
        if size > most:
            raise BodyTooLarge(
                f"this {verb} call needs {size >> 20} MiB of memory when it is decoded, and this server takes at most "
                f"{most >> 20} MiB; send it in several calls"
            )
        if not self.has_room(size):
            raise EngineBusy(
                f"this {verb} call needs {size >> 20} MiB of memory when it is decoded, and the calls that wait leave "
                f"{max(0, most - self.arriving_bytes) >> 20} of {most >> 20} MiB; call again in a moment"
            )

    def sweep(self) -> None:
        """Forgets what is old, abandoned or too much; answers that were handed out go first."""
        now = self.clock()
        for call in list(self.calls.values()):
            idle = now - call.asked
            if call.askers == 0 and idle > (
                self.limits.finished_seconds if call.task.done() else self.limits.abandoned_seconds
            ):
                self.drop(call.id)
        finished = [call for call in self.calls.values() if call.task.done()]
        finished.sort(key=lambda call: (not call.delivered, call.asked))
        size = sum(len(call.answer.body) for call in finished if call.answer is not None)
        while len(finished) > 1 and (len(finished) > self.limits.finished or size > self.limits.finished_bytes):
            call = finished.pop(0)
            size -= len(call.answer.body) if call.answer is not None else 0
            self.drop(call.id)


async def _run(work: Callable[[], Awaitable[Answer]]) -> Answer:
    return await work()
