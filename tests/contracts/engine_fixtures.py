"""Connections, requests and fixtures that all tests of the engine's contract share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from engine.protocol import Completion, Engine, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import new_policy, row

Connect = Callable[[], Awaitable[Engine]]

PROMPTS = [[10, 11, 12, 13], [20, 21], [10, 11, 12, 13], [30], [10, 11], [40, 41, 42, 43, 44, 45]]
SEEDS = [1, 2, 3, 4, 5, 6]
SHORT = SamplingParams(max_new_tokens=6)
SCORED = TokenSequence([10, 11, 12, 20, 21, 22], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
OTHER_ROWS = [row([10, 11], [60, 61])]


def close(left: list[float], right: list[float], *, tolerance: float = 1e-4) -> bool:
    return len(left) == len(right) and max(abs(a - b) for a, b in zip(left, right, strict=True)) <= tolerance


async def score(engine: Engine, policy: PolicyRef, sequence: TokenSequence = SCORED) -> list[float]:
    return (await engine.logprobs(LogprobsRequest(policy, [sequence])))[0]


async def draw(engine: Engine, policy: PolicyRef, sampling: SamplingParams = SHORT) -> list[Completion]:
    return await engine.generate(GenerateRequest(policy, PROMPTS, SEEDS, sampling))


def same_draws(left: Sequence[Completion], right: Sequence[Completion], *, exact: bool) -> bool:
    """The same tokens and ends; the same logprobs to the bit, or within rounding."""
    if exact:
        return list(left) == list(right)
    return len(left) == len(right) and all(
        (a.token_ids, a.stop_reason) == (b.token_ids, b.stop_reason) and close(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )


def plain_folder(store: ObjectStore, ref: ArtifactRef, folder: Path) -> Path:
    """A copy of a registered model as files in one folder, as a person would download it."""
    folder.mkdir()
    for name, path in materialise_files(store, ref.key, folder).items():
        if path.parent != folder:
            (folder / name).write_bytes(path.read_bytes())
    return folder


class EngineFixtures:
    """Subclasses give `connect`: each call is another engine (or another client) over the store at `store_url`."""

    exact = True
    """Whether equal requests give equal bits, whatever else the sampler's batch holds."""

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store"

    @pytest.fixture
    def store(self, store_url: str) -> ObjectStore:
        return open_store(store_url)

    @pytest.fixture
    def connect(self, store_url: str) -> Connect:
        raise NotImplementedError

    @pytest.fixture
    async def engine(self, connect: Connect) -> Engine:
        return await connect()

    @pytest.fixture
    async def start(self, engine: Engine, tiny_folder: Path) -> PolicyRef:
        return await new_policy(engine, tiny_folder)
