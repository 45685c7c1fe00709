"""The contract of `engine.protocol.Engine`. The tests of each implementation and transport inherit `EngineContract`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from engine.protocol import Engine
from engine.specs.engine import TorchSamplerSpec
from tests.contracts.engine_fixtures import Connect
from tests.contracts.engine_measuring import MeasuringContract
from tests.contracts.engine_reading import ReadingContract
from tests.contracts.engine_refusing import RefusingContract
from tests.contracts.engine_scalar import ScalarContract
from tests.contracts.engine_writing import WritingContract
from tests.fixtures.engines import DETERMINISTIC


class EngineContract(ReadingContract, MeasuringContract, WritingContract, ScalarContract, RefusingContract):
    """All of it."""


class TestLocalEngine(EngineContract):
    spec = DETERMINISTIC

    @pytest.fixture
    async def connect(self, store_url: str) -> AsyncIterator[Connect]:  # type: ignore[override]
        opened: list[LocalEngine] = []

        async def connect() -> Engine:
            # fewer rows than PROMPTS: their order must survive being decoded in runs
            opened.append(LocalEngine(store_url, self.spec.model_copy(update={"max_rows": 4})))
            return opened[-1]

        yield connect
        for engine in opened:
            await engine.close()


@pytest.mark.slow
class TestLocalEngineInMemory(TestLocalEngine):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}"


@pytest.mark.slow
class TestLocalEngineWithTwoLanes(TestLocalEngine):
    """Samples in a lane of its own, from a copy of the weights."""

    spec = DETERMINISTIC.model_copy(update={"sampler": TorchSamplerSpec(own_lane=True)})
