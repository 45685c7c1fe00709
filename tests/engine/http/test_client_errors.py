"""Retries and errors of the client: every failure reaches the caller as an error that it can act on."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial

import httpx
import pytest

from engine import errors as engine_errors
from engine.errors import (
    EngineBusy,
    EngineUnreachable,
    NotAuthenticated,
    PermanentEngineError,
    StepConflict,
    TransientEngineError,
    WorkerDied,
)
from engine.http.app import create_app
from engine.http.client import ChatPiece, EngineClient, stream_chat
from engine.http.errors import ERROR_CLASSES, ErrorBody, error_body, error_of_body, http_status
from engine.http.service import ServerOptions
from engine.http.transport import LONGEST_DELAY_SECONDS, RequestBackoff
from engine.specs.engine import HttpEngineSpec
from storage import errors as storage_errors
from storage.errors import StorageUnavailable
from storage.store.objects import ObjectStore
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import UnreliableLine, client_over

pytestmark = pytest.mark.usefixtures("no_backoff")


# -- retries ----------------------------------------------------------------------------------------------------


def busy() -> httpx.Response:
    body = error_body(EngineBusy("full"), "0" * 32)
    return httpx.Response(503, content=body.model_dump_json(), headers={"Retry-After": "1"})


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_proxy_or_a_server_without_room_is_asked_again(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, status: int
) -> None:
    line.refuse = [httpx.Response(status, html="<h1>not now</h1>"), busy(), httpx.Response(status)]
    await client_over(line, store).release("r")
    assert engine.done["release"] == 1
    assert len(line.seen) == 5  # the handshake, three refusals, the call


async def test_a_server_without_room_for_too_long_is_busy(line: UnreliableLine, store: ObjectStore) -> None:
    line.refuse = [busy() for _ in range(3)]
    with pytest.raises(EngineBusy, match="full"):
        await client_over(line, store, patience_seconds=0).release("r")


async def test_an_engine_that_is_not_there_is_unreachable(store: ObjectStore) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        client = EngineClient(store.url, HttpEngineSpec(url=url, patience_seconds=0))
        with pytest.raises(EngineUnreachable, match="ostinato engine serve") as refused:
            await client.info()
        assert url in str(refused.value)
        await client.close()


async def test_an_address_that_is_no_engine_is_said_at_once(line: UnreliableLine, store: ObjectStore) -> None:
    line.refuse = [httpx.Response(404, html="<h1>nginx</h1>")]
    with pytest.raises(PermanentEngineError, match=r"127.0.0.1:8777 answered 404.*check engine\.url"):
        await client_over(line, store).release("r")


async def test_patience_backs_off_with_full_jitter_and_starts_anew_with_each_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.http.transport.FIRST_DELAY_SECONDS", 0.1)
    slept: list[float] = []
    now = 0.0

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("engine.http.transport.asyncio.sleep", sleep)
    backoff = RequestBackoff(100, clock=lambda: now, draw=lambda: 1.0)
    for _ in range(12):
        await backoff.pause(WorkerDied())
    assert slept[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert max(slept) == slept[-1] == LONGEST_DELAY_SECONDS
    now = 99
    backoff.reset()
    now = 198
    await backoff.pause(WorkerDied())
    assert slept[-1] == pytest.approx(0.2)
    now = 199
    with pytest.raises(WorkerDied):
        await backoff.pause(WorkerDied())


async def test_patience_bounds_the_wait_for_a_server_that_hangs(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped engine: the kernel accepts connections for it, and no request has an answer. A request may take 60 s,
    and the retries of a task are calls within the same outage."""
    monkeypatch.setattr("engine.http.transport.LAST_TRY_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        client = EngineClient(store.url, HttpEngineSpec(url=url, timeout_seconds=60, patience_seconds=1))
        for longest in (2.5, 1.0, 1.0):
            async with asyncio.timeout(longest):
                with pytest.raises(EngineUnreachable, match="did not answer for 1 s"):
                    await client.info()
        # after a pause, the outage may be over
        await asyncio.sleep(1.1)
        began = time.monotonic()
        with pytest.raises(EngineUnreachable):
            await client.info()
        assert time.monotonic() - began >= 1.0
        await client.close()


# -- errors -----------------------------------------------------------------------------------------------------


def every(module: object, base: type[Exception]) -> list[type[Exception]]:
    return [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base)]


@pytest.mark.parametrize(
    "kind", every(engine_errors, engine_errors.EngineError) + every(storage_errors, storage_errors.StorageError)
)
async def test_every_error_comes_back_as_itself_and_only_transient_ones_are_5xx(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, kind: type[Exception]
) -> None:
    engine.error = kind("what was given, what to do")
    transient = issubclass(kind, TransientEngineError | storage_errors.TransientStorageError)
    assert http_status(kind.__name__) == 503 if transient else 400 <= http_status(kind.__name__) < 500
    with pytest.raises(kind, match="what was given, what to do") as raised:
        await client_over(line, store, patience_seconds=0).release("r")
    assert type(raised.value) is kind
    assert engine.begun["release"] == 1


@pytest.mark.parametrize("kind", [WorkerDied, StorageUnavailable])
async def test_a_transient_failure_is_the_tasks_to_retry_and_the_next_call_works(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, kind: type[Exception]
) -> None:
    client = client_over(line, store)
    engine.error = kind("gone")
    with pytest.raises(kind):
        await client.release("r")
    engine.error = None
    await client.release("r")


async def test_a_defect_of_the_server_is_transient_and_names_its_log(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore
) -> None:
    engine.error = ZeroDivisionError("secret of the server")
    with pytest.raises(TransientEngineError, match="traceback under request id [0-9a-f]{32}") as raised:
        await client_over(line, store).release("r")
    assert "secret" not in str(raised.value)


def test_subclasses_travel_as_the_class_both_sides_know() -> None:
    class Odd(StepConflict):
        pass

    body = error_body(Odd("x"), "0" * 32)
    assert type(error_of_body(body)) is StepConflict
    unknown = ErrorBody(error="OfTheFuture", message="m", request_id="")
    assert type(error_of_body(unknown)) is PermanentEngineError
    assert set(ERROR_CLASSES) >= {"EngineBusy", "ObjectNotFound"}


async def test_a_wrong_token_is_said_without_saying_it(
    engine: ScriptedEngine, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = "right-token-right-token", "wrong-token-wrong-token"
    line = UnreliableLine(create_app(engine, store, ServerOptions(token=right)))
    client = client_over(line, store, token_env="ENGINE_TOKEN_OF_TEST")
    for value, said in ((None, "not set"), (wrong, "set")):
        if value is not None:
            monkeypatch.setenv("ENGINE_TOKEN_OF_TEST", value)
        with pytest.raises(NotAuthenticated, match=rf"\$ENGINE_TOKEN_OF_TEST \({said} here\)") as refused:
            await client.release("r")
        assert wrong not in str(refused.value) + repr(client) + repr(client.spec)
    monkeypatch.setenv("ENGINE_TOKEN_OF_TEST", right)
    await client.release("r")
    assert right not in repr(client) + repr(client.spec) + repr(client._transport)


@pytest.mark.parametrize("token", ["one\nSECRET", "SECRET-é"])
async def test_a_token_that_no_header_holds_is_refused_without_showing_it(
    line: UnreliableLine, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN_OF_TEST", token)
    with pytest.raises(NotAuthenticated, match=r"\$ENGINE_TOKEN_OF_TEST.*one line") as refused:
        await client_over(line, store, token_env="ENGINE_TOKEN_OF_TEST").release("r")
    assert "SECRET" not in str(refused.value)


# -- the stream of a chat ---------------------------------------------------------------------------------------

PIECE = b'data: {"choices": [{"delta": {"content": "four"}}]}\n\n'


async def chat_pieces(monkeypatch: pytest.MonkeyPatch, body: bytes) -> list[ChatPiece]:
    """The pieces of the chat of a server that replies with this event stream."""
    reply = httpx.MockTransport(lambda _: httpx.Response(200, content=body, headers={"x-ostinato-policy": "p"}))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=reply))
    return [piece async for piece in stream_chat("http://127.0.0.1:1", None, {})]


async def test_comments_and_other_fields_of_a_chat_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b": keep-alive\n\nevent: chunk\nid: 1\n" + PIECE + b'data:{"choices": []}\r\n\r\ndata: [DONE]\n\n'
    assert await chat_pieces(monkeypatch, body) == [ChatPiece("p", "four")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PIECE, "cut off"),
        (b"", "cut off"),
        (PIECE + b"data: <html>\n\n", "sent '<html>'; expected an event of a chat"),
        (b"data: 4\n\n", "sent '4'"),
        (b'data: {"choices": [4]}\n\n', "expected an event"),
        (b'data: {"error": {"message": "no room"}}\n\n', "the engine refused: no room"),
    ],
)
async def test_a_chat_that_is_cut_off_or_no_chat_is_an_error(
    monkeypatch: pytest.MonkeyPatch, body: bytes, message: str
) -> None:
    with pytest.raises(PermanentEngineError, match=message):
        await chat_pieces(monkeypatch, body)
