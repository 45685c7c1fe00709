"""An HTTP/1.1 proxy that injects faults of a connection. Each proxy has a thread and keeps its port.

It reads whole requests and whole answers, so that it can lose an answer after the request had its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from engine.http.bodies import REQUEST_HEADER

LIMIT_BYTES = 1 << 20
"""Of one header block."""


@dataclass(frozen=True)
class Message:
    """A request or an answer as it was on the wire."""

    head: bytes
    body: bytes

    @property
    def first(self) -> list[str]:
        """The words of the first line: method and target, or version and status."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    def header(self, name: str) -> str:
        """The value of a header, lower case; "" when it is not there."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.strip().lower() == name:
                return value.strip().lower()
        return ""


@dataclass
class Line:
    """What is wrong with the line now. Written by any thread, read by the proxy's loop."""

    refuse: bool = False
    """New connections are reset."""
    frozen: bool = False
    """Nothing moves; connections stay open."""
    delay_seconds: float = 0.0
    """Before each request is forwarded."""
    status: int | None = None
    """Answer with this, without forwarding."""
    lose_answers: int = 0
    """So many of the next answers are lost: forwarded, done, and the connection cut."""
    losable: Callable[[Message], bool] = field(default=lambda request: True)
    """Which answers may be lost."""
    lose_each_once: bool = False
    """The first answer to each call is lost; a call is told by method, path and request id."""


class Proxy:
    """Forwards 127.0.0.1:`port` to the upstream's port, which may be set later and may change."""

    def __init__(self, name: str, upstream_port: int = 0) -> None:
        self.name, self.upstream_port = name, upstream_port
        self.line = Line()
        self.lost: Counter[str] = Counter()
        """Answers lost, by `METHOD path`."""
        self.arrived = threading.Event()
        """A request came while the line was frozen."""
        self._lost_once: set[tuple[str, ...]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{name}")
        self._thread.start()
        starting = asyncio.start_server(self._serve, sock=listener, limit=LIMIT_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)

    def cut(self) -> int:
        """Resets every connection there is; returns how many."""
        return asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _cut(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            writer.transport.abort()
        return len(writers)

    def heal(self) -> None:
        """All is well again."""
        self.line = Line()

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            await self._cut()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            self._loop.stop()

        self.heal()
        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join(10)
        self._loop.close()

    # -- forwarding --------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self.line.refuse:
                return
            answers, upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port, limit=LIMIT_BYTES)
            while await self._exchange((reader, writer), (answers, upstream)):
                pass
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # either side is gone: so is the connection
        finally:
            self._writers.discard(writer)
            for side in filter(None, (writer, upstream)):
                side.transport.abort()

    async def _exchange(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        """One request and its answer; False when the connection is to be closed."""
        reader, writer = client

        async def go_on() -> None:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()

        # Faults on the way to the server.
        request = await read_message(reader, is_request=True, on_expect=go_on)
        await self._hold()
        line = self.line
        if line.refuse:
            return False
        if line.status is not None:
            writer.write(_refusal(line.status, request))
            await writer.drain()
            return True
        # Pass the request on. A fault may lose the answer.
        upstream[1].write(_without(request.head, b"expect") + request.body)
        await upstream[1].drain()
        answer = await read_message(upstream[0], is_request=False, method=request.first[0])
        await self._hold()
        if self._loses(request):
            return False
        # Pass the answer back, and keep the connection unless one side closes it.
        writer.write(answer.head + answer.body)
        await writer.drain()
        if answer.first[1] == "101":  # from here on it is no HTTP
            await asyncio.gather(_pour(reader, upstream[1]), _pour(upstream[0], writer))
            return False
        if answer.header("connection") == "close" or answer.first[0] == "HTTP/1.0":
            writer.close()  # an abort would lose what is not sent yet
            await writer.wait_closed()
            return False
        return True

    async def _hold(self) -> None:
        if self.line.delay_seconds:
            await asyncio.sleep(self.line.delay_seconds)
        while self.line.frozen:
            self.arrived.set()
            await asyncio.sleep(0.02)

    def _loses(self, request: Message) -> bool:
        name = call_name(request)
        method, target = request.first[:2]
        # The query says how long a try may wait, so it differs between the tries of one call.
        call = (method, target.partition("?")[0], request.header(REQUEST_HEADER.lower()))
        if self.line.lose_each_once and self.line.losable(request) and call not in self._lost_once:
            self._lost_once.add(call)
            self.lost[name] += 1
            return True
        if self.line.lose_answers and self.line.losable(request):
            self.line.lose_answers -= 1
            self.lost[name] += 1
            return True
        return False


def call_name(request: Message) -> str:
    """`METHOD path`, without query and without the ids of calls."""
    method, target = request.first[:2]
    path = target.partition("?")[0]
    return f"{method} {'/v1/calls' if path.startswith('/v1/calls/') else path}"


async def read_message(
    reader: asyncio.StreamReader,
    *,
    is_request: bool,
    method: str = "",
    on_expect: Callable[[], Awaitable[None]] | None = None,
) -> Message:
    """The next message, whole. Raises EOFError (asyncio.IncompleteReadError) when the line ends first."""
    head = await reader.readuntil(b"\r\n\r\n")
    message = Message(head, b"")
    if not is_request and message.first[1] == "100":
        return await read_message(reader, is_request=False, method=method)
    if on_expect is not None and message.header("expect") == "100-continue":
        await on_expect()
    if not is_request and (method == "HEAD" or message.first[1] in ("101", "204", "304")):
        return message
    if message.header("transfer-encoding") == "chunked":
        return Message(head, await _chunks(reader))
    length = message.header("content-length")
    if length:
        return Message(head, await reader.readexactly(int(length)))
    return message if is_request else Message(head, await reader.read())


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while True:
        size = await reader.readuntil(b"\r\n")
        parts.append(size)
        number = int(size.split(b";")[0], 16)
        if number == 0:
            break
        parts.append(await reader.readexactly(number + 2))
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        parts.append(line)
    return b"".join([*parts, b"\r\n"])


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()  # the other direction ends with it


def _without(head: bytes, name: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if line.partition(b":")[0].strip().lower() != name)


def _refusal(status: int, request: Message) -> bytes:
    code = {503: "SlowDown", 500: "InternalError"}.get(status, "Odd")
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if request.first[0] == "HEAD" else body)


@contextlib.contextmanager
def proxied(name: str, upstream_port: int) -> Iterator[Proxy]:
    """A proxy for as long as the block runs."""
    proxy = Proxy(name, upstream_port)
    try:
        yield proxy
    finally:
        proxy.close()
