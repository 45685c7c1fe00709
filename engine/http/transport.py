"""One logical call over HTTP: submitted under its id, asked for until it is done, tried again when the line fails.

Every HTTP answer has a short timeout; the call itself may take hours. As long as the server answers, the caller waits;
after `patience_seconds` without a sign of life the call fails with EngineUnreachable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

import httpx

from engine.errors import EngineBusy, EngineUnreachable, NotAuthenticated, PermanentEngineError
from engine.http.bodies import MAX_WAIT_SECONDS, REQUEST_HEADER, VERSION, VERSION_HEADER
from engine.http.errors import BodyTimeout, UnknownCall, error_from, parse_error
from engine.specs.engine import HttpEngineSpec

logger = logging.getLogger("ostinato.engine.http")

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
TAKE_BACK_SECONDS = 1.0
"""How long a cancelled caller stays to take its call back."""
_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a proxy, or of a server with no room, that another try may change."""

TransportFactory = Callable[[], httpx.AsyncBaseTransport]


@dataclass(frozen=True)
class Call:
    """What is submitted: the same id, path and body however often it is tried."""

    path: str
    body: bytes = b""
    media_type: str = "application/json"
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid4().hex)


class Patience:
    """When to try again, and when to give up: exponential backoff with full jitter, from the last sign of life."""

    def __init__(
        self, seconds: float, *, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.seconds, self.clock, self.draw = seconds, clock, draw
        self.alive()

    def alive(self) -> None:
        """The server took the call, or is at it."""
        self.since, self.failures = self.clock(), 0

    async def pause(self, error: Exception) -> None:
        """Waits before the next try. Raises `error` when there was no sign of life for too long."""
        if self.clock() - self.since >= self.seconds:
            raise error
        self.failures += 1
        longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(self.failures, 10))
        await asyncio.sleep(self.draw() * longest)


class Transport:
    """Pooled connections to one server, from any number of event loops."""

    def __init__(self, spec: HttpEngineSpec, *, transport: TransportFactory | None = None) -> None:
        self.spec = spec
        self.url = spec.url.rstrip("/")
        self.wait_seconds = min(MAX_WAIT_SECONDS, spec.timeout_seconds / 2)
        self._transport = transport
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Transport({self.url!r})"

    async def call(self, call: Call) -> bytes:
        """The result's bytes. Raises what the engine raised, EngineUnreachable, NotAuthenticated, EngineBusy."""
        patience = Patience(self.spec.patience_seconds)
        submitted = False
        try:
            while True:
                try:
                    response = await (self._poll(call) if submitted else self._submit(call))
                except (httpx.TransportError, httpx.DecodingError) as error:
                    await patience.pause(self._unreachable(error))
                    continue
                if response.status_code == 200:
                    return response.content
                if response.status_code == 202:
                    submitted = True
                    patience.alive()
                    continue
                retried = self._failure(response)
                submitted = False
                if not isinstance(retried, UnknownCall):
                    await patience.pause(retried)
        except asyncio.CancelledError:
            await self._take_back(call)
            raise

    async def get(self, path: str) -> bytes:
        """A page that is answered at once. Raises like `call`."""
        return await self.call(Call(path, method="GET"))

    async def close(self) -> None:
        """Closes the connections of this loop; those of others go with their loops."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def _submit(self, call: Call) -> httpx.Response:
        headers = self._headers(call) | {"Content-Type": call.media_type} | dict(call.headers)
        content = call.body if call.method == "POST" else None
        params = {"wait": f"{self.wait_seconds:g}"}
        return await self._pool().request(
            call.method, self.url + call.path, params=params, content=content, headers=headers
        )

    async def _poll(self, call: Call) -> httpx.Response:
        params = {"wait": f"{self.wait_seconds:g}"}
        headers = self._headers(call) | dict(call.headers)
        return await self._pool().get(f"{self.url}/v1/calls/{call.id}", params=params, headers=headers)

    async def _take_back(self, call: Call) -> None:
        """Best effort: a call that has not begun is dropped; one that runs commits what it would have committed."""
        url = f"{self.url}/v1/calls/{call.id}"
        try:
            async with asyncio.timeout(TAKE_BACK_SECONDS):
                await self._pool().delete(url, headers=self._headers(call))
        except (httpx.HTTPError, TimeoutError) as error:
            logger.debug("the cancelled call %s was not taken back: %s", call.id, type(error).__name__)

    def _failure(self, response: httpx.Response) -> Exception:
        """The error to try again after. Raises the one that is final."""
        body = parse_error(response.content)
        if response.status_code == 401 or (body is not None and body.error == NotAuthenticated.__name__):
            raise NotAuthenticated(
                f"the engine at {self.url} does not accept the token in ${self.spec.token_env} "
                f"({'set' if os.environ.get(self.spec.token_env) else 'not set'} here): "
                f"{body.message if body else response.status_code}; put the server's token there"
            )
        if body is None:
            return self._foreign(response)
        error = error_from(body)
        if isinstance(error, UnknownCall | EngineBusy | BodyTimeout):
            return error
        raise error

    def _foreign(self, response: httpx.Response) -> Exception:
        """An answer that is not our server's: a proxy's, or another program's."""
        error = EngineUnreachable(f"{self.url} answered {response.status_code} in place of the engine; {_ADVICE}")
        if response.status_code in _RETRIED:
            return error
        raise PermanentEngineError(
            f"{self.url} answered {response.status_code}, and not as an Ostinato engine does; check engine.url"
        )

    def _unreachable(self, error: Exception) -> EngineUnreachable:
        return EngineUnreachable(
            f"the engine at {self.url} did not answer for {self.spec.patience_seconds:g} s "
            f"({type(error).__name__}: {error}); {_ADVICE}"
        )

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {REQUEST_HEADER: call.id, VERSION_HEADER: str(VERSION)}
        token = os.environ.get(self.spec.token_env, "").strip()
        if not (token.isascii() and token.isprintable()):
            raise NotAuthenticated(
                f"${self.spec.token_env} holds characters that no header may have (a line break?); put one line of "
                "printable ASCII there"
            )
        return headers | {"Authorization": f"Bearer {token}"} if token else headers

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._pools if other.is_closed()]:
                del self._pools[other]
            if loop not in self._pools:
                self._pools[loop] = httpx.AsyncClient(
                    timeout=httpx.Timeout(self.spec.timeout_seconds),
                    limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30),
                    transport=self._transport() if self._transport else None,
                    trust_env=False,
                )
            return self._pools[loop]


_ADVICE = "start it with `ostinato engine serve`, or check engine.url and the network, and run the same command again"


