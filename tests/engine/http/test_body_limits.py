"""Sizes of request bodies: too large ones are refused before they are read or parsed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from engine.http import wire
from engine.http.guard import MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_PROMPT_VALUES
from engine.http.openai.models import ChatRequest
from engine.http.service import EngineService
from tests.fixtures.servers.app_clients import Serve
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.servers.scripted_engine import ScriptedEngine


async def test_a_body_is_refused_by_what_it_announces_and_by_what_it_is(serve: Serve, engine: ScriptedEngine) -> None:
    client = serve(max_body_bytes=1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    arrow = {"Content-Type": wire.MEDIA_TYPE}
    for content in (b"x" * 1001, chunks()):
        answer = await client.post("/v1/generate", content=content, headers=arrow)
        assert (answer.status_code, answer.json()["error"]) == (413, "BodyTooLarge")
    answer = await client.post("/v1/generate", content=b"x" * 1000, headers=arrow)
    assert (answer.status_code, answer.json()["error"]) == (422, "BadSpec")
    large = serve()
    json_type = {"Content-Type": "application/json"}
    answer = await large.post("/v1/release", content=b" " * (MAX_JSON_BYTES + 1), headers=json_type)
    assert answer.status_code == 413
    assert not engine.begun


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/create_policy", b"0," * MAX_JSON_VALUES),
        ("/v1/create_policy", b"[" * MAX_JSON_VALUES),
        ("/v1/chat/completions", b"0," * MAX_PROMPT_VALUES),
        ("/v1/completions", b'"":0,' * (MAX_PROMPT_VALUES // 8)),
        ("/v1/completions", b'"\\",:",[' * MAX_PROMPT_VALUES),
    ],
    ids=["items", "brackets", "messages", "names", "marks-in-strings-and-outside"],
)
async def test_a_body_of_too_many_json_values_is_refused_before_it_is_parsed(
    serve: Serve, path: str, values: bytes
) -> None:
    """Four million wrong items in a body of the largest size kept the server from all others for 84 s."""
    headers = {"Content-Type": "application/json"}
    answer = await serve().post(path, content=b'{"messages": [' + values, headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (413, "BodyTooLarge")


async def test_a_prompt_of_a_hundred_thousand_token_ids_reaches_the_route(serve: Serve) -> None:
    answer = await serve().post("/v1/completions", json={"model": "unknown", "prompt": [7] * 100_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("wrong", [{"messages": [0] * 9}, {"messages": [{"role": "user", "content": [0] * 9}]}])
def test_a_list_of_wrong_messages_is_refused_at_the_first(wrong: dict[str, Any]) -> None:
    """An error for each of a hundred thousand items would keep the server from all others for a second."""
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"model": "r", **wrong})
    assert raised.value.error_count() <= 2  # one for each type that the content may have


async def test_marks_within_strings_are_no_json_values(serve: Serve) -> None:
    text = '"prompt, of: [many] {marks}\\' * (MAX_JSON_VALUES // 4)
    answer = await serve().post("/v1/release", json={"run": text})
    assert answer.status_code == 422
    unclosed = b'"' + b',:\\"' * (MAX_JSON_BYTES // 4 - 10)  # each quote could begin a string
    answer = await serve().post("/v1/release", content=unclosed, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


async def test_a_gigabyte_is_refused_before_it_is_read(engine: ScriptedEngine) -> None:
    def send(url: str) -> tuple[bytes, int]:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=20) as line:
            head = f"POST /v1/generate HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
            line.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
            answer, sent = line.recv(4096), 0
            try:
                while sent < 1 << 30:
                    sent += line.send(b"\0" * (1 << 20))
            except OSError:
                pass
            return answer, sent

    with running_server(engine) as spec:
        answer, sent = await asyncio.to_thread(send, spec.url)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < 64 << 20  # the buffers of two sockets, not a gigabyte
    assert not engine.begun


async def test_bytes_that_wait_are_bounded_over_all_calls(serve: Serve, engine: ScriptedEngine) -> None:
    client = serve()
    service: EngineService = client.service  # type: ignore[attr-defined]
    service.calls.reserve(service.calls.limits.waiting_bytes - 10)
    answer = await client.post("/v1/release", json={"run": "r", "epoch": 0})
    assert (answer.status_code, answer.json()["error"], answer.headers["retry-after"]) == (503, "NotAdmitted", "1")
    service.calls.reserve(-service.calls.reserved_bytes)
    assert (await client.post("/v1/release", json={"run": "r", "epoch": 0})).status_code == 200
    assert service.calls.reserved_bytes == 0
