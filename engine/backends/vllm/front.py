"""What stands before vLLM's own web application in a server of the pool: the token, and the routes that the pool calls.

    GET  /health              vLLM's own; the only one without the token
    GET  /ostinato/hello      {"boot", "state", "options"}: which start of it this is, and the weights it provably holds
    POST /ostinato/rpc        {"method", "args"} -> {"answers"}: a method of our extension in every worker
    POST /ostinato/holds      {"state", "boot"}: the weights were proven to be those of `state`
    POST /ostinato/generate   completions of `state`, as lines of JSON while they are drawn
    POST /ostinato/score      logprobs of given tokens
    POST /ostinato/adapter    {"name", "path", "manifest"}: loads one in every worker -> {"answers"}
    POST /ostinato/forget     {"name"}: removes one
    POST /ostinato/do         {"what": reset_prefix_cache | sleep | wake | is_sleeping}

A server that was started again has random weights and holds no state, so it answers no generate. One whose workers are
broken answers 503 to everything and ends itself. vLLM's own token
covers only a few of its prefixes; this one covers every route.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import asdict
from typing import Any

from engine.backends.vllm.answers import broken
from engine.backends.vllm.runtime import EngineOptions
from engine.backends.vllm.served import Chunk, Served
from engine.errors import BadSpec

TOKEN_ENV = "OSTINATO_SERVER_TOKEN"
"""Environment variable with the bearer token of this server process. Never an argument: those are seen by all users."""
OPTIONS_ENV = "OSTINATO_SERVER_OPTIONS"
"""Environment variable with the EngineOptions that the server was built with, as JSON."""
METHODS = "ostinato_"
"""Only methods of our extension can be called, by the prefix of their names."""
CHECKS = "ostinato_check"
"""Methods that leave the weights as they are: after any other, the server waits to be told what it holds."""
CONFLICT = 409
ENDS_AFTER_SECONDS = 1.0
"""From the answer that says that the workers are broken to the end of this process: time to send it."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Front:
    """ASGI middleware; vLLM makes it from --middleware, by name and without arguments."""

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_ENV, "")
        if not token:
            raise RuntimeError(f"${TOKEN_ENV} is not set: a sampler server never runs without a token")
        self.app = app
        self._expected = f"Bearer {token}".encode()
        self.boot = secrets.token_hex(8)
        self.state: str | None = None
        self.options = EngineOptions(**json.loads(os.environ[OPTIONS_ENV]))
        self.engine: Served | None = None
        self.broken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # a websocket
            return await send({"type": "websocket.close", "code": 1008})
        if self.broken:
            return await _answer(send, 503, {"error": "this server's workers are broken; it ends itself"})
        if (scope["method"], scope["path"]) == ("GET", "/health"):
            return await self.app(scope, receive, send)
        offered = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(offered, self._expected):
            return await _answer(send, 401, {"error": "this server wants a bearer token"})
        if not scope["path"].startswith("/ostinato/"):
            return await self.app(scope, receive, send)
        try:
            await self._route(scope, receive, send)
        except Refused as refused:
            await _answer(send, refused.status, {"error": str(refused)})
        return None

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.engine is None:
            self.engine = Served(scope["app"].state.engine_client, self.options)
        engine = self.engine
        name = scope["path"].removeprefix("/ostinato/")
        if name == "hello":
            return await _answer(send, 200, self._hello())
        body = json.loads(await _read(receive))
        if name == "generate":
            return await self._generate(engine, body, receive, send)
        calls = {
            "rpc": self._rpc,
            "holds": self._holds,
            "score": self._score,
            "adapter": self._adapter,
            "forget": self._forget,
            "do": self._do,
        }
        if name not in calls:
            raise Refused(404, f"no route /ostinato/{name}")
        return await _answer(send, 200, await calls[name](engine, body))

    def _hello(self) -> dict[str, Any]:
        return {"boot": self.boot, "state": self.state, "options": asdict(self.options)}

    async def _rpc(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        method = str(body["method"])
        if not method.startswith(METHODS):
            raise Refused(403, f"{method!r} is no method of the extension")
        if not method.startswith(CHECKS):
            self.state = None
        answers = await engine.rpc(method, body["args"])
        if broken(answers):  # whoever started this server starts it again; nobody else can mend it
            self.broken = True
            asyncio.get_running_loop().call_later(ENDS_AFTER_SECONDS, os.kill, os.getpid(), signal.SIGKILL)
        return {"answers": answers, "boot": self.boot}

    async def _holds(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        if body["boot"] != self.boot:
            raise Refused(CONFLICT, f"the proof was for start {body['boot']} of this server, and this is {self.boot}")
        self.state = str(body["state"])
        return {}

    async def _score(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        self._must_hold(body)
        return {"logprobs": await engine.score(body["sequences"], body["state"], body["adapter"])}

    async def _adapter(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        return {"answers": await engine.load_adapter(body["name"], body["path"], body["manifest"]), "boot": self.boot}

    async def _forget(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        return {"answers": await engine.remove_adapter(body["name"]), "boot": self.boot}

    async def _do(self, engine: Served, body: dict[str, Any]) -> dict[str, Any]:
        if body["what"] == "sleep":
            self.state = None
        return {"answer": await engine.do(body["what"])}

    def _must_hold(self, body: dict[str, Any]) -> None:
        if self.state is None or body["state"] != self.state:
            raise Refused(CONFLICT, f"state {body['state']} was asked for, and this server holds {self.state}")

    async def _generate(
        self, engine: Served, body: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        """A line per chunk: [completion, token ids, logprobs, stop reason or null]; the last line is {"done": n} or
        {"error": text}. A caller that hangs up ends its completions."""
        self._must_hold(body)
        await _start(send, 200, b"application/x-ndjson")
        gone = asyncio.ensure_future(_hung_up(receive))
        drawing = asyncio.ensure_future(_stream(engine.generate(body), send))
        try:
            await asyncio.wait([gone, drawing], return_when=asyncio.FIRST_COMPLETED)
            if drawing.done():
                await drawing
        finally:
            for task in (gone, drawing):
                task.cancel()
            await asyncio.gather(gone, drawing, return_exceptions=True)


async def _stream(chunks: AsyncIterator[Chunk], send: Send) -> None:
    count = 0
    last: dict[str, Any]
    try:
        async for chunk in chunks:
            count += chunk[-1] is not None
            await send({"type": "http.response.body", "body": _line(chunk), "more_body": True})
        last = {"done": count}
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - the status is sent: the last line carries the blame
        last = {"error": f"{type(error).__name__}: {error}", "bad": isinstance(error, BadSpec)}
    await send({"type": "http.response.body", "body": _line(last), "more_body": False})


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the caller hung up before its request was whole")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _start(send: Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _answer(send: Send, status: int, value: dict[str, Any]) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": _line(value), "more_body": False})
