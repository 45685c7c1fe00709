"""Fixtures of the tests of the OpenAI-compatible routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fixtures.servers.openai_calls import OpenAIRun, client_of
from tests.fixtures.servers.openai_server import SamplerEngine, running_openai_server


@pytest.fixture(scope="module")
def openai_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[OpenAIRun]:
    run = OpenAIRun(tmp_path_factory.mktemp("openai"), tiny_folder)
    yield run
    asyncio.run(run.local.close())


@pytest.fixture(scope="module", params=["local", "sampler"])
def url(request: pytest.FixtureRequest, openai_run: OpenAIRun) -> Iterator[str]:
    """The address of a server over each engine: the embedded engine, and an engine that always streams."""
    engine = openai_run.local if request.param == "local" else SamplerEngine(openai_run.folder, openai_run.local)
    with running_openai_server(engine, openai_run.store) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


@pytest.fixture
def fresh_run(tmp_path: Path, tiny_folder: Path) -> Iterator[OpenAIRun]:
    """A run for one test, which may take steps."""
    run = OpenAIRun(tmp_path, tiny_folder)
    yield run
    asyncio.run(run.local.close())
