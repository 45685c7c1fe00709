"""The life of the server process: bind an address, serve, and drain on SIGTERM or SIGINT. SIGKILL is always safe."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from engine.errors import BadSpec
from engine.http.connections import (
    ACCEPT_BATCH,
    LISTEN_QUEUE,
    AcceptErrorHandler,
    BoundedProtocol,
    ConnectionLimits,
    Connections,
    limits_of_process,
)
from engine.http.guard import is_loopback
from engine.http.service import EngineService

logger = logging.getLogger("ostinato.engine.http")

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open."""
MAX_HEAD_BYTES = 16 << 10
"""Most bytes of the request line and the headers."""


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
