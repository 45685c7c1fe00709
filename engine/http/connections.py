"""Limits on the server's connections: how many there are, how long a request head and a stalled answer may take.

A connection needs no token before its request is complete, so these limits are all that protects the process from
callers without one. What a complete request may do is decided in engine.http.guard.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

logger = logging.getLogger("ostinato.engine.http")

MOST_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 384
"""Open files that connections leave free: for the store, models, logs, and connections that are being accepted or
closed (at most about 4 times `ACCEPT_BATCH`)."""
ACCEPT_BATCH = 16
"""Connections that the event loop accepts before it turns to those it has."""
LISTEN_QUEUE = 1024
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
LOG_SECONDS = 60.0
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one server."""

    most: int = MOST_CONNECTIONS
    """Open connections."""
    head_seconds: float = 20.0
    """Longest time from the first byte of a request (or from the connection's start) to the end of its headers."""
    stall_seconds: float = 60.0
    """How often a caller that does not read its answer fast enough is looked at."""
    answer_rate: int = 8 << 10
    """Bytes a second that a caller must read of an answer that waits for it."""


def limits_of_process() -> ConnectionLimits:
    """Limits that leave descriptors for the store. Raises the soft limit of open files first, as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MOST_CONNECTIONS + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError) as error:  # macOS caps it below the hard limit
            logger.info("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return ConnectionLimits()
    return ConnectionLimits(most=max(1, min(MOST_CONNECTIONS, max(soft - RESERVED_DESCRIPTORS, soft // 4))))


class Connections(ServerState):
    """uvicorn's state of a server, with its connections sorted by what they wait for."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__()
        self.limits = limits
        # in the order in which they are closed when there are too many; within each, the oldest is closed first
        self.heads: dict[BoundedProtocol, float] = {}
        """Connections whose request head is not complete, with the time since when."""
        self.idle: dict[BoundedProtocol, float] = {}
        """Answered connections without another request."""
        self.bodies: dict[BoundedProtocol, float] = {}
        """Connections whose request body is not complete."""
        self._full = _OncePerMinute()

    def admit(self, connection: BoundedProtocol) -> None:
        """Takes a new connection in. At the limit the one closes that loses least by it, or else the new one."""
        if len(self.connections) > self.limits.most:
            victim = next((c for group in self._groups() for c in group), None)
            if self._full.passed():
                logger.warning(
                    "%d connections are open, the most this server takes (ulimit -n, at most %d): closing those that "
                    "have waited longest for a request",
                    self.limits.most,
                    MOST_CONNECTIONS,
                )
            if victim is None:  # every other connection waits for an answer
                self.connections.discard(connection)
                connection.transport.write(REFUSAL)
                connection.transport.close()
                return
            self.cut(victim)
        self.place(connection, self.heads)

    def place(self, connection: BoundedProtocol, group: dict[BoundedProtocol, float] | None) -> None:
        """Files a connection under what it waits for; None: for its answer. It keeps its place in the same group."""
        for other in self._groups():
            if other is not group:
                other.pop(connection, None)
        if group is not None:
            group.setdefault(connection, time.monotonic())

    def cut(self, connection: BoundedProtocol) -> None:
        """Closes a connection without an answer. It is no longer counted."""
        self.place(connection, None)
        self.connections.discard(connection)
        connection.transport.abort()

    def cut_slow_heads(self) -> None:
        """Closes the connections whose request head takes too long."""
        oldest = time.monotonic() - self.limits.head_seconds
        for connection, since in list(self.heads.items()):
            if since > oldest:
                return
            self.cut(connection)

    def _groups(self) -> tuple[dict[BoundedProtocol, float], ...]:
        return self.heads, self.idle, self.bodies


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with the limits of `Connections`."""

    server_state: Connections
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.server_state.admit(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._place(self.server_state.heads)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._place(self.server_state.idle)

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no HTTP. A request that is under way is not answered any more, by whatever comes of it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.place(self, None)
        self._watch_no_more()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_no_more()

    def _place(self, without_request: dict[BoundedProtocol, float]) -> None:
        state = self.server_state
        if self not in state.connections:  # refused or cut
            return
        if self.cycle is None or self.cycle.response_complete:
            state.place(self, without_request)
        else:
            state.place(self, state.bodies if self.cycle.more_body else None)

    # -- callers that do not read their answer -----------------------------------------------------------------

    def _watch(self) -> None:
        unread, seconds = self.transport.get_write_buffer_size(), self.server_state.limits.stall_seconds
        self._stalled = self.loop.call_later(seconds, self._cut_if_stalled, unread)

    def _cut_if_stalled(self, unread: int) -> None:
        limits = self.server_state.limits
        if unread - self.transport.get_write_buffer_size() < limits.stall_seconds * limits.answer_rate:
            self.server_state.cut(self)
        else:
            self._watch()

    def _watch_no_more(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class AcceptErrors:
    """Exception handler of the event loop: connections that cannot be accepted are logged once a minute."""

    def __init__(self) -> None:
        self._failed = _OncePerMinute()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not ("socket" in context and isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS):
            loop.default_exception_handler(context)
        elif self._failed.passed():
            logger.error("no connection can be accepted (%s); raise ulimit -n, or look for what holds the files", error)


class _OncePerMinute:
    """Tells whether the last log line of a kind was a minute ago."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def passed(self) -> bool:
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            return False
        self._last = now
        return True
