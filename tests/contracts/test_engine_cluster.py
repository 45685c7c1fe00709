"""The contract of the engine on a Ray cluster of two machines, both played by this one: each pair of a trainer and a
sampler of which one at least runs there. Weights go from machine to machine by a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from engine.specs.engine import LocalEngineSpec
from tests.contracts.test_engine_backends import DEEPSPEED, FLOAT32, VLLM, SharedBackends
from tests.fixtures.ray_nodes import ray_nodes

POOL = {**VLLM, "replicas": 2}


class OnTwoMachines(SharedBackends):
    """A group of two actors does not fit on one machine of `cpus` CPUs."""

    cpus: ClassVar[int] = 1

    @pytest.fixture(scope="class")
    def spec(self) -> Iterator[LocalEngineSpec]:  # type: ignore[override]
        with ray_nodes(cpus=self.cpus) as cluster:
            keys = FLOAT32 | self.keys | {"cluster": {"address": cluster.address}}
            yield LocalEngineSpec.model_validate(keys)


@pytest.mark.slow
class TestDeepSpeedTrainsTorchSamples(OnTwoMachines):
    keys: ClassVar[dict[str, Any]] = {"trainer": DEEPSPEED}


@pytest.mark.slow
@pytest.mark.vllm
class TestDeepSpeedTrainsVllmReplicasSample(OnTwoMachines):
    """Ray packs the two ranks on one machine, so the replicas are on the other."""

    keys: ClassVar[dict[str, Any]] = {"trainer": DEEPSPEED, "sampler": POOL}
    cpus = 2
    exact = False


@pytest.mark.slow
@pytest.mark.vllm
class TestTorchTrainsVllmReplicasSample(OnTwoMachines):
    keys: ClassVar[dict[str, Any]] = {"sampler": POOL}
    exact = False
