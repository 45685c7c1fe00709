"""`Guard`: checks the token and the size of each request before any route sees it, and writes one log line per request.

It is ASGI middleware. Connections without a complete request are limited in engine.http.lifecycle.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Mapping
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineBusy, NotAuthenticated
from engine.http.bodies import REQUEST_HEADER, VERSION, VERSION_HEADER
from engine.http.errors import BodyTimeout, BodyTooLarge, ErrorBody, NotAdmitted, error_body, http_status
from engine.http.report_links import PREFIX
from engine.http.service import EngineService, LogContext, error_result, internal_error, response_of
from engine.http.wire import MEDIA_TYPE

logger = logging.getLogger("ostinato.engine.http")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no token."""
MAX_JSON_BYTES = 8 << 20
"""Largest body that is not Arrow. Such bodies hold references and messages, never batches."""
MAX_JSON_VALUES = 1 << 14
"""Most values and names in a JSON body. Parsing and validating them holds the interpreter lock, and each invalid value
adds an error message."""
MAX_PROMPT_VALUES = 1 << 17
"""Most values in a body of OpenAI's completions, whose prompts may be token ids. A name counts for `NAME_VALUES` values
there: each unknown name adds an error message, while a list is refused at its first invalid item."""
NAME_VALUES = 8
BODY_SECONDS = 60.0
"""Longest pause within a body, and the time that a body may take in addition to what `BODY_RATE` allows."""
BODY_RATE = 8 << 10
"""Bytes per second that a body must send on average after its first `BODY_SECONDS`."""
LINGER_SECONDS = 1.0
"""How long the server goes on reading from a refused client, so that the client can read the error before the
connection closes."""
LINGER_BYTES = 8 << 20
"""Most bytes that the server reads from a refused client."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods with a metric of their own. Others count as "other", since clients without a token may invent any number."""
# The closing quote is optional: otherwise each quote of an unclosed string would be tried as the beginning of a string.
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_REQUEST_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Guard:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, service: EngineService) -> None:
        self.app, self.service = app, service
        token = service.options.token
        self._token = None if token is None else token.encode()
        """Bytes, because compare_digest does not accept text that is not ASCII."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        # Every request has an id, the client's or a new one. The log line and the error name it.
        started = time.monotonic()
        headers = Headers(scope=scope)
        client_id = headers.get(REQUEST_HEADER, "")
        id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        response = _ResponseSender(send, id)
        try:
            await self._handle(scope, headers, receive, response)
        except RequestRefused as refused:
            await _send_refusal(refused, receive, response)
        except Exception:  # boundary of the server: logged once, with the id that the client sees
            logger.exception("%s %s failed", scope["method"], id)
            if not response.status:
                error = internal_error(id)
                await _send_refusal(RequestRefused(error, http_status(error.error)), receive, response)
        finally:
            self._log_request(scope, response.status, time.monotonic() - started)

    def _log_request(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.service.metrics.requests.labels(method, str(status)).inc()
        context: LogContext = scope["state"].get("log_context", LogContext())
        id = scope["state"]["request_id"]
        line = "%s %s %d %.0fms id=%s run=%s"
        logger.info(line, scope["method"], _printable_path(scope), status, 1000 * seconds, id, context.run)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: _ResponseSender) -> None:
        """Checks the request and passes it to the app. Raises RequestRefused."""
        # Authenticate the client. The address of a report proves that its sender may read it.
        id = scope["state"]["request_id"]
        is_report = scope["method"] == "GET" and scope["path"].startswith(PREFIX)
        if scope["path"] not in OPEN_PATHS and not is_report:
            self._authenticate(headers, id)
        if scope["method"] == "POST" and self.service.state == "draining":
            raise _refused(EngineBusy("the engine is draining; call again when it is back"), id)
        if scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
            await self.app(scope, receive, send)
            return

        # Read the whole body within its bounds, so that no route sees an endless one.
        body = await self._read_body(headers, receive, id)
        limit = MAX_PROMPT_VALUES if scope["path"].endswith("/completions") else MAX_JSON_VALUES
        if not _is_arrow(headers) and _json_values(body, limit) > limit:
            message = f"the body holds more than {limit} JSON values; send prompts as text, or in several calls"
            raise _refused(BodyTooLarge(message), id)
        await self.app(scope, _ReplayBody(body, receive), send)

    def _authenticate(self, headers: Headers, id: str) -> None:
        if self._token is None:
            # A web page in a browser on this machine could otherwise call by a name that resolves to 127.0.0.1.
            if not is_loopback(host_of(headers.get("host", ""))):
                message = "without a token this server answers to loopback names only; use http://127.0.0.1"
                raise _refused(NotAuthenticated(message), id, status=403)
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            message = (
                f"the request has {'another' if token else 'no'} token; send 'Authorization: Bearer TOKEN'. The token "
                "is in OSTINATO_ENGINE_TOKEN or the --token-file of the server, and of 'ostinato up' in "
                ".ostinato/up/engine-token"
            )
            raise _refused(NotAuthenticated(message), id)

    async def _read_body(self, headers: Headers, receive: Receive, id: str) -> bytes:
        """Returns the whole body. Raises RequestRefused if it is too large, too slow, or does not fit into memory."""
        # Refuse by the size that the client announces, before anything is read.
        limit = self.service.options.max_body_bytes
        if not _is_arrow(headers):
            limit = min(limit, MAX_JSON_BYTES)
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > limit:
            raise _refused(_too_large(limit), id)

        # Read what arrives. Each chunk is counted in the memory of all calls.
        calls, chunks, size = self.service.calls, [], 0
        started = time.monotonic()
        try:
            while True:
                left = started + BODY_SECONDS + size / BODY_RATE - time.monotonic()
                message = await asyncio.wait_for(receive(), min(BODY_SECONDS, left))
                if message["type"] == "http.disconnect":
                    raise _refused(BodyTimeout("the connection was lost within the body"), id)
                chunk = message.get("body", b"")
                if size + len(chunk) > limit:
                    raise _refused(_too_large(limit), id)
                if not calls.has_room(len(chunk)):
                    raise _refused(NotAdmitted("too many bytes of calls wait for this engine; call again"), id)
                calls.reserve(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
        except TimeoutError:
            error = BodyTimeout(
                f"{size} bytes of the body came in {time.monotonic() - started:.0f} s; send the next within "
                f"{BODY_SECONDS:g} s, and {BODY_RATE} bytes a second on average"
            )
            raise _refused(error, id) from None
        finally:
            calls.reserve(-size)


class RequestRefused(Exception):
    """The request ends in the guard, with this error and status."""

    def __init__(self, body: ErrorBody, status: int) -> None:
        super().__init__(body.message)
        self.body, self.status = body, status


def _refused(error: Exception, request_id: str, *, status: int | None = None) -> RequestRefused:
    """Returns the refusal of a request. `status` replaces the usual status of the error."""
    body = error_body(error, request_id)
    return RequestRefused(body, status or http_status(body.error))


class _ResponseSender:
    """An ASGI `send` that records the status and adds the headers that every response has."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.send, self.status = send, 0
        self.headers = [
            (REQUEST_HEADER.lower().encode(), request_id.encode()),
            (VERSION_HEADER.lower().encode(), str(VERSION).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self.headers]}
        await self.send(message)


class _ReplayBody:
    """An ASGI `receive` that returns a body that was read before."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is None:
            return await self.receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _send_refusal(refused: RequestRefused, receive: Receive, send: _ResponseSender) -> None:
    """Sends the error and closes the connection. Only a part of the remaining body is read, to let the client
    finish."""
    result = error_result(refused.body)
    headers = dict(response_of(result).headers) | {"connection": "close"}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw_headers})
    await send({"type": "http.response.body", "body": result.body, "more_body": True})
    await _linger(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    """Reads and discards the rest of a body, up to LINGER_BYTES and LINGER_SECONDS."""
    # If the server closed at once, the kernel would reset the connection, and the client would lose the error.
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _is_arrow(headers: Headers) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


def _json_values(body: bytes, limit: int) -> int:
    """Returns an upper bound of the number of values in a JSON text, in time linear in its size.

    Where the bound exceeds `limit`, marks within strings are not counted.
    """
    # Counting marks is fast but also counts those in strings, so the strings are removed only if the bound is too high.
    count = _count_marks(body)
    if count <= limit:
        return count
    return _count_marks(_JSON_STRING.sub(b"", body))


def _count_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) + NAME_VALUES * text.count(b":")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body exceeds {limit} bytes, the most this server takes of its kind; send less at once, or serve with a "
        "larger --max-body-mib"
    )


def host_of(header: str) -> str:
    """Returns the host of a Host header, without its port. Empty for a header of another form."""
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?", header)
    return "" if match is None else match[1] or match[2] or ""


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address can be reached from this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Returns whether a request comes from a page of this server, or from no page at all, as browsers tell it by
    Sec-Fetch-Site (W3C Fetch Metadata), or by Origin where the server has neither https nor a loopback name."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin, host = headers.get("origin"), headers.get("host", "")
    return origin is None or origin.partition("://")[2] == host


def _printable_path(scope: Mapping[str, object]) -> str:
    """Returns the first 200 bytes of the path in percent-encoding, so that a client cannot put line breaks into the
    log."""
    raw = scope.get("raw_path") or str(scope["path"]).encode("utf-8", "replace")
    assert isinstance(raw, bytes)
    text = ""
    for byte in raw[:200].split(b"?")[0]:
        text += chr(byte) if 32 < byte < 127 else f"%{byte:02X}"
    return text
