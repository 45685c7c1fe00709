"""Handles over an embedded engine of one's own, for tests that hold them directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import connect as connecting
from engine.handles import Model, TrainingModel
from engine.workspace import Workspace
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE


@dataclass(frozen=True)
class Context:
    workspace: Workspace


def context(folder: Path, **changes: Any) -> Context:
    fields = {"store": f"file://{folder}/store", "run": "r", "seed": 0, "engine": DETERMINISTIC}
    return Context(Workspace(**{**fields, "provenance": PROVENANCE, **changes}))


@contextmanager
def own_engines() -> Iterator[None]:
    """`connect` keeps the engines of a process; a test begins and ends without any."""
    connecting.connect.cache_clear()
    yield
    connecting.connect.cache_clear()


async def language_model(ctx: Any, folder: Path, name: str = "policy", *, tokens: int = 6) -> TrainingModel:
    return await Model(str(folder)).to_builder(ctx, tokens_to_generate=tokens).spawn_train(name)


async def scoring_model(ctx: Any, folder: Path, name: str = "value") -> TrainingModel:
    return await Model(str(folder)).to_builder(ctx).into_scoring_model().spawn_train(name, init_seed=3)
