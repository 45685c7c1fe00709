"""Fixtures of the tests of the HTTP server and its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from engine.http.app import create_app
from engine.http.service import ServerOptions
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.app_clients import Serve
from tests.fixtures.openai_calls import OpenAIRun, client_of
from tests.fixtures.openai_server import SamplerEngine, served
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.unreliable_line import UnreliableLine


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def engine(store: ObjectStore) -> ScriptedEngine:
    return ScriptedEngine(store)


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


# -- the engine client -----------------------------------------------------------------------------------------


@pytest.fixture
def line(engine: ScriptedEngine, store: ObjectStore) -> UnreliableLine:
    return UnreliableLine(create_app(engine, store))


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.transport.FIRST_DELAY_SECONDS", 0.0)


# -- OpenAI clients --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[OpenAIRun]:
    place = OpenAIRun(tmp_path_factory.mktemp("openai"), tiny_folder)
    yield place
    asyncio.run(place.local.close())


@pytest.fixture(scope="module", params=["local", "sampler"])
def url(request: pytest.FixtureRequest, place: OpenAIRun) -> Iterator[str]:
    """Every engine: the embedded one, and one that certainly streams."""
    engine = place.local if request.param == "local" else SamplerEngine(place.folder, place.local)
    with served(engine, place.store) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path, tiny_folder: Path) -> Iterator[OpenAIRun]:
    """For tests that move the run."""
    place = OpenAIRun(tmp_path, tiny_folder)
    yield place
    asyncio.run(place.local.close())
