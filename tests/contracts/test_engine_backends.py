"""The contract of the engine over every pair of trainer and sampler that lives outside this process, or in a library of
its own. The processes behind them are shared by the tests of a class: engines come and go over the same backends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest

from engine.backends import factory
from engine.backends.protocol import SamplerBackend, TrainerBackend
from engine.local import engine as local_engine
from engine.local.engine import LocalEngine
from engine.protocol import Engine
from engine.specs.engine import LocalEngineSpec
from tests.contracts.engine_fixtures import Connect
from tests.contracts.test_engine import EngineContract

FLOAT32 = {"compute_dtype": "float32", "device": "cpu", "threads": 1, "max_rows": 4}
DEEPSPEED = {"kind": "deepspeed", "ranks": 2, "zero_stage": 3}
VLLM = {"kind": "vllm", "kv_cache_gib": 0.25}


class SharedBackends(EngineContract):
    """Every engine of the class runs over one trainer backend and one sampler backend."""

    keys: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    def spec(self) -> LocalEngineSpec:
        return LocalEngineSpec.model_validate(FLOAT32 | self.keys)

    @pytest.fixture(scope="class")
    def backends(self, spec: LocalEngineSpec) -> Iterator[tuple[TrainerBackend, SamplerBackend]]:
        trainers = factory.create_trainer_backend(spec)
        samplers = factory.create_sampler_backend(spec, trainers)
        with pytest.MonkeyPatch.context() as patch:
            close_samplers, close_trainers = samplers.close, trainers.close
            for backend in (trainers, samplers):
                patch.setattr(backend, "close", lambda: None)
            yield trainers, samplers
        close_samplers()
        close_trainers()

    @pytest.fixture
    async def connect(  # type: ignore[override]
        self,
        store_url: str,
        spec: LocalEngineSpec,
        backends: tuple[TrainerBackend, SamplerBackend],
        monkeypatch: pytest.MonkeyPatch,
    ) -> AsyncIterator[Connect]:
        monkeypatch.setattr(local_engine, "create_trainer_backend", lambda spec: backends[0])
        monkeypatch.setattr(local_engine, "create_sampler_backend", lambda spec, trainers: backends[1])
        opened: list[LocalEngine] = []

        async def connect() -> Engine:
            opened.append(LocalEngine(store_url, spec))
            return opened[-1]

        yield connect
        for engine in opened:
            await engine.close(checkpoint=False)


@pytest.mark.vllm
class TestTorchTrainsVllmSamples(SharedBackends):
    keys: ClassVar[dict[str, Any]] = {"sampler": VLLM}
    exact = False


@pytest.mark.slow
class TestDeepSpeedTrainsTorchSamples(SharedBackends):
    keys: ClassVar[dict[str, Any]] = {"trainer": DEEPSPEED}


@pytest.mark.vllm
class TestDeepSpeedTrainsVllmSamples(SharedBackends):
    keys: ClassVar[dict[str, Any]] = {"trainer": DEEPSPEED, "sampler": VLLM}
    exact = False
