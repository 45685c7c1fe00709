"""Calls of the app: conflicts, polling, cancelling, draining, defects and metrics."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from engine.http import wire
from engine.http.service import EngineService
from engine.protocol import GenerateRequest
from tests.fixtures.servers.app_clients import POLICY, TOKEN, Serve, bearer
from tests.fixtures.servers.scripted_engine import ScriptedEngine


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
