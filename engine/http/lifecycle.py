"""The life of the server process: bind an address, serve, and drain on SIGTERM or SIGINT. SIGKILL is always safe.

A connection needs no token before its request is complete. Limits on the number of connections, the time for a request
head and the time for a stalled response protect the process from clients without a token. `engine.http.guard` checks
complete requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from engine.errors import BadSpec
from engine.http.guard import is_loopback
from engine.http.service import EngineService

logger = logging.getLogger("ostinato.engine.http")

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open."""
MAX_HEAD_BYTES = 16 << 10
"""Most bytes of the request line and the headers."""

MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 384
"""Open files that connections may not use. They are for the store, models, logs, and for connections that are being
accepted or closed (at most about 4 times `ACCEPT_BATCH`)."""
ACCEPT_BATCH = 16
"""Most connections that the event loop accepts at once, before it serves the connections that are open."""
LISTEN_QUEUE = 1024
"""Most connections that the kernel keeps in its queue until the event loop accepts them."""
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
LOG_SECONDS = 60.0
"""Shortest time between two log lines of the same kind."""
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True)
class Binding:
    """The address of a server, and the token that clients must send."""

    host: str = "127.0.0.1"
    port: int = 8777
    """0: any free port."""
    token: str | None = field(default=None, repr=False)

    def open(self) -> socket.socket:
        """Returns a listening socket. Raises BadSpec for a host that needs a token, OSError when the port is taken."""
        if self.token is None and not is_loopback(self.host):
            raise BadSpec(
                f"without a token only this machine may call: {self.host!r} is reachable from others; set "
                "OSTINATO_ENGINE_TOKEN or --token-file, or bind 127.0.0.1"
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it each response waits 40 ms for an ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(LISTEN_QUEUE)
        except OSError:
            listener.close()
            raise
        return listener


class EngineServer(uvicorn.Server):
    """uvicorn with limits on connections. It has no signal handlers, since a signal drains first
    (`serve_until_signal`)."""

    def __init__(self, app: FastAPI, limits: ConnectionLimits | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                backlog=ACCEPT_BATCH,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )
        self.server_state: Connections = Connections(limits or ConnectionLimits())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Without this handler, asyncio logs a traceback for every connection that it cannot accept.
        asyncio.get_running_loop().set_exception_handler(AcceptErrorHandler())
        await super().startup(sockets)
        for listener in sockets or []:
            # asyncio has limited the kernel's queue to the size of its own batch
            listener.listen(LISTEN_QUEUE)

    async def on_tick(self, counter: int) -> bool:
        self.server_state.cut_slow_heads()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_signal(
    app: FastAPI, listener: socket.socket, *, grace_seconds: float, on_ready: Callable[[str], None]
) -> bool:
    """Serves until SIGTERM or SIGINT, then drains: the running call ends or is rolled back, and the engine closes.

    A second signal ends the process at once. Returns False if the engine did not close within `grace_seconds`.
    """
    # Start, and wait until the engine answers or a signal arrives.
    service: EngineService = app.state.service
    server = EngineServer(app, limits_of_process())
    stop = asyncio.Event()
    _stop_on_signals(stop)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    await service.until_ready(serving, stopping)
    if service.state == "ready":
        # A full collection would stop every thread for 0.5 s, as it goes through all objects of the libraries.
        gc.collect()
        gc.freeze()
        on_ready(_url(listener))
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)

    # Drain: the running call ends, and waiting ones fail with an error that clients retry.
    logger.info("draining: no new calls are taken, and the running call has at most %g s to end", grace_seconds)
    closed = await service.drain(grace_seconds)
    if not closed:
        logger.warning("the running call did not end within %g s and is rolled back", grace_seconds)
    server.should_exit = True
    stopping.cancel()
    await serving
    return closed


def _stop_on_signals(stop: asyncio.Event) -> None:
    def on_signal(number: int) -> None:
        # 128 + number is the shell's exit status for a process that a signal ended.
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one server."""

    max_connections: int = MAX_CONNECTIONS
    """Largest number of open connections."""
    head_seconds: float = 20.0
    """Longest time from the first byte of a request (or from the connection's start) to the end of its headers."""
    stall_seconds: float = 60.0
    """Seconds between two checks of a client that does not read its response fast enough for the server to send the
    rest."""
    answer_rate: int = 8 << 10
    """Bytes per second that such a client must read. The server closes the connection of a slower client."""


def limits_of_process() -> ConnectionLimits:
    """Returns limits that leave file descriptors for the store. It first raises the soft limit of open files as
    needed."""
    # macOS and many containers start with a soft limit of 256 or 1024 files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError) as error:
            # macOS allows less than the hard limit. Fewer connections are no reason not to start.
            logger.info("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return ConnectionLimits()
    free_descriptors = max(soft - RESERVED_DESCRIPTORS, soft // 4)
    return ConnectionLimits(max_connections=max(1, min(MAX_CONNECTIONS, free_descriptors)))


class Connections(ServerState):
    """uvicorn's state of a server, with its connections in groups by what they wait for."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__()
        self.limits = limits
        # When there are too many connections, they are closed in this order of groups, the oldest of a group first.
        self.heads: dict[BoundedProtocol, float] = {}
        """Connections whose request head is not complete, and the time at which each joined the group (monotonic
        clock)."""
        self.idle: dict[BoundedProtocol, float] = {}
        """Connections whose last request was answered and that have not sent another request."""
        self.bodies: dict[BoundedProtocol, float] = {}
        """Connections whose request body is not complete."""
        self._warning_limiter = _LogLimiter()

    def admit(self, connection: BoundedProtocol) -> None:
        """Registers a new connection. If there are too many, it closes the one that has waited longest for a request:
        first from `heads`, then from `idle`, then from `bodies`. If all three are empty, it refuses the new one."""
        # A client without a token can open connections without limit, so the oldest idle ones must give way.
        if len(self.connections) > self.limits.max_connections:
            if self._warning_limiter.allow():
                logger.warning(
                    "%d connections are open, the most this server takes (ulimit -n, at most %d): closing those that "
                    "have waited longest for a request",
                    self.limits.max_connections,
                    MAX_CONNECTIONS,
                )
            victim = self._oldest_waiting()
            if victim is None:
                # Every other connection waits for a response, which a new client must not cost it.
                self.connections.discard(connection)
                connection.transport.write(REFUSAL)
                connection.transport.close()
                return
            self.cut(victim)
        self.place(connection, self.heads)

    def place(self, connection: BoundedProtocol, group: dict[BoundedProtocol, float] | None) -> None:
        """Moves a connection into `group`. None means that its request is complete and it waits for the response.

        A connection that is already in the group keeps its time and its place in the order.
        """
        for other in self._groups():
            if other is not group:
                other.pop(connection, None)
        if group is not None:
            group.setdefault(connection, time.monotonic())

    def cut(self, connection: BoundedProtocol) -> None:
        """Closes a connection without a response and stops counting it."""
        self.place(connection, None)
        self.connections.discard(connection)
        connection.transport.abort()

    def cut_slow_heads(self) -> None:
        """Closes the connections whose request head takes too long."""
        oldest = time.monotonic() - self.limits.head_seconds
        # The group is ordered by time, so all connections after the first recent one are recent, too.
        for connection, since in list(self.heads.items()):
            if since > oldest:
                return
            self.cut(connection)

    def _oldest_waiting(self) -> BoundedProtocol | None:
        """Returns the connection to close when there are too many."""
        for group in self._groups():
            if group:
                return next(iter(group))
        return None

    def _groups(self) -> tuple[dict[BoundedProtocol, float], ...]:
        return self.heads, self.idle, self.bodies


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with the limits of `Connections`."""

    server_state: Connections
    _stall_timer: asyncio.TimerHandle | None = None

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
        """Sends status 400; uvicorn calls this for bytes that are not HTTP.

        If the app still works on a request of this connection, its response is not sent. If that response has begun,
        the connection is closed in place of the 400.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.place(self, None)
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _place(self, group_without_request: dict[BoundedProtocol, float]) -> None:
        """Moves this connection into the group that it belongs to now."""
        state = self.server_state
        if self not in state.connections:  # refused or closed
            return
        if self.cycle is None or self.cycle.response_complete:
            state.place(self, group_without_request)
        elif self.cycle.more_body:
            state.place(self, state.bodies)
        else:
            state.place(self, None)

    # -- clients that do not read their response ---------------------------------------------------------------

    def _start_stall_timer(self) -> None:
        # uvicorn pauses writing while the client reads too slowly, and would otherwise wait for it without limit.
        unread_bytes, seconds = self.transport.get_write_buffer_size(), self.server_state.limits.stall_seconds
        self._stall_timer = self.loop.call_later(seconds, self._cut_if_stalled, unread_bytes)

    def _cut_if_stalled(self, unread_bytes: int) -> None:
        limits = self.server_state.limits
        if unread_bytes - self.transport.get_write_buffer_size() < limits.stall_seconds * limits.answer_rate:
            self.server_state.cut(self)
        else:
            self._start_stall_timer()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class AcceptErrorHandler:
    """Exception handler of the event loop. It logs connections that cannot be accepted, at most once per
    LOG_SECONDS."""

    def __init__(self) -> None:
        self._error_limiter = _LogLimiter()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not ("socket" in context and isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS):
            loop.default_exception_handler(context)
        elif self._error_limiter.allow():
            logger.error("no connection can be accepted (%s); raise ulimit -n, or close other open files", error)


class _LogLimiter:
    """Allows one log line of a kind per LOG_SECONDS."""

    def __init__(self) -> None:
        self._last_allowed = float("-inf")

    def allow(self) -> bool:
        """Returns whether the line may be logged now. True counts as a logged line."""
        now = time.monotonic()
        if now - self._last_allowed < LOG_SECONDS:
            return False
        self._last_allowed = now
        return True
