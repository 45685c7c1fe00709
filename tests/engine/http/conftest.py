"""Fixtures of the tests of the HTTP server and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from engine.http.app import create_app
from engine.http.service import ServerOptions
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.servers.app_clients import Serve
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import UnreliableLine


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
