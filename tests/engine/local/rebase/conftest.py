"""A chain of three steps for the tests of rebases, without and with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from storage.chain.records import Chain
from tests.engine.local.rebase.rebasing import SINGLE, three_single_steps
from tests.fixtures.engines import PROVENANCE


@pytest.fixture
async def chain(url: str, tiny_folder: Path) -> Chain:
    """Three steps under SINGLE, and no checkpoint."""
    return await three_single_steps(url, tiny_folder)


@pytest.fixture
async def saved(chain: Chain, url: str) -> Chain:
    """The same chain with a checkpoint at its head."""
    engine = LocalEngine(url, SINGLE)
    await engine.save_checkpoint(chain.head(), provenance=PROVENANCE)
    await engine.close()
    return chain
