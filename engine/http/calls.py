"""Calls as jobs: submitted once under their id, asked for until they are done, kept for a while after that.

A lost connection or acknowledgement costs a question, never a second effect. The table is bounded: in calls that wait
and the bytes they hold, and in finished answers by number, bytes and age.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from engine.errors import EngineBusy
from engine.http.errors import CallConflict, UnknownCall


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
    waiting_bytes: int = 1 << 30
    """Bodies of calls that are not finished, those still arriving included."""
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
    """Bytes of its body."""
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
    """Of bodies that are being read, or belong to unfinished calls."""

    def submit(
        self, id: str, work: Callable[[], Awaitable[Answer]], *, verb: str, digest: str, run: str, size: int
    ) -> Call:
        """Starts the call, or joins the one of this id. A transient failure is not joined: the caller tries again.

        Raises CallConflict, EngineBusy.
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

    def has_room(self, size: int) -> bool:
        return self.arriving_bytes + size <= self.limits.waiting_bytes

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
