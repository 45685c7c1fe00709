"""The client over a line that fails: every call has one effect, and every failure is the one its caller can act on."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import errors as engine_errors
from engine.connect import connect
from engine.errors import (
    BadModelFolder,
    BadSpec,
    EngineBusy,
    EngineUnreachable,
    NotAuthenticated,
    PermanentEngineError,
    StepConflict,
    TransientEngineError,
    WorkerDied,
)
from engine.http.app import create_app
from engine.http.client import EngineClient
from engine.http.errors import ERROR_CLASSES, ErrorBody, error_body, error_of_body, http_status
from engine.http.service import EngineService, ServerOptions
from engine.http.transport import LONGEST_DELAY_SECONDS, Backoff
from engine.local.engine import LocalEngine
from engine.protocol import Engine, GenerateRequest, LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.specs.engine import HttpEngineSpec
from storage import errors as storage_errors
from storage.chain.records import Chain, PolicyRef, Root, StepRequest
from storage.errors import ObjectNotFound, StorageUnavailable
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, events, new_policy, request_after
from tests.fixtures.http_engine import running_server
from tests.fixtures.scripted_engine import ScriptedEngine, ref

POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=0, state="f" * 64)
STEP = StepRequest(parent=POLICY, batch=ref("batch", "b", POLICY), loss={}, optimizer={"lr": 1.0})  # type: ignore[arg-type]
URL = "http://127.0.0.1:8777"

VERBS: dict[str, Callable[[Engine], Awaitable[Any]]] = {
    "create_policy": lambda e: e.create_policy(
        PolicySpec(run="r", stage="0-s", model="m", root=Root(base=ref("model", "m", POLICY), base_digest="d"))
    ),
    "generate": lambda e: e.generate(GenerateRequest(POLICY, [[1], [2]], [3, 4]), epoch=5),
    "logprobs": lambda e: e.logprobs(LogprobsRequest(POLICY, [TokenSequence([1, 2], [0.0, 1.0])], 0.7)),
    "values": lambda e: e.values(LogprobsRequest(POLICY, [TokenSequence([1, 2], [0.0, 1.0])]), epoch=5),
    "take_gradient_step": lambda e: e.take_gradient_step(STEP, epoch=5),
    "begin_checkpoint": lambda e: e.begin_checkpoint(POLICY, provenance=PROVENANCE),
    "save_checkpoint": lambda e: e.save_checkpoint(POLICY, provenance=PROVENANCE, name="best"),
    "export_model": lambda e: e.export_model(POLICY, "trained", provenance=PROVENANCE),
    "release": lambda e: e.release("r", epoch=5),
}


@dataclass
class Line(httpx.AsyncBaseTransport):
    """The network: hands requests to the server of the moment, and fails as it is told."""

    app: Any
    lose_answers: int = 0
    """How many answers of each (method, path) are lost after the server did its work."""
    refuse: list[httpx.Response] = field(default_factory=list)
    """Answered in place of the server, in this order."""
    seen: list[httpx.Request] = field(default_factory=list)
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    on_202: Callable[[], None] = lambda: None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if self.refuse and request.url.path != "/v1/server":
            return self.refuse.pop(0)
        answer = await httpx.ASGITransport(app=self.app).handle_async_request(request)
        if answer.status_code == 202:
            self.on_202()
        where = (request.method, request.url.path)
        if self.lost[where] < self.lose_answers:
            self.lost[where] += 1
            raise httpx.ReadError("the answer is lost", request=request)
        return answer


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def engine(store: ObjectStore) -> ScriptedEngine:
    return ScriptedEngine(store)


@pytest.fixture
def line(engine: ScriptedEngine, store: ObjectStore) -> Line:
    return Line(create_app(engine, store))


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.transport.FIRST_DELAY_SECONDS", 0.0)


def client_over(line: Line, store: ObjectStore, **spec: Any) -> EngineClient:
    return EngineClient(store.url, HttpEngineSpec(url=URL, **spec), transport=lambda: line)


# -- one effect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("losses", [1, 3])
async def test_a_lost_acknowledgement_repeats_no_effect(
    line: Line, engine: ScriptedEngine, store: ObjectStore, verb: str, losses: int
) -> None:
    line.lose_answers = losses
    assert await VERBS[verb](client_over(line, store)) == await VERBS[verb](ScriptedEngine(store))
    assert line.lost["POST", f"/v1/{verb}"] == losses
    assert engine.begun[verb] == engine.done[verb] == 1


@pytest.mark.parametrize("verb", VERBS)
async def test_answers_to_polls_may_be_lost_too(
    line: Line, engine: ScriptedEngine, store: ObjectStore, verb: str
) -> None:
    line.lose_answers = 1
    line.on_202 = engine.gate.set
    engine.gate.clear()
    client = client_over(line, store, timeout_seconds=0.1)  # a call is asked for after 0.05 s
    assert await VERBS[verb](client) == await VERBS[verb](ScriptedEngine(store))
    assert engine.begun[verb] == engine.done[verb] == 1
    ids = {r.headers["X-Request-Id"] for r in line.seen if r.url.path == f"/v1/{verb}"}
    assert len(ids) == 1


async def test_every_acknowledgement_of_a_real_engine_is_lost_once(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worklog = tmp_path / "worklog"
    monkeypatch.setenv("OSTINATO_WORKLOG", str(worklog))
    served = LocalEngine(store.url, DETERMINISTIC)
    line = Line(create_app(served, store), lose_answers=1)
    client = client_over(line, store)
    asked = GenerateRequest(POLICY, [[10, 11]], [1], SamplingParams(max_new_tokens=4))

    async def session(engine: Engine) -> list[Any]:
        start = await new_policy(engine, tiny_folder)
        drawn = await engine.generate(GenerateRequest(start, asked.prompts, asked.seeds, asked.sampling))
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        scored = await engine.logprobs(LogprobsRequest(record.policy, [TokenSequence([10, 11], [0.0, 1.0])]))
        checkpoint = await engine.save_checkpoint(record.policy, provenance=PROVENANCE)
        exported = await engine.export_model(record.policy, "trained", provenance=PROVENANCE)
        await engine.release("r")
        return [start, drawn, record, scored, checkpoint, exported]

    results = await session(client)
    expected = {"import_model", "create_policy", "generate", "logprobs", "take_gradient_step", "save_checkpoint"}
    assert {f"/v1/{verb}" for verb in expected | {"export_model", "release"}} <= {path for _, path in line.lost}
    assert [len(events(worklog, name)) for name in ("generate", "step", "checkpoint")] == [1, 1, 1]
    assert list(Chain(store, "r", "0-s", "policy").steps()) == [1]
    assert list(store.list("uploads/")) == []
    await served.close()
    plain = LocalEngine(store.url, DETERMINISTIC)
    assert await session(plain) == results
    await plain.close()


async def test_a_server_that_restarts_in_the_middle_gets_the_call_again(
    line: Line, engine: ScriptedEngine, store: ObjectStore
) -> None:
    engine.gate.clear()
    successor = ScriptedEngine(store)
    line.on_202 = lambda: setattr(line, "app", create_app(successor, store))
    client = client_over(line, store, timeout_seconds=0.1)
    assert await VERBS["generate"](client) == await VERBS["generate"](ScriptedEngine(store))
    assert (engine.done["generate"], successor.done["generate"]) == (0, 1)
    sent = [(r.method, r.url.path.rpartition("/")[0]) for r in line.seen[1:]]
    assert sent == [("POST", "/v1"), ("GET", "/v1/calls"), ("POST", "/v1")]


async def test_a_server_over_another_store_that_takes_the_address_is_refused(
    line: Line, store: ObjectStore, tmp_path: Path
) -> None:
    client = client_over(line, store)
    await client.release("r")
    other = open_store(f"file://{tmp_path}/other")
    stranger = ScriptedEngine(other)
    line.app = create_app(stranger, other)
    with pytest.raises(BadSpec, match="give both the same storage url"):
        await client.release("r")
    with pytest.raises(BadSpec, match=r"works on store .* this process on"):
        await client_over(line, store).release("r")
    assert not stranger.begun


async def test_a_process_that_does_not_see_the_engines_store_begins_none(
    line: Line, store: ObjectStore, tmp_path: Path
) -> None:
    away = open_store(f"file://{tmp_path}/not mounted here")
    with pytest.raises(BadSpec, match="this process finds no store at file://.*not mounted here; mount its disk here"):
        await client_over(line, away).release("r")
    assert not (tmp_path / "not mounted here").exists()


async def test_a_cancelled_call_is_taken_back(line: Line, engine: ScriptedEngine, store: ObjectStore) -> None:
    engine.gate.clear()
    calling = asyncio.create_task(VERBS["generate"](client_over(line, store)))
    while not engine.begun["generate"]:
        await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    service: EngineService = line.app.state.service
    assert not service.calls.calls
    engine.gate.set()
    await asyncio.sleep(0)
    assert engine.done["generate"] == 0


# -- trying again, and giving up -------------------------------------------------------------------------------


def busy() -> httpx.Response:
    body = error_body(EngineBusy("full"), "0" * 32)
    return httpx.Response(503, content=body.model_dump_json(), headers={"Retry-After": "1"})


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_proxy_or_a_server_without_room_is_asked_again(
    line: Line, engine: ScriptedEngine, store: ObjectStore, status: int
) -> None:
    line.refuse = [httpx.Response(status, html="<h1>not now</h1>"), busy(), httpx.Response(status)]
    await client_over(line, store).release("r")
    assert engine.done["release"] == 1
    assert len(line.seen) == 5  # the handshake, three refusals, the call


async def test_a_server_without_room_for_too_long_is_busy(line: Line, store: ObjectStore) -> None:
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


async def test_an_address_that_is_no_engine_is_said_at_once(line: Line, store: ObjectStore) -> None:
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
    backoff = Backoff(100, clock=lambda: now, draw=lambda: 1.0)
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


# -- errors ----------------------------------------------------------------------------------------------------


def every(module: object, base: type[Exception]) -> list[type[Exception]]:
    return [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, base)]


@pytest.mark.parametrize(
    "kind", every(engine_errors, engine_errors.EngineError) + every(storage_errors, storage_errors.StorageError)
)
async def test_every_error_comes_back_as_itself_and_only_transient_ones_are_5xx(
    line: Line, engine: ScriptedEngine, store: ObjectStore, kind: type[Exception]
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
    line: Line, engine: ScriptedEngine, store: ObjectStore, kind: type[Exception]
) -> None:
    client = client_over(line, store)
    engine.error = kind("gone")
    with pytest.raises(kind):
        await client.release("r")
    engine.error = None
    await client.release("r")


async def test_a_defect_of_the_server_is_transient_and_names_its_log(
    line: Line, engine: ScriptedEngine, store: ObjectStore
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
    line = Line(create_app(engine, store, ServerOptions(token=right)))
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
    line: Line, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN_OF_TEST", token)
    with pytest.raises(NotAuthenticated, match=r"\$ENGINE_TOKEN_OF_TEST.*one line") as refused:
        await client_over(line, store, token_env="ENGINE_TOKEN_OF_TEST").release("r")
    assert "SECRET" not in str(refused.value)


# -- models ----------------------------------------------------------------------------------------------------


async def test_a_folder_that_four_clients_bring_at_once_is_one_model(
    store: ObjectStore, tiny_folder: Path
) -> None:
    local = LocalEngine(store.url, DETERMINISTIC)
    line = Line(create_app(local, store, ServerOptions()))
    clients = [client_over(line, store) for _ in range(4)]
    refs = await asyncio.gather(*(c.import_model(str(tiny_folder), provenance=PROVENANCE) for c in clients))
    assert len({ref.uri for ref in refs}) == 1
    assert list(store.list("uploads/")) == []
    await local.close()


async def test_a_folder_of_the_client_becomes_the_model_that_the_embedded_engine_makes(
    line: Line, engine: ScriptedEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    found = await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE)
    elsewhere = LocalEngine(f"file://{tmp_path}/elsewhere", DETERMINISTIC)
    assert await elsewhere.import_model(str(tiny_folder), provenance=PROVENANCE) == found
    await elsewhere.close()
    assert engine.done["import_folder"] == 1
    assert await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE) == found
    assert engine.done["import_folder"] == 1
    assert list(store.list("uploads/")) == []
    assert (tiny_folder / "config.json").is_file()


async def test_an_upload_that_another_server_imported_first_is_the_model_it_became(
    line: Line, engine: ScriptedEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    class Overtaken(ScriptedEngine):
        async def import_folder(self, folder: Any, *, provenance: Any) -> Any:
            self.theirs = await super().import_folder(folder, provenance=provenance)
            for info in list(store.list("uploads/")):
                store.delete(info.key)
            raise ObjectNotFound("the upload went away while it was read")

    overtaken = Overtaken(store)
    line.app = create_app(overtaken, store)
    assert await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE) == overtaken.theirs


async def test_paths_and_pickled_folders_are_refused_here(
    line: Line, engine: ScriptedEngine, store: ObjectStore, tmp_path: Path
) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"\x80")
    client = client_over(line, store)
    for source in (str(pickled), str(tmp_path / "nowhere"), "./x", "../x"):
        with pytest.raises(BadModelFolder):
            await client.import_model(source, provenance=PROVENANCE)
    assert not line.seen
    assert not engine.begun


async def test_a_folder_beside_the_server_is_not_what_a_key_means(
    line: Line, store: ObjectStore, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"source": tiny_folder.name, "provenance": PROVENANCE.model_dump()}
    monkeypatch.chdir(tiny_folder.parent)
    async with httpx.AsyncClient(transport=line, base_url=URL) as caller:
        answer = await caller.post("/v1/import_model", json=body)
    assert (answer.status_code, answer.json()["error"]) == (422, "BadModelFolder")


def test_an_upload_key_takes_digests_only() -> None:
    for digest in ("../x", "a" * 63, "A" * 64):
        with pytest.raises(storage_errors.InvalidKey):
            keys.upload("m", digest)


# -- real sockets ----------------------------------------------------------------------------------------------


def test_one_client_serves_several_event_loops(tmp_path: Path) -> None:
    """`connect` gives one client to every task of a process, and tasks may run in loops of their own."""
    store = open_store(f"file://{tmp_path}/store")
    engine = ScriptedEngine(store)
    with running_server(engine) as spec:
        client = connect(store.url, spec)
        assert connect(store.url, spec) is client

        async def calls() -> None:
            await asyncio.gather(*(client.release("r") for _ in range(5)))

        for _ in range(3):
            asyncio.run(calls())
        asyncio.run(client.close())
    assert engine.done["release"] == 15


async def test_a_batch_beyond_the_servers_limit_is_refused_before_it_is_sent(
    engine: ScriptedEngine, store: ObjectStore
) -> None:
    line = Line(create_app(engine, store, ServerOptions(max_body_bytes=500)))
    with pytest.raises(BadSpec, match="--max-body-mib"):
        await VERBS["generate"](client_over(line, store))
    assert [request.url.path for request in line.seen] == ["/v1/server"]
