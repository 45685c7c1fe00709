"""Fixtures of the tests of the local engine: a store in a folder, an engine on it, and a chain of three steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from storage.chain.records import Chain
from storage.store.objects import ObjectStore, open_store
from tests.engine.local.rebuilding import three_steps
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


@pytest.fixture
async def chain(engine: LocalEngine, tiny_folder: Path, worklog: Path) -> Chain:
    """A chain of three steps. The work of these steps is not in the work log."""
    chain = await three_steps(engine, tiny_folder)
    worklog.unlink()
    return chain
