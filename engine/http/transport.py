"""`Transport`: makes one call over HTTP. It submits the call under an id, polls for the result, and retries on
failures.

Each HTTP request has a short timeout, while the call may take hours. The transport waits as long as the server replies,
also for a server that has no room for the call yet. After `patience_seconds` without a reply the call fails with
EngineUnreachable. Calls that begin within the same outage, such as the retries of a task, do not begin to wait again.
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
from engine.http.errors import BodyTimeout, NotAdmitted, UnknownCall, error_of_body, parse_error
from engine.specs.engine import HttpEngineSpec

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
LAST_TRY_SECONDS = 5.0
"""Shortest timeout of a request, unless `timeout_seconds` is shorter."""
CANCEL_TIMEOUT_SECONDS = 1.0
"""Longest time that a cancelled call takes to cancel the call on the server."""
_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a proxy, or of a server without room, that may change on a retry."""
_ADVICE = "start it with 'ostinato engine serve', or check engine.url and the network, and run the same command again"

TransportFactory = Callable[[], httpx.AsyncBaseTransport]

RESET_ERRORS = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""Errors of one connection. A single one may be an idle connection that the server has closed."""


@dataclass(frozen=True)
class CallRequest:
    """A call to submit. Id, path and body stay the same on every retry."""

    path: str
    body: bytes = b""
    media_type: str = "application/json"
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid4().hex)


class RequestBackoff:
    """Decides when to retry and when to give up: exponential backoff with full jitter, counted from the last reply.

    It gives up after `seconds` without a reply.
    """

    def __init__(
        self,
        seconds: float,
        *,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`since`: when the last reply came, by the clock. None: now."""
        self.seconds, self.clock, self.draw = seconds, clock, draw
        self.reset()
        if since is not None:
            self.since = since

    def left(self) -> float:
        """Seconds until it gives up, at least 0."""
        return max(0.0, self.since + self.seconds - self.clock())

    def reset(self) -> None:
        """Starts again from the first delay: the server has accepted the call, or is working on it."""
        self.since, self.failures = self.clock(), 0

    async def pause(self, error: Exception) -> None:
        """Waits before the next try. Raises `error` if there was no reply for too long."""
        if self.clock() - self.since >= self.seconds:
            raise error
        await self._sleep()

    async def pause_for_room(self) -> None:
        """Waits before the next try at a server that has no room. It never gives up: the server answers."""
        self.since = self.clock()
        await self._sleep()

    async def _sleep(self) -> None:
        self.failures += 1
        longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(self.failures, 10))
        await asyncio.sleep(self.draw() * longest)


@dataclass(frozen=True)
class _Line:
    """The connections of one event loop, and its free places for calls, by verb."""

    pool: httpx.AsyncClient
    places: dict[str, asyncio.Semaphore] = field(default_factory=dict)


class Transport:
    """Pooled connections to one server. It may be used from several event loops."""

    def __init__(self, spec: HttpEngineSpec, *, transport: TransportFactory | None = None) -> None:
        self.spec = spec
        self.url = spec.url.rstrip("/")
        self._transport = transport
        self._outages = OutageLog(self.url, spec.patience_seconds)
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Transport({self.url!r})"

    async def call(self, call: CallRequest) -> bytes:
        """Returns the bytes of the result. Raises the engine's error, EngineUnreachable, NotAuthenticated,
        EngineBusy."""
        backoff = RequestBackoff(self.spec.patience_seconds, since=self._outages.since())
        submitted = False
        try:
            while True:
                # Submit the call, then poll for its result. No reply is a reason to try again: the id makes it safe.
                request = self._poll if submitted else self._submit
                try:
                    response = await request(call, self._timeout(backoff.left()))
                except (httpx.TransportError, httpx.DecodingError) as error:
                    self._outages.record_failure(error, since=backoff.since)
                    await backoff.pause(self._unreachable(error))
                    continue
                # Our server sends its errors in a known form. Others come from a proxy in front of it.
                if response.is_success or parse_error(response.content) is not None:
                    self._outages.record_answer()
                if response.status_code == 200:
                    return response.content
                if response.status_code == 202:
                    submitted = True
                    backoff.reset()
                    continue
                # A failure that may pass: submit the call again, at once if the server does not know it.
                retryable = self._retryable_error(response)
                if isinstance(retryable, EngineUnreachable):
                    self._outages.record_failure(retryable)
                submitted = False
                if isinstance(retryable, NotAdmitted):
                    await backoff.pause_for_room()
                elif not isinstance(retryable, UnknownCall):
                    await backoff.pause(retryable)
        except asyncio.CancelledError:
            await self._cancel_on_server(call)
            raise

    async def get(self, path: str) -> bytes:
        """Returns a page that the server answers at once. Raises the errors of `call`."""
        return await self.call(CallRequest(path, method="GET"))

    def place(self, verb: str, places: int) -> asyncio.Semaphore:
        """A context in which one of at most `places` calls of a verb is made. Entering it waits for a free place, in
        the order of the callers."""
        return self._line().places.setdefault(verb, asyncio.Semaphore(places))

    async def close(self) -> None:
        """Closes the connections of this event loop. Those of other loops close with their loops."""
        with self._lock:
            line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.pool.aclose()

    # -- requests ----------------------------------------------------------------------------------------------

    def _timeout(self, left: float) -> float:
        """Seconds that a request may take when the patience ends in `left` seconds. A last try has a few seconds."""
        return min(self.spec.timeout_seconds, max(left, LAST_TRY_SECONDS))

    async def _submit(self, call: CallRequest, timeout: float) -> httpx.Response:
        headers = self._headers(call) | {"Content-Type": call.media_type} | dict(call.headers)
        content = call.body if call.method == "POST" else None
        return await self._pool().request(
            call.method, self.url + call.path, params=_wait(timeout), content=content, headers=headers, timeout=timeout
        )

    async def _poll(self, call: CallRequest, timeout: float) -> httpx.Response:
        headers = self._headers(call) | dict(call.headers)
        return await self._pool().get(
            f"{self.url}/v1/calls/{call.id}", params=_wait(timeout), headers=headers, timeout=timeout
        )

    async def _cancel_on_server(self, call: CallRequest) -> None:
        """Cancels the call on the server if it has not begun. A call that runs completes. Failures are logged only."""
        url = f"{self.url}/v1/calls/{call.id}"
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_SECONDS):
                await self._pool().delete(url, headers=self._headers(call))
        except (httpx.HTTPError, TimeoutError) as error:
            logger.debug("could not cancel call %s on the server: %s", call.id, type(error).__name__)

    # -- failures ----------------------------------------------------------------------------------------------

    def _retryable_error(self, response: httpx.Response) -> Exception:
        """Returns the error of a response if a retry may succeed. Raises it if not."""
        body = parse_error(response.content)
        if response.status_code == 401 or (body is not None and body.error == NotAuthenticated.__name__):
            # The message never contains the token itself.
            state = "set" if os.environ.get(self.spec.token_env) else "not set"
            reason = body.message if body else response.status_code
            raise NotAuthenticated(
                f"the engine at {self.url} does not accept the token in ${self.spec.token_env} ({state} here): "
                f"{reason}; put the server's token there"
            )
        if body is None:
            return self._foreign_error(response)
        error = error_of_body(body)
        if isinstance(error, UnknownCall | EngineBusy | BodyTimeout):
            return error
        raise error

    def _foreign_error(self, response: httpx.Response) -> Exception:
        """Returns the error of a response that does not come from our server, but from a proxy or another program.

        Raises PermanentEngineError unless a retry may succeed.
        """
        if response.status_code in _RETRIED:
            return EngineUnreachable(f"{self.url} answered {response.status_code} in place of the engine; {_ADVICE}")
        raise PermanentEngineError(
            f"{self.url} answered {response.status_code}, and not as an Ostinato engine does; check engine.url"
        )

    def _unreachable(self, error: Exception) -> EngineUnreachable:
        return EngineUnreachable(
            f"the engine at {self.url} did not answer for {self.spec.patience_seconds:g} s "
            f"({type(error).__name__}: {error}); {_ADVICE}"
        )

    # -- connections -------------------------------------------------------------------------------------------

    def _headers(self, call: CallRequest) -> dict[str, str]:
        headers = {REQUEST_HEADER: call.id, VERSION_HEADER: str(VERSION)}
        # Read the token for each request, so that a new token needs no restart.
        token = os.environ.get(self.spec.token_env, "").strip()
        if not (token.isascii() and token.isprintable()):
            raise NotAuthenticated(
                f"${self.spec.token_env} holds characters that no header may have (a line break?); put one line of "
                "printable ASCII there"
            )
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _pool(self) -> httpx.AsyncClient:
        return self._line().pool

    def _line(self) -> _Line:
        """Returns the connections of this event loop, and forgets those of closed loops."""
        # An httpx client and a semaphore work only in the event loop that they were created in.
        loop = asyncio.get_running_loop()
        with self._lock:
            for closed in [other for other in self._lines if other.is_closed()]:
                del self._lines[closed]
            if loop not in self._lines:
                # A call has a connection of its own while it waits for its result, so `place` bounds the connections.
                # A pool with a bound would let calls wait for a connection, which looks like an outage.
                pool = httpx.AsyncClient(
                    timeout=httpx.Timeout(self.spec.timeout_seconds),
                    limits=httpx.Limits(max_connections=None, keepalive_expiry=30),
                    transport=self._transport() if self._transport else None,
                    trust_env=False,
                )
                self._lines[loop] = _Line(pool)
            return self._lines[loop]


def _wait(timeout: float) -> dict[str, str]:
    """The parameter that tells the server how long to wait for a result before it replies without one."""
    return {"wait": f"{min(MAX_WAIT_SECONDS, timeout / 2):g}"}


class OutageLog:
    """The outages of one server, as its client sees them. It may be used from several threads."""

    def __init__(self, url: str, patience_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience_seconds`: how long a call tries again before it fails."""
        self._url, self._patience_seconds, self._clock = url, patience_seconds, clock
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._last_failure = 0.0
        self._is_logged = False

    def since(self) -> float | None:
        """When the present outage began, by the clock; None without one.

        A failure that is older than the patience says nothing about now.
        """
        with self._lock:
            is_recent = self._clock() - self._last_failure <= self._patience_seconds
            return self._away_since if is_recent else None

    def record_failure(self, error: Exception, *, since: float | None = None) -> None:
        """Records a request without an answer of the engine. Logs the first one of an outage.

        `since`: when the caller last had an answer, or began to wait for one. None: now.
        """
        with self._lock:
            is_first = self._away_since is None
            self._last_failure = self._clock()
            if self._away_since is None:
                self._away_since = self._last_failure if since is None else since
            if self._is_logged or (is_first and isinstance(error, RESET_ERRORS)):
                return
            self._is_logged = True
        logger.warning(
            "the engine at %s does not answer; trying again for up to %.0f s", self._url, self._patience_seconds
        )

    def record_answer(self) -> None:
        """Records an answer of the engine. Logs the end of an outage that was logged."""
        with self._lock:
            since, was_logged = self._away_since, self._is_logged
            self._away_since, self._is_logged = None, False
            if since is None or not was_logged:
                return
            seconds = self._clock() - since
        logger.warning("the engine at %s answers again, after %.0f s", self._url, seconds)
