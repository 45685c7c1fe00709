"""Who may call, what is refused at the door, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
from pydantic import ValidationError

from engine.errors import BadSpec
from engine.http import wire
from engine.http.app import create_app
from engine.http.guard import MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_PROMPT_VALUES
from engine.http.lifecycle import Binding
from engine.http.openai.models import ChatRequest
from engine.http.service import EngineService, ServerOptions
from engine.protocol import GenerateRequest, LogprobsRequest, TokenSequence
from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import PROVENANCE
from tests.fixtures.http_engine import running_server
from tests.fixtures.scripted_engine import ScriptedEngine

TOKEN = "0123456789abcdef-the-token"
POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=0, state="f" * 64)
PROVENANCE_JSON = PROVENANCE.model_dump()
PATHS = ["../x", "a/../../b", "/etc/passwd", "..", ".", "", "a\\b", "a\0b", "C:/x", "a/b/c", "~", "%2e%2e", "a\nb", "ä"]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def engine(store: ObjectStore) -> ScriptedEngine:
    return ScriptedEngine(store)


Serve = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def serve(engine: ScriptedEngine, store: ObjectStore) -> AsyncIterator[Serve]:
    """A client of an app in this process."""
    clients: list[httpx.AsyncClient] = []

    def serve(base_url: str = "http://127.0.0.1", **options: object) -> httpx.AsyncClient:
        app = create_app(engine, store, ServerOptions(**options))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url=base_url))
        clients[-1].service = app.state.service  # type: ignore[attr-defined]
        return clients[-1]

    yield serve
    for client in clients:
        await client.aclose()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


ROUTES = [
    ("GET", "/v1/info"),
    ("GET", "/v1/server"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nope"),
    ("GET", f"/v1/calls/{'0' * 32}"),
    ("DELETE", f"/v1/calls/{'0' * 32}"),
    ("GET", "/v1/models"),
    *(
        ("POST", f"/v1/{verb}")
        for verb in (
            "import_model", "create_policy", "generate", "logprobs", "values", "take_gradient_step", "save_checkpoint",
            "begin_checkpoint", "export_model", "release", "chat/completions", "completions",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_the_probes_wants_the_token(serve: Serve, method: str, path: str) -> None:
    client = serve(token=TOKEN)
    for headers in ({}, bearer(""), bearer(TOKEN[:-1]), bearer(TOKEN + "x"), {"Authorization": f"Basic {TOKEN}"}):
        answer = await client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"] == "NotAuthenticated"
    assert (await client.request(method, path, headers=bearer(TOKEN))).status_code != 401


async def test_the_probes_want_no_token(serve: Serve) -> None:
    client = serve(token=TOKEN)
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json()["message"] == "the engine is starting"


async def test_a_token_that_is_not_ascii_is_refused(serve: Serve) -> None:
    answer = await serve(token=TOKEN).get("/v1/server", headers={b"Authorization": "Bearer ä".encode()})
    assert answer.status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.7:8777", "", "localhost.io"])
async def test_without_a_token_other_host_names_are_refused(serve: Serve, host: str) -> None:
    client = serve()
    answer = await client.get("/v1/server", headers={"Host": host})
    assert answer.status_code == 403
    assert (await serve(token=TOKEN).get("/v1/server", headers={"Host": host} | bearer(TOKEN))).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8777", "localhost", "LOCALHOST:1", "[::1]:8777", "127.8.9.1"])
async def test_without_a_token_loopback_names_are_served(serve: Serve, host: str) -> None:
    assert (await serve().get("/v1/server", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_without_a_token_other_addresses_are_not_bound(host: str) -> None:
    with pytest.raises(BadSpec, match="OSTINATO_ENGINE_TOKEN"):
        Binding(host, 0).open()


async def test_a_page_of_another_site_cannot_post(serve: Serve, engine: ScriptedEngine) -> None:
    """Without our content type or our headers a browser would ask no permission first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await serve().post("/v1/release", content=b'{"run": "r"}', headers={"Content-Type": kind})
        assert answer.status_code == 422
        answer = await serve().post("/v1/generate", content=b"", headers={"Content-Type": kind})
        assert answer.status_code == 422
    assert not engine.begun


# -- names -----------------------------------------------------------------------------------------------------


def bodies_with(name: str) -> list[tuple[str, dict]]:
    """Every place where a name may stand, with this one in it."""
    policy, artifact = POLICY.model_dump(), {"kind": "k", "sha256": "0", "bytes": 1, "rows": None, "parents": []}
    step = {"batch": artifact | {"key": "k"}, "loss": {"kind": "cross_entropy"}, "optimizer": {"lr": 1.0}}
    root = {"base_digest": "d", "base": artifact | {"key": "k"}}
    spec = {"run": "r", "stage": "s", "model": "m", "root": root}
    bodies: list[tuple[str, dict]] = [
        ("import_model", {"source": name, "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": f"m@{name}", "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": name, "upload": "0" * 64, "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": "m", "upload": name, "provenance": PROVENANCE_JSON}),
        ("create_policy", {"spec": spec | {"root": root | {"base": artifact | {"key": name}}}}),
        ("take_gradient_step", {"request": step | {"parent": policy, "batch": artifact | {"key": name}}}),
        ("export_model", {"policy": policy, "model_name": name, "provenance": PROVENANCE_JSON}),
        ("save_checkpoint", {"policy": policy, "name": name, "provenance": PROVENANCE_JSON}),
        ("begin_checkpoint", {"policy": policy, "name": name, "provenance": PROVENANCE_JSON}),
        ("release", {"run": name}),
    ]
    for field in ("run", "stage", "model"):
        wrong = policy | {field: name}
        bodies += [
            ("create_policy", {"spec": spec | {field: name}}),
            ("create_policy", {"spec": spec | {"root": {"base_digest": "", "start": wrong}}}),
            ("take_gradient_step", {"request": step | {"parent": wrong}}),
            ("take_gradient_step", {"request": step | {"parent": policy, "reference": wrong}}),
            ("save_checkpoint", {"policy": wrong, "provenance": PROVENANCE_JSON}),
            ("begin_checkpoint", {"policy": wrong, "provenance": PROVENANCE_JSON}),
            ("export_model", {"policy": wrong, "model_name": "m", "provenance": PROVENANCE_JSON}),
        ]
    return bodies


@pytest.mark.parametrize("name", PATHS)
async def test_path_like_names_are_refused_and_nothing_is_touched(
    serve: Serve, engine: ScriptedEngine, store: ObjectStore, name: str
) -> None:
    client = serve()
    before = [info.key for info in store.list()]
    for verb, body in bodies_with(name):
        if name == "a/b/c" and body.get("request", {}).get("batch", {}).get("key") == name:
            continue  # a key of an artifact may have slashes
        if name == "a/b/c" and (body.get("spec", {}).get("root", {}).get("base") or {}).get("key") == name:
            continue
        answer = await client.post(f"/v1/{verb}", json=body)
        assert answer.status_code == 422, (verb, body, answer.text)
    for field in ("run", "stage", "model"):
        policy = POLICY.model_copy(update={field: name})
        for verb, data in (
            ("generate", wire.encode_generate(GenerateRequest(policy, [[1]], [1]), epoch=0)),
            ("logprobs", wire.encode_logprobs_request(LogprobsRequest(policy, [TokenSequence([1], [0.0])]), epoch=0)),
            ("values", wire.encode_logprobs_request(LogprobsRequest(policy, [TokenSequence([1], [0.0])]), epoch=0)),
        ):
            answer = await client.post(f"/v1/{verb}", content=data, headers={"Content-Type": wire.MEDIA_TYPE})
            assert answer.status_code == 422
    assert not engine.begun
    assert [info.key for info in store.list()] == before


# -- sizes -----------------------------------------------------------------------------------------------------


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
    answer = await serve().post("/v1/completions", json={"model": "nobody", "prompt": [7] * 100_000})
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
    assert (answer.status_code, answer.json()["error"], answer.headers["retry-after"]) == (503, "EngineBusy", "1")
    service.calls.reserve(-service.calls.reserved_bytes)
    assert (await client.post("/v1/release", json={"run": "r", "epoch": 0})).status_code == 200
    assert service.calls.reserved_bytes == 0


# -- calls -----------------------------------------------------------------------------------------------------


async def test_a_request_id_with_another_body_is_a_conflict(serve: Serve, engine: ScriptedEngine) -> None:
    client, id = serve(), {"X-Request-Id": uuid4().hex}
    first = await client.post("/v1/release", json={"run": "r"}, headers=id)
    again = await client.post("/v1/release", json={"run": "r"}, headers=id)
    other = await client.post("/v1/release", json={"run": "s"}, headers=id)
    assert [first.status_code, again.status_code, other.status_code] == [200, 200, 409]
    assert other.json()["error"] == "CallConflict"
    assert engine.done["release"] == 1
    assert other.headers["x-request-id"] == id["X-Request-Id"] == other.json()["request_id"]


async def test_a_long_call_is_polled(serve: Serve, engine: ScriptedEngine) -> None:
    client, id = serve(), uuid4().hex
    engine.gate.clear()
    waiting = await client.post("/v1/release", params={"wait": 0}, json={"run": "r"}, headers={"X-Request-Id": id})
    assert (waiting.status_code, waiting.json()) == (202, {"id": id, "state": "waiting"})
    assert waiting.headers["location"] == f"/v1/calls/{id}"
    assert (await client.get(f"/v1/calls/{id}", params={"wait": 0})).status_code == 202
    engine.gate.set()
    assert (await client.get(f"/v1/calls/{id}", params={"wait": 5})).status_code == 200
    assert engine.done["release"] == 1


async def test_a_call_that_is_taken_back_is_gone(serve: Serve, engine: ScriptedEngine) -> None:
    client, id = serve(), uuid4().hex
    engine.gate.clear()
    await client.post("/v1/release", params={"wait": 0}, json={"run": "r"}, headers={"X-Request-Id": id})
    assert (await client.delete(f"/v1/calls/{id}")).status_code == 204
    gone = await client.get(f"/v1/calls/{id}")
    assert (gone.status_code, gone.json()["error"]) == (404, "UnknownCall")
    engine.gate.set()
    assert engine.done["release"] == 0


@pytest.mark.parametrize(
    ("headers", "message"), [({"X-Ostinato-Version": "99"}, "version '99'"), ({"X-Ostinato-Store": "x"}, "store 'x'")]
)
async def test_callers_that_mean_another_server_are_refused(
    serve: Serve, engine: ScriptedEngine, headers: dict[str, str], message: str
) -> None:
    answer = await serve().post("/v1/release", json={"run": "r"}, headers=headers)
    assert answer.status_code == 422
    assert message in answer.json()["message"]
    assert not engine.begun


async def test_a_defect_is_a_500_with_an_id_and_its_traceback_is_logged(
    serve: Serve, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = ZeroDivisionError("a defect")
    answer = await serve().post("/v1/release", json={"run": "r"})
    assert (answer.status_code, answer.json()["error"]) == (500, "InternalError")
    assert "a defect of the engine server" in answer.json()["message"]
    assert "ZeroDivisionError: a defect" in caplog.text
    assert answer.json()["request_id"] in caplog.text


async def test_a_draining_server_takes_no_calls_and_still_answers_those_it_took(
    serve: Serve, engine: ScriptedEngine
) -> None:
    client, id = serve(), uuid4().hex
    service: EngineService = client.service  # type: ignore[attr-defined]
    engine.gate.clear()
    await client.post("/v1/release", params={"wait": 0}, json={"run": "r"}, headers={"X-Request-Id": id})
    draining = asyncio.create_task(service.drain(60))
    await asyncio.sleep(0)
    refused = await client.post("/v1/release", json={"run": "r"})
    assert (refused.status_code, refused.json()["error"], refused.headers["retry-after"]) == (503, "EngineBusy", "1")
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    engine.gate.set()
    assert await draining
    assert (await client.get(f"/v1/calls/{id}")).status_code == 200


async def test_a_call_that_outlasts_the_grace_does_not_hold_the_drain(serve: Serve, engine: ScriptedEngine) -> None:
    client = serve()
    engine.gate.clear()
    assert not await client.service.drain(0)  # type: ignore[attr-defined]


async def test_metrics_count_calls_tokens_and_steps(serve: Serve, engine: ScriptedEngine) -> None:
    client = serve()
    data = wire.encode_generate(GenerateRequest(POLICY, [[1], [2]], [1, 2]), epoch=0)
    await client.post("/v1/generate", content=data, headers={"Content-Type": wire.MEDIA_TYPE})
    await client.post("/v1/release", json={"run": "../r"})
    text = (await client.get("/metrics")).text
    assert 'ostinato_calls_total{status="200",verb="generate"} 1.0' in text
    assert "ostinato_generated_tokens_total 4.0" in text  # the script answers two tokens per prompt
    assert 'ostinato_http_requests_total{method="POST",status="422"} 1.0' in text
    assert "ostinato_calls_waiting 0.0" in text


async def test_metrics_do_not_grow_with_methods_that_callers_make_up(serve: Serve) -> None:
    client = serve(token=TOKEN)
    for number in range(3):
        await client.request(f"M{number}", "/health")
    text = (await client.get("/metrics", headers=bearer(TOKEN))).text
    assert 'ostinato_http_requests_total{method="other",status="405"} 3.0' in text
    assert 'method="M' not in text


# -- the log ---------------------------------------------------------------------------------------------------


async def test_log_lines_name_the_call_and_carry_no_payload_and_no_token(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client, id = serve(token=TOKEN), uuid4().hex
    secret = {"provenance": PROVENANCE_JSON | {"config_digest": "PAYLOAD"}, "source": "PAYLOAD-name"}
    headers = bearer(TOKEN) | {"X-Request-Id": id}
    await client.post("/v1/import_model", json=secret, headers=headers)
    await client.post("/v1/import_model", json={"PAYLOAD": "PAYLOAD"}, headers=bearer(TOKEN))
    await client.post("/v1/release", json={"run": "the-run"}, headers=bearer(TOKEN))
    await client.post("/v1/release", json={"run": "PAYLOAD"}, headers=bearer("WRONG" + TOKEN))
    await client.get("/v1/x%0d%0aforged line?PAYLOAD=1", headers=bearer(TOKEN))
    lines = [r.getMessage() for r in caplog.records if r.name == "ostinato.engine.http"]
    assert [line.split(" ")[:3] for line in lines] == [
        ["POST", "/v1/import_model", "422"],
        ["POST", "/v1/import_model", "422"],
        ["POST", "/v1/release", "200"],
        ["POST", "/v1/release", "401"],
        ["GET", "/v1/x%0d%0aforged%20line", "404"],
    ]
    assert f"id={id}" in lines[0]
    assert lines[2].endswith("run=the-run")
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore")))
    assert TOKEN not in ours
    assert "PAYLOAD" not in ours


def test_options_and_bindings_do_not_show_the_token() -> None:
    assert TOKEN not in repr(ServerOptions(token=TOKEN)) + repr(Binding(token=TOKEN))
