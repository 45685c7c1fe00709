"""`Guard`: checks host, session and form token of each request before a route sees it, and adds the security headers.

A session is a signed cookie without state on the server, so that all tabs of a browser share it. On a page with a token
it begins at the login form; on one without, which answers to loopback names only, at the first request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.http.guard import host_of, is_loopback, is_same_origin
from flows.cli.output import format_size

SESSION_SECONDS = 12 * 3600
"""Length of a session. Each request in its second half begins another one."""
MAX_FORM_BYTES = 64 << 20
"""Largest form with its uploaded files."""
MAX_OPEN_FORM_BYTES = 64 << 10
"""Largest form of a request without a session, and of the login."""
MAX_FIELDS = 2000
"""Most fields of a form."""
OPEN_PATHS = ("/static/", "/login", "/health")
"""Paths that need no session."""
CSRF_FIELD = "csrf"
CSRF_HEADER = "X-CSRF-Token"
PART_NAMES = re.compile(rb'^content-disposition: *form-data; *name="([^"]*)"(?:; *filename="([^"]*)")?', re.I | re.M)
"""Name and file name of a part, as browsers write them (WHATWG HTML, multipart/form-data)."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Refuse = Callable[[Request, int, str, str], Response]
"""Returns the page that shows a refusal: (request, status, what is wrong, what to do)."""


@dataclass(frozen=True)
class Upload:
    """A file of a form."""

    name: str
    """Name on the user's machine, without its folders."""
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Form:
    """The fields of a POST request. A route reads it from `request.state.form`."""

    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)

    def get(self, name: str, default: str = "") -> str:
        """Returns the last value of the field, with \\n as line end and without spaces around it."""
        values = self.fields.get(name)
        return values[-1].replace("\r\n", "\n").strip() if values else default


class Sessions:
    """Signs session cookies and the token of forms. The key depends on the page's token only, so that a restart does
    not end sessions and another token ends all of them. Without a token the key is random."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        key = secrets.token_bytes(32) if token is None else token.encode()
        self._key = hashlib.sha256(b"ostinato page:" + key).digest()
        self.csrf = self._sign("form:")

    def begin(self) -> str:
        """Returns the cookie's value of a session that begins now."""
        expires = str(int(time.time()) + SESSION_SECONDS)
        return f"{expires}.{self._sign(f'session:{expires}')}"

    def seconds_left(self, cookie: str) -> float:
        """Returns how long the session is valid, in seconds. 0 for a cookie that is expired or not signed by us."""
        expires, _, signature = cookie.partition(".")
        if not _is_equal(signature, self._sign(f"session:{expires}")):
            return 0.0
        return max(0.0, int(expires) - time.time())

    def is_token(self, text: str) -> bool:
        """Returns whether a typed text is the page's token."""
        return self.token is not None and _is_equal(text, self.token)

    def set_cookie(self, request: Request, headers: MutableHeaders) -> None:
        """Adds the cookie of a session that begins now."""
        attributes = f"Path=/; Max-Age={SESSION_SECONDS}; HttpOnly; SameSite=Strict"
        headers.append("Set-Cookie", f"{cookie_name(request)}={self.begin()}; {attributes}")

    def _sign(self, text: str) -> str:
        # a text begins with its purpose, so that no signature is valid for another one
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _is_equal(given: str, expected: str) -> bool:
    """Compares secrets in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def cookie_name(request: Request) -> str:
    """Browsers share cookies between the ports of a host, so each page of a machine has a name of its own."""
    return f"ostinato_page_{request.url.port or 80}"


class Guard:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, sessions: Sessions, refuse: Refuse) -> None:
        self.app, self.sessions, self.refuse = app, sessions, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        seconds_left = self.sessions.seconds_left(request.cookies.get(cookie_name(request), ""))
        # a page that is shown without a session contains no form token
        has_session = self.sessions.token is None or seconds_left > 0
        scope.setdefault("state", {}).update(form=Form(), has_session=has_session)
        begins = False

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if begins:
                    self.sessions.set_cookie(request, headers)
            await send(message)

        try:
            refusal = self._check_host(request)
            if refusal is None and not has_session and not request.url.path.startswith(OPEN_PATHS):
                refusal = self._ask_for_token(request)
            if refusal is None and request.method == "POST":
                refusal = await self._read_form(request, seconds_left > 0)
        except ClientDisconnect:
            return
        # a session begins on loopback or goes on; at the login form only the route begins one
        begins = refusal is None and has_session and seconds_left < SESSION_SECONDS / 2
        # the routes read the form from the state, not from the body
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _check_host(self, request: Request) -> Response | None:
        # a web page could otherwise call by a name that resolves to 127.0.0.1
        if self.sessions.token is None and not is_loopback(host_of(request.headers.get("host", ""))):
            what = "Without a token this page answers to loopback names only."
            return self.refuse(request, 403, what, "Open it as http://127.0.0.1, or start it with --token-file.")
        return None

    def _ask_for_token(self, request: Request) -> Response:
        response = self.refuse(request, 401, "This page needs its token.", "Enter it in the form.")
        # a part of an open page is loaded again as a whole, so that the user sees the login form
        response.headers["HX-Refresh"] = "true"
        return response

    async def _read_form(self, request: Request, has_cookie: bool) -> Response | None:
        """Reads the body into the state of the request, and checks its origin and the form's token."""
        if not is_same_origin(request.headers):
            what = "The form was sent by a page of another address. Nothing was changed."
            return self.refuse(request, 403, what, "Open this page by its own address, and send its form.")
        is_login = request.url.path == "/login"
        limit = MAX_FORM_BYTES if has_cookie and not is_login else MAX_OPEN_FORM_BYTES
        chunks, size = [], 0
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                do = "Send a smaller file or use the command." if has_cookie else "Reload the page and try again."
                return self.refuse(request, 413, f"The form is larger than {format_size(limit)}.", do)
        try:
            # in a thread: the other requests do not wait for a large file
            form = await asyncio.to_thread(parse_form, request.headers.get("content-type", ""), b"".join(chunks))
        except ValueError:
            return self.refuse(request, 400, "The form could not be read.", "Go back, reload the page, and try again.")
        sent = request.headers.get(CSRF_HEADER) or form.get(CSRF_FIELD)
        if not _is_equal(sent, self.sessions.csrf) and not is_login:
            what = "The form is older than this page's process, or was not sent by it. Nothing was changed."
            return self.refuse(request, 403, what, "Reload the page and try again.")
        request.state.form = form
        return None


def parse_form(content_type: str, body: bytes) -> Form:
    """Parses a form's body, urlencoded or multipart. Raises ValueError."""
    if not content_type.startswith("multipart/form-data"):
        return Form(parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    boundary = content_type.partition("boundary=")[2].partition(";")[0].strip('"').encode()
    # the first part has no line before its boundary
    _, *parts, end = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_FIELDS + 1)
    if not end.startswith(b"--"):
        raise ValueError("cut off, or too many fields")
    fields: dict[str, list[str]] = {}
    files: dict[str, Upload] = {}
    for part in parts:
        header, _, data = part.partition(b"\r\n\r\n")
        names = PART_NAMES.search(header)
        if names is None:
            raise ValueError("a part without a name")
        name = names[1].decode()
        if names[2] is None:
            fields.setdefault(name, []).append(data.decode())
        elif names[2]:
            files[name] = Upload(names[2].decode().replace("\\", "/").rpartition("/")[2], data)
    return Form(fields, files)
