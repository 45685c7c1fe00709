"""The door: who may call, how large a body may be, and one log line per request. Pure ASGI, in front of every route."""

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
from engine.http.errors import BodyTimeout, BodyTooLarge, ErrorBody, body_of, status_of
from engine.http.report_links import PREFIX
from engine.http.service import Note, Service, error_answer, internal_error, response_of
from engine.http.wire import MEDIA_TYPE

logger = logging.getLogger("ostinato.engine.http")

OPEN_PATHS = frozenset({"/health", "/ready"})
MAX_JSON_BYTES = 8 << 20
"""Bodies that are not Arrow hold references and messages, never batches."""
MAX_JSON_VALUES = 1 << 14
"""Values and names in such a body: parsing and validating them holds the interpreter lock, and each wrong one costs an
error message of its own."""
MAX_PROMPT_VALUES = 1 << 17
"""The same for OpenAI's completions, whose prompts may be token ids. A name counts for `NAME_VALUES` there: it may be
wrong on its own, while a list ends at its first wrong item."""
NAME_VALUES = 8
BODY_SECONDS = 60.0
"""Longest silence within a body, and how long a body may take in addition to the time that `BODY_RATE` allows."""
BODY_RATE = 8 << 10
"""Bytes a second that a body must bring on average after its first `BODY_SECONDS`."""
LINGER_SECONDS = 1.0
LINGER_BYTES = 8 << 20
"""What a refused caller may go on sending, so that it reads the refusal before the connection is cut."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that have a metric of their own; callers without a token may make up others."""
# the closing quote may be missing: otherwise each quote of an unclosed string would be tried as a beginning
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_REQUEST_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        token = service.options.token
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_HEADER, "")
        id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = id
        answered = _Answered(send, id)
        try:
            await self._pass(scope, headers, receive, answered)
        except Refused as refused:
            await refuse(refused.body, receive, answered)
        except Exception:  # the boundary of the server: logged once, with the id that the caller sees
            logger.exception("%s %s failed", scope["method"], id)
            if not answered.status:
                await refuse(internal_error(id), receive, answered)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.service.metrics.requests.labels(method, str(answered.status)).inc()
            note: Note = scope["state"].get("note", Note())
            milliseconds = 1000 * (time.monotonic() - started)
            line = "%s %s %d %.0fms id=%s run=%s"
            logger.info(line, scope["method"], _printable(scope), answered.status, milliseconds, id, note.run)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: _Answered) -> None:
        id = scope["state"]["request_id"]
        page = scope["method"] == "GET" and scope["path"].startswith(PREFIX)  # whose address proves itself
        if scope["path"] not in OPEN_PATHS and not page:
            self._authenticate(headers, id)
        if scope["method"] == "POST" and self.service.state == "draining":
            raise Refused(EngineBusy("the engine is draining; call again when it is back"), id)
        if scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        body = await self._read(headers, receive, id)
        most = MAX_PROMPT_VALUES if scope["path"].endswith("/completions") else MAX_JSON_VALUES
        if not _is_arrow(headers) and _json_values(body, most) > most:
            message = f"the body holds more than {most} JSON values; send prompts as text, or in several calls"
            raise Refused(BodyTooLarge(message), id)
        await self.app(scope, _Replay(body, receive), send)

    def _authenticate(self, headers: Headers, id: str) -> None:
        if self._token is None:
            if not is_loopback(_host(headers.get("host", ""))):
                message = "without a token this server answers to loopback names only; use http://127.0.0.1"
                raise Refused(NotAuthenticated(message), id, status=403)
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise Refused(NotAuthenticated("this server wants its bearer token in the Authorization header"), id)

    async def _read(self, headers: Headers, receive: Receive, id: str) -> bytes:
        """The whole body, never more than it may be."""
        most = self.service.options.max_body_bytes
        most = most if _is_arrow(headers) else min(most, MAX_JSON_BYTES)
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > most:
            raise Refused(_too_large(most), id)
        calls, chunks, size = self.service.calls, [], 0
        started = time.monotonic()
        try:
            while True:
                left = started + BODY_SECONDS + size / BODY_RATE - time.monotonic()
                message = await asyncio.wait_for(receive(), min(BODY_SECONDS, left))
                if message["type"] == "http.disconnect":
                    raise Refused(BodyTimeout("the connection was lost within the body"), id)
                chunk = message.get("body", b"")
                if size + len(chunk) > most:
                    raise Refused(_too_large(most), id)
                if not calls.has_room(len(chunk)):
                    raise Refused(EngineBusy("too many bytes of calls wait for this engine; call again"), id)
                calls.hold(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
        except TimeoutError:
            late = BodyTimeout(
                f"{size} bytes of the body came in {time.monotonic() - started:.0f} s; send the next within "
                f"{BODY_SECONDS:g} s, and {BODY_RATE} bytes a second on average"
            )
            raise Refused(late, id) from None
        finally:
            calls.hold(-size)


class Refused(Exception):
    """The request ends at the door."""

    def __init__(self, error: Exception, request_id: str, *, status: int | None = None) -> None:
        self.body = RefusedBody(body_of(error, request_id), status)


class RefusedBody:
    """An error and its status, where that is not the usual one."""

    def __init__(self, body: ErrorBody, status: int | None) -> None:
        self.body, self.status = body, status or status_of(body.error)


class _Answered:
    """`send` that remembers the status and adds the headers of every answer."""

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


class _Replay:
    """`receive` that gives a body that was read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is None:
            return await self.receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def refuse(refused: RefusedBody | ErrorBody, receive: Receive, send: _Answered) -> None:
    """Sends the error and ends the connection; what is left of the body is not read, but for a moment."""
    if isinstance(refused, ErrorBody):
        refused = RefusedBody(refused, None)
    answer = error_answer(refused.body)
    headers = dict(response_of(answer).headers) | {"connection": "close"}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    await _linger(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
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


def _json_values(body: bytes, most: int) -> int:
    """An upper bound of the values in a JSON text, in time linear in its size; exact enough where it exceeds `most`."""
    if (count := _count_marks(body)) <= most:
        return count
    return _count_marks(_JSON_STRING.sub(b"", body))


def _count_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) + NAME_VALUES * text.count(b":")


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body exceeds {most} bytes, the most this server takes of its kind; send less at once, or serve with a "
        "larger --max-body-mib"
    )


def _host(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine and can be reached from it only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _printable(scope: Mapping[str, object]) -> str:
    """The path as it was sent, percent-encoded and cut: no line breaks of a stranger in the log."""
    raw = scope.get("raw_path") or str(scope["path"]).encode("utf-8", "replace")
    assert isinstance(raw, bytes)
    return "".join(chr(c) if 32 < c < 127 else f"%{c:02X}" for c in raw[:200].split(b"?")[0])
