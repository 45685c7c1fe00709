"""The table of calls of an engine server. A call is submitted once under its id; its result is kept for a while.

A client that loses a connection asks for the result again, so that a call has one effect however often it is sent. The
table is bounded: by the number of unfinished calls and the bytes they hold, and by the number, bytes and age of
results."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.http.errors import BodyTooLarge, CallConflict, NotAdmitted, UnknownCall


@dataclass(frozen=True)
class CallResult:
    """The result of a finished call, in the form in which HTTP sends it."""

    status: int
    body: bytes
    media_type: str = "application/json"

    @property
    def transient(self) -> bool:
        return self.status >= 500


@dataclass(frozen=True)
class CallLimits:
    """Bounds of the table."""

    waiting: int = 4096
    """Most unfinished calls."""
    waiting_of_verb: int = 256
    """Most unfinished calls of one verb of one run, so that the samples of a large step keep neither its gradient step
    nor another run out."""
    waiting_bytes: int = 2 << 30
    """Memory of the bodies of unfinished calls and of what they decode to, including bodies that are still arriving."""
    finished: int = 1024
    """Most results that are kept."""
    finished_bytes: int = 256 << 20
    """Most bytes of results that are kept."""
    finished_seconds: float = 900
    """How long a result is kept after it was last asked for."""
    abandoned_seconds: float = 600
    """An unfinished call that no client has asked for in this time is cancelled: its client has died."""


@dataclass
class SubmittedCall:
    """One call in the table."""

    id: str
    verb: str
    digest: str
    run: str
    size: int
    """Memory of its body and of what it decodes to, in bytes."""
    task: asyncio.Task[CallResult]
    last_requested: float
    """When a client last submitted the call or asked for its result, by the table's clock."""
    started: float
    waiters: int = 0
    """Requests that wait for its result at this moment."""
    delivered: bool = False
    """Whether its result has been sent at least once."""

    @property
    def result(self) -> CallResult | None:
        """The result, or None while the call is not finished."""
        return self.task.result() if self.task.done() and not self.task.cancelled() else None


@dataclass
class CallTable:
    """All calls that a server knows. Used in one event loop."""

    limits: CallLimits = field(default_factory=CallLimits)
    clock: Callable[[], float] = time.monotonic
    calls: OrderedDict[str, SubmittedCall] = field(default_factory=OrderedDict)
    reserved_bytes: int = 0
    """Memory of bodies that are being read or belong to unfinished calls, and of what those decode to."""

    def submit(
        self, id: str, work: Callable[[], Awaitable[CallResult]], *, verb: str, digest: str, run: str, size: int
    ) -> SubmittedCall:
        """Starts a call, or returns the call with this id. A call that failed transiently is started again.

        Raises CallConflict, NotAdmitted, BodyTooLarge.
        """
        # A call of this id: a retry joins it, unless its result may change on a retry.
        known = self.calls.get(id)
        if known is not None:
            if (known.verb, known.digest) != (verb, digest):
                raise CallConflict(f"the request id {id} belongs to another {known.verb} call; make a new id per call")
            if known.result is None or not known.result.transient:
                known.last_requested = self.clock()
                return known
            del self.calls[id]

        # A new call, if there is room. Its memory is released when its task ends, in whatever way.
        self._check_count(verb, run)
        self._check_room(verb, size)
        now = self.clock()
        task = asyncio.create_task(_run(work), name=f"{verb} {id}")
        call = SubmittedCall(id, verb, digest, run, size, task, last_requested=now, started=now)
        self.reserve(size)
        task.add_done_callback(lambda _: self.reserve(-size))
        self.calls[id] = call
        return call

    async def wait(self, call: SubmittedCall, seconds: float) -> CallResult | None:
        """Returns the result, or None if there is none after `seconds`. Raises UnknownCall if the call is cancelled."""
        # A call with waiters is never swept, and a waiter that gives up does not end the call.
        call.waiters += 1
        try:
            await asyncio.wait({call.task}, timeout=seconds)
        finally:
            call.waiters -= 1
            call.last_requested = self.clock()
        if call.task.cancelled():
            raise UnknownCall(f"the call {call.id} was taken back; submit it again")
        if call.result is not None:
            call.delivered = True
        return call.result

    def find(self, id: str) -> SubmittedCall:
        """Returns the call with this id. Raises UnknownCall."""
        call = self.calls.get(id)
        if call is None:
            raise UnknownCall(f"this server knows no call {id}; submit it again")
        call.last_requested = self.clock()
        return call

    def drop(self, id: str) -> None:
        """Forgets the call, and cancels it if it has not begun. An unknown id is accepted."""
        call = self.calls.pop(id, None)
        if call is not None:
            call.task.cancel()

    def waiting(self) -> int:
        """Returns the number of unfinished calls."""
        return len(self._unfinished())

    def _unfinished(self) -> list[SubmittedCall]:
        return [call for call in self.calls.values() if not call.task.done()]

    def _check_count(self, verb: str, run: str) -> None:
        """Raises NotAdmitted if as many calls wait as the server takes."""
        unfinished, limits = self._unfinished(), self.limits
        if len(unfinished) >= limits.waiting:
            raise NotAdmitted(f"{limits.waiting} calls wait for this engine already; call again in a moment")
        same = sum((call.verb, call.run) == (verb, run) for call in unfinished)
        if same >= limits.waiting_of_verb:
            raise NotAdmitted(
                f"{limits.waiting_of_verb} {verb} calls of run {run} wait for this engine already; call again later"
            )

    # -- memory ------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Adds `size` bytes to the reserved memory. A negative size releases it."""
        self.reserved_bytes += size

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Reserves memory for a body whose call is not submitted yet."""
        self.reserve(size)
        try:
            yield
        finally:
            self.reserve(-size)

    def has_room(self, size: int) -> bool:
        return self.reserved_bytes + size <= self.limits.waiting_bytes

    def _check_room(self, verb: str, size: int) -> None:
        limit = self.limits.waiting_bytes
        if size > limit:
            raise BodyTooLarge(
                f"this {verb} call needs {size >> 20} MiB of memory when it is decoded, and this server takes at most "
                f"{limit >> 20} MiB; send it in several calls"
            )
        if not self.has_room(size):
            raise NotAdmitted(
                f"this {verb} call needs {size >> 20} MiB of memory when it is decoded, and the calls that wait leave "
                f"{max(0, limit - self.reserved_bytes) >> 20} of {limit >> 20} MiB; call again in a moment"
            )

    # -- removal -----------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Removes calls that are too old, abandoned or too many. Results that were delivered are removed first."""
        # Remove calls that no client has asked for in a long time.
        now = self.clock()
        for call in list(self.calls.values()):
            limit = self.limits.finished_seconds if call.task.done() else self.limits.abandoned_seconds
            if call.waiters == 0 and now - call.last_requested > limit:
                self.drop(call.id)

        # Remove results beyond the bounds. The last one stays, however large it is, or its client would never get it.
        finished = [call for call in self.calls.values() if call.task.done()]
        finished.sort(key=lambda call: (not call.delivered, call.last_requested))
        size = sum(_result_bytes(call) for call in finished)
        while len(finished) > 1 and (len(finished) > self.limits.finished or size > self.limits.finished_bytes):
            call = finished.pop(0)
            size -= _result_bytes(call)
            self.drop(call.id)


def _result_bytes(call: SubmittedCall) -> int:
    return 0 if call.result is None else len(call.result.body)


async def _run(work: Callable[[], Awaitable[CallResult]]) -> CallResult:
    return await work()
