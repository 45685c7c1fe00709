"""Fixtures of the tests of model handles: a context with an embedded engine, and a model in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.handles import TrainingModel
from tests.fixtures.spawning import Context, context, language_model, own_engines


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return context(tmp_path)


@pytest.fixture
async def model(ctx: Context, tiny_folder: Path) -> TrainingModel:
    return await language_model(ctx, tiny_folder)
