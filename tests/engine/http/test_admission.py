"""Tests of many calls at once: a client makes as many as the server admits, and waits for room as long as it takes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.http import transport
from engine.http.calls import CallLimits
from engine.http.client import EngineClient
from engine.http.errors import NotAdmitted, error_body
from engine.http.service import ServerOptions
from engine.protocol import Completion, GenerateRequest
from engine.specs.engine import HttpEngineSpec
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import POLICY, STEP, UnreliableLine, client_over

SHARDS = 320
ADMITTED = 8


class HeldEngine(ScriptedEngine):
    """Holds the calls of `generate` until `release` is set, from another thread too. It counts those that are held."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.release, self.full = threading.Event(), threading.Event()
        self.held, self.most = 0, 0

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        self.held += 1
        self.most = max(self.most, self.held)
        if self.held == ADMITTED:
            self.full.set()
        await asyncio.to_thread(self.release.wait)
        self.held -= 1
        return await super().generate(request, epoch=epoch)


@pytest.fixture
def held(tmp_path: Path) -> HeldEngine:
    return HeldEngine(open_store(f"file://{tmp_path}/store"))


@contextmanager
def impatient_server(held: HeldEngine) -> Iterator[HttpEngineSpec]:
    """A server that admits ADMITTED calls. Its clients have no patience with an outage, but wait for each answer, since
    the machine of the tests may be busy."""
    options = ServerOptions(limits=CallLimits(waiting_of_verb=ADMITTED))
    with running_server(held, options) as spec, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LAST_TRY_SECONDS", 60.0)
        try:
            yield spec.model_copy(update={"patience_seconds": 0.0, "timeout_seconds": 60.0})
        finally:
            held.release.set()


async def sample(client: EngineClient, number: int) -> int:
    (completion,) = await client.generate(GenerateRequest(POLICY, [[1]], [number]), epoch=number)
    return completion.token_ids[1]


async def test_the_shards_of_a_large_step_wait_for_their_turn(held: HeldEngine) -> None:
    with impatient_server(held) as spec:
        client = EngineClient(held.store.url, spec)
        sampling = [asyncio.create_task(sample(client, number)) for number in range(SHARDS)]
        await asyncio.to_thread(held.full.wait, 60)
        # a step of the same run does not wait behind the samples
        assert (await client.take_gradient_step(STEP)).request == STEP
        assert held.held == ADMITTED and not any(call.done() for call in sampling)
        held.release.set()
        assert await asyncio.gather(*sampling) == list(range(SHARDS))
        await client.close()
    assert held.most == ADMITTED
    assert held.done["generate"] == SHARDS


async def test_two_clients_of_one_run_share_the_places(held: HeldEngine) -> None:
    with impatient_server(held) as spec:
        clients = [EngineClient(held.store.url, spec) for _ in range(2)]
        sampling = [asyncio.create_task(sample(clients[number % 2], number)) for number in range(4 * ADMITTED)]
        await asyncio.to_thread(held.full.wait, 60)
        held.release.set()
        assert await asyncio.gather(*sampling) == list(range(4 * ADMITTED))
        for client in clients:
            await client.close()
    assert held.most == ADMITTED


@pytest.mark.usefixtures("no_backoff")
async def test_waiting_for_room_is_no_outage(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    full = httpx.Response(503, content=error_body(NotAdmitted("full"), "0" * 32).model_dump_json())
    line.refuse = [full] * 50
    await client_over(line, store, patience_seconds=0).release("r")
    assert engine.done == Counter(release=1)
    assert not caplog.messages
