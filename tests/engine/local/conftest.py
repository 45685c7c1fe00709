"""Fixtures of the tests of the local engine: a store in a folder, and an engine on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def store(url: str) -> ObjectStore:
    return open_store(url)


@pytest.fixture
async def engine(url: str) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(url, DETERMINISTIC)
    yield engine
    await engine.close()
