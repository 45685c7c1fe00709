"""The contract of the engine, over HTTP: clients of real servers on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.http.client import EngineClient
from engine.local.engine import LocalEngine
from engine.protocol import Engine
from tests.contracts.engine_fixtures import Connect
from tests.contracts.test_engine import EngineContract
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.servers.http_engine import running_server


class TestEngineClient(EngineContract):
    """Each `connect` is a client of a server of its own, so that two of them race as two engines do."""

    @pytest.fixture
    async def connect(self, store_url: str) -> AsyncIterator[Connect]:  # type: ignore[override]
        clients: list[EngineClient] = []
        servers = []

        async def connect() -> Engine:
            # fewer rows than PROMPTS: their order must survive being decoded in runs
            engine = LocalEngine(store_url, DETERMINISTIC.model_copy(update={"max_rows": 4}))
            server = running_server(engine)
            servers.append(server)
            clients.append(EngineClient(store_url, server.__enter__()))
            return clients[-1]

        yield connect
        for client in clients:
            await client.close()
        for server in servers:
            server.__exit__(None, None, None)


@pytest.mark.slow
class TestEngineClientInMemory(TestEngineClient):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}"
