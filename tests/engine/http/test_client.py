"""Tests of the client over an unreliable connection: every call takes effect once, even if it is sent several times."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    BadSpec,
)
from engine.http.app import create_app
from engine.http.service import EngineService, ServerOptions
from engine.local.engine import LocalEngine
from engine.protocol import Engine, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.workspace import connect
from storage.chain.records import Chain
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, new_policy, request_after
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import POLICY, VERBS, UnreliableLine, client_over
from tests.fixtures.worklog import events

pytestmark = pytest.mark.usefixtures("no_backoff")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("losses", [1, 3])
async def test_a_lost_acknowledgement_repeats_no_effect(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, verb: str, losses: int
) -> None:
    line.lose_answers = losses
    assert await VERBS[verb](client_over(line, store)) == await VERBS[verb](ScriptedEngine(store))
    assert line.lost["POST", f"/v1/{verb}"] == losses
    assert engine.begun[verb] == engine.done[verb] == 1


@pytest.mark.parametrize("verb", VERBS)
async def test_answers_to_polls_may_be_lost_too(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, verb: str
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
    line = UnreliableLine(create_app(served, store), lose_answers=1)
    client = client_over(line, store)
    template = GenerateRequest(POLICY, [[10, 11]], [1], SamplingParams(max_new_tokens=4))

    async def session(engine: Engine) -> list[Any]:
        start = await new_policy(engine, tiny_folder)
        drawn = await engine.generate(GenerateRequest(start, template.prompts, template.seeds, template.sampling))
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        scored = await engine.logprobs(LogprobsRequest(record.policy, [TokenSequence([10, 11], [0.0, 1.0])]))
        checkpoint = await engine.save_checkpoint(record.policy, provenance=PROVENANCE)
        exported = await engine.export_model(record.policy, "trained", provenance=PROVENANCE)
        await engine.release("r")
        return [start, drawn, record, scored, checkpoint, exported]

    # Every route has lost an answer, and no work was done twice.
    results = await session(client)
    expected = {"import_model", "create_policy", "generate", "logprobs", "take_gradient_step", "save_checkpoint"}
    assert {f"/v1/{verb}" for verb in expected | {"export_model", "release"}} <= {path for _, path in line.lost}
    assert [len(events(worklog, name)) for name in ("generate", "step", "checkpoint")] == [1, 1, 1]
    assert list(Chain(store, "r", "0-s", "policy").steps()) == [1]
    assert list(store.list("uploads/")) == []
    await served.close()
    # The same session without HTTP has the same results.
    plain = LocalEngine(store.url, DETERMINISTIC)
    assert await session(plain) == results
    await plain.close()


async def test_a_server_that_restarts_in_the_middle_gets_the_call_again(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore
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
    line: UnreliableLine, store: ObjectStore, tmp_path: Path
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
    line: UnreliableLine, store: ObjectStore, tmp_path: Path
) -> None:
    away = open_store(f"file://{tmp_path}/not mounted here")
    with pytest.raises(BadSpec, match="this process finds no store at file://.*not mounted here; mount its disk here"):
        await client_over(line, away).release("r")
    assert not (tmp_path / "not mounted here").exists()


async def test_a_cancelled_call_is_taken_back(line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore) -> None:
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


# -- real sockets -----------------------------------------------------------------------------------------------


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
    line = UnreliableLine(create_app(engine, store, ServerOptions(max_body_bytes=500)))
    with pytest.raises(BadSpec, match="--max-body-mib"):
        await VERBS["generate"](client_over(line, store))
    assert [request.url.path for request in line.seen] == ["/v1/server"]
