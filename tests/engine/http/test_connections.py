"""Connections that never send a whole request, or never read an answer, do not keep the server from others."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engine.http import guard
from engine.http.app import create_app
from engine.http.lifecycle import ConnectionLimits
from engine.http.wire import MEDIA_TYPE
from storage.store.objects import ObjectStore
from tests.fixtures.engines import PROVENANCE
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.servers.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[3]
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
POST = b"POST /v1/release HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF_BODY = POST + b"Content-Length: 99\r\n\r\n{"
WHOLE = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """Opens a connection to a url and sends some bytes."""
    with ExitStack() as stack:

        def connect(url: str, data: bytes) -> socket.socket:
            address = urlsplit(url)
            line = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=60))
            line.sendall(data)
            return line

        yield connect


def is_cut(line: socket.socket) -> bool:
    """Waits for what the server says next; whether it closed the connection without an answer."""
    try:
        return line.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


def assert_answered(line: socket.socket) -> None:
    answer = line.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 ")
    while not answer.endswith(b"}"):
        answer += line.recv(1 << 16)


# -- a process with few descriptors ----------------------------------------------------------------------------


@contextmanager
def process(store_url: str, log: Path, *, descriptors: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.fixtures.servers.scripted_server", store_url, str(descriptors)]
    with log.open("w") as stderr:
        server = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def test_more_half_sent_heads_than_descriptors_do_not_stop_the_server(
    store: ObjectStore, tmp_path: Path, connect: Callable[..., socket.socket]
) -> None:
    log = tmp_path / "log"
    with process(store.url, log, descriptors=256) as (_, url):
        for _ in range(300):
            connect(url, HALF_HEAD)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        body = {"source": "never-registered", "provenance": PROVENANCE.model_dump()}
        answer = httpx.post(f"{url}/v1/import_model", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (422, "BadModelFolder")  # the store was read
    assert log.read_text().count("connections are open") == 1


def test_connections_that_cannot_be_accepted_are_logged_once(
    store: ObjectStore, tmp_path: Path, connect: Callable[..., socket.socket]
) -> None:
    log = tmp_path / "log"
    with process(store.url, log, descriptors=128) as (server, url):
        assert server.stdout is not None
        server.send_signal(signal.SIGUSR1)
        assert server.stdout.readline() == "full\n"
        line = connect(url, WHOLE)
        while "Too many open files" not in log.read_text():
            pass
        server.send_signal(signal.SIGUSR2)
        assert server.stdout.readline() == "free\n"
        assert_answered(line)
    assert log.read_text().count("Too many open files") == 1
    assert "Traceback" not in log.read_text()


# -- deadlines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "part"),
    [(b"", b""), (b"", HALF_HEAD), (WHOLE, HALF_HEAD)],
    ids=["nothing", "half-a-head", "half-a-head-after-an-answer"],
)
async def test_a_head_that_is_never_complete_ends_the_connection(
    engine: ScriptedEngine, connect: Callable[..., socket.socket], before: bytes, part: bytes
) -> None:
    def call(url: str) -> None:
        line = connect(url, before)
        if before:
            assert_answered(line)
        line.sendall(part)
        assert is_cut(line)

    with running_server(engine, limits=ConnectionLimits(head_seconds=0.2)) as spec:
        await asyncio.to_thread(call, spec.url)


async def test_a_body_of_one_byte_at_a_time_does_not_live_for_ever(
    store: ObjectStore, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes well before the longest silence is over."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"9000000")]
    scope = {"type": "http", "method": "POST", "path": "/v1/generate", "query_string": b"", "headers": headers}
    async with asyncio.timeout(60):
        await create_app(engine, store)(scope, receive, send)
    assert sent[0]["status"] == 408
    assert b"bytes a second on average" in sent[1]["body"]


async def test_a_body_that_keeps_the_least_rate_may_take_longer_than_the_longest_silence(
    store: ObjectStore, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(guard, "BODY_RATE", 10)

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in b'{"run": ', b'"r"', b"}":
            await asyncio.sleep(0.3)
            yield chunk

    headers = {"Content-Type": "application/json"}
    with running_server(engine) as spec:
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{spec.url}/v1/release", content=chunks(), headers=headers)
    assert answer.status_code == 200


async def test_an_answer_that_is_never_read_ends_the_connection(
    engine: ScriptedEngine, connect: Callable[..., socket.socket]
) -> None:
    """Requests for a page of 100 kB one after the other. The server stops reading, because its answers are not read."""
    page = WHOLE.replace(b"/health", b"/openapi.json")

    def call(url: str) -> bool:
        line = connect(url, b"")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            while True:
                line.sendall(page * 1000)
        except ConnectionError:
            return True

    with running_server(engine, limits=ConnectionLimits(stall_seconds=0.2)) as spec:
        assert await asyncio.to_thread(call, spec.url)


# -- broken bodies ---------------------------------------------------------------------------------------------


async def test_a_body_that_breaks_while_its_request_is_refused_leaves_no_traceback(
    engine: ScriptedEngine, connect: Callable[..., socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn answers 400 for the body, and the refusal of the host comes after it: one of the two is sent."""
    head = b"POST /v1/release HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n"

    def call(url: str, data: bytes) -> bytes:
        line, answer = connect(url, data), b""
        while part := line.recv(1 << 16):
            answer += part
        return answer

    with running_server(engine) as spec:
        answer = await asyncio.to_thread(call, spec.url, head + b"no size\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.exc_info]


# -- too many connections --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "half-a-head", "half-a-body"])
async def test_at_the_limit_the_connection_that_waits_longest_is_closed_for_a_new_one(
    engine: ScriptedEngine, connect: Callable[..., socket.socket], part: bytes
) -> None:
    def call(url: str) -> None:
        connection = connect(url, WHOLE)
        assert_answered(connection)
        waiting = [connect(url, part) for _ in range(3)]
        assert_answered(connect(url, WHOLE))
        if part != HALF_BODY:
            assert is_cut(waiting[0])
            connection.sendall(WHOLE)
            assert_answered(connection)

    with running_server(engine, limits=ConnectionLimits(max_connections=4)) as spec:
        await asyncio.to_thread(call, spec.url)


async def test_where_every_connection_waits_for_its_answer_another_is_told_to_come_later(
    engine: ScriptedEngine, connect: Callable[..., socket.socket]
) -> None:
    call = POST + b'Content-Length: 12\r\n\r\n{"run": "r"}'

    def wait(url: str) -> list[socket.socket]:
        lines = [connect(url, call) for _ in range(2)]
        while engine.begun["release"] < 2:
            pass
        with httpx.Client() as client:
            answer = client.get(f"{url}/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        return lines

    engine.gate.clear()
    with running_server(engine, limits=ConnectionLimits(max_connections=2)) as spec:
        lines = await asyncio.to_thread(wait, spec.url)
        engine.gate.set()
        for line in lines:
            await asyncio.to_thread(assert_answered, line)
