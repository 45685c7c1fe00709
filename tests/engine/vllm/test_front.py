"""What stands before vLLM in a server: the token, what it lets be drawn, and its end when its workers are broken."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest

from engine.backends.vllm import front as front_module


class FakeEngine:
    """What of vLLM's engine the front reaches without drawing."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.also: dict[str, Any] = {}
        """In what the second worker answers."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.called.append(method)
        return [{"rank": 0, "boot": "w", "wrong": None}, {"rank": 1, "boot": "x", "wrong": "no"} | self.also]

    async def reset_prefix_cache(self) -> bool:
        return True


def front_client(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> tuple[Any, httpx.AsyncClient]:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from engine.backends.vllm.front import OPTIONS_ENV, TOKEN_ENV, Front

    async def ok(request: Any) -> PlainTextResponse:
        return PlainTextResponse("vllm")

    monkeypatch.setenv(TOKEN_ENV, "t" * 32)
    monkeypatch.setenv(OPTIONS_ENV, json.dumps({"dtype": "float32", "max_context": 64, "vocab_size": 16}))
    app = Starlette(routes=[Route("/{rest:path}", ok, methods=["GET", "POST", "OPTIONS"])])
    app.state.engine_client = engine
    front = Front(app)

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        await front({**scope, "app": app}, receive, send)

    return front, httpx.AsyncClient(transport=httpx.ASGITransport(with_app), base_url="http://server")


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/metrics", "/collective_rpc", "/ostinato/hello", "/health/", "//health"])
def test_no_route_but_health_answers_without_the_token(monkeypatch: pytest.MonkeyPatch, method: str, path: str) -> None:
    async def main() -> None:
        _, client = front_client(monkeypatch, FakeEngine())
        for value in (None, "", "Bearer", "Bearer " + "t" * 31, "bearer " + "t" * 32, "Basic " + "t" * 32):
            headers = {} if value is None else {"authorization": value}
            assert (await client.request(method, path, headers=headers)).status_code == 401, value
        assert (await client.get("/health")).text == "vllm"
        allowed = await client.get("/metrics", headers={"authorization": "Bearer " + "t" * 32})
        assert allowed.text == "vllm"

    asyncio.run(main())


def test_a_server_draws_only_for_the_state_that_was_proven_in_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine()
        front, client = front_client(monkeypatch, engine)
        client.headers["authorization"] = "Bearer " + "t" * 32
        ask = {"state": "s", "sequences": [], "adapter": None}
        assert (await client.post("/ostinato/score", json=ask)).status_code == 409
        assert (await client.post("/ostinato/holds", json={"state": "s", "boot": "before"})).status_code == 409
        await client.post("/ostinato/holds", json={"state": "s", "boot": front.boot})
        assert (await client.post("/ostinato/score", json=ask)).status_code == 200
        assert (await client.post("/ostinato/score", json=ask | {"state": "other"})).status_code == 409
        await client.post("/ostinato/rpc", json={"method": "ostinato_check", "args": ["s"]})
        assert (await client.post("/ostinato/score", json=ask)).status_code == 200
        await client.post("/ostinato/rpc", json={"method": "ostinato_load", "args": []})
        assert (await client.post("/ostinato/score", json=ask)).status_code == 409
        refused = await client.post("/ostinato/rpc", json={"method": "save_sharded_state", "args": []})
        assert refused.status_code == 403 and engine.called == ["ostinato_check", "ostinato_load"]

    asyncio.run(main())


def test_a_server_whose_workers_are_broken_answers_nothing_more_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(front_module, "ENDS_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(os, "kill", lambda *asked: killed.append(asked))

    async def main() -> None:
        engine = FakeEngine()
        _, client = front_client(monkeypatch, engine)
        client.headers["authorization"] = "Bearer " + "t" * 32
        load = {"method": "ostinato_load", "args": []}
        engine.also = {"broken": False}
        assert (await client.post("/ostinato/rpc", json=load)).status_code == 200
        assert (await client.get("/health")).status_code == 200 and not killed  # wrong, but the next load may do
        engine.also = {"broken": True}
        answered = await client.post("/ostinato/rpc", json=load)
        assert answered.json()["answers"][1] == {"rank": 1, "boot": "x", "wrong": "no", "broken": True}
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/ostinato/rpc", json=load)).status_code == 503
        await asyncio.sleep(0.01)
        assert killed == [(os.getpid(), signal.SIGKILL)]

    asyncio.run(main())
