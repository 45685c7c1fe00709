"""Memory plans of several machines: which GPUs train and sample where, and what each machine holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import BadSpec
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import Machine, MemoryPlan, MemoryPool, Workload
from engine.memory_plan.remedies import Scenario, remedies
from engine.memory_plan.shape import preset
from engine.specs.engine import LocalEngineSpec

EIGHT = Machine.gpus("h100-80", 8, node_gib=1024)
TWO_OF_EIGHT = replace(EIGHT, count=2)
ON_CLUSTER: dict[str, Any] = {
    "device": "cuda", "cluster": {"address": "head:6379"},
    "trainer": {"kind": "deepspeed", "ranks": 12, "zero_stage": 3},
}  # fmt: skip


def work_of(model: str) -> Workload:
    shape = preset(model)
    assert shape is not None
    return Workload(shape, context=4096, frozen=0)


def planned(keys: dict[str, Any], machine: Machine) -> MemoryPlan:
    return plan_memory(LocalEngineSpec.model_validate(keys), work_of("8B"), machine)


def part(load: MemoryPool, key: str, phase: Any = "backward") -> float:
    return sum(p.bytes.get(phase, 0.0) for p in load.parts if p.key == key)


def vllm(**keys: Any) -> dict[str, Any]:
    return {"sampler": {"kind": "vllm", **keys}}


def uses(keys: dict[str, Any], machine: Machine = TWO_OF_EIGHT) -> list[str]:
    return [use.describe() for use in planned(keys, machine).machines]


def test_ranks_fill_one_machine_after_the_other_and_replicas_take_what_is_left() -> None:
    assert uses(ON_CLUSTER | vllm(replicas=1, tensor_parallel=4)) == [
        "8 ranks on GPU 0-7", "4 ranks on GPU 0-3, 1 sampler on GPU 4-7",
    ]  # fmt: skip
    # three GPUs are left on the first machine: a replica of four does not go there, one of two does
    five = ON_CLUSTER | {"trainer": {"kind": "deepspeed", "ranks": 5, "zero_stage": 3}}
    assert uses(five | vllm(replicas=1, tensor_parallel=4)) == ["5 ranks on GPU 0-4", "1 sampler on GPU 0-3"]
    assert uses(five | vllm(replicas=1, tensor_parallel=2)) == ["5 ranks on GPU 0-4, 1 sampler on GPU 5-6"]


def test_replicas_beside_share_the_gpus_of_the_ranks() -> None:
    keys = ON_CLUSTER | vllm(replicas=12, placement="colocated")
    assert uses(keys) == ["8 ranks on GPU 0-7, 8 samplers on GPU 0-7", "4 ranks on GPU 0-3, 4 samplers on GPU 0-3"]
    first = planned(keys, TWO_OF_EIGHT).pools[0]
    assert first.name == "machine 1, GPU 0-7 (h100-80): trains and samples"
    assert part(first, "kv", "sampling") > 0 == part(first, "kv", "backward")  # vLLM sleeps in gradient steps


def test_each_machine_holds_the_memory_of_what_runs_on_it() -> None:
    keys = ON_CLUSTER | {"trainer": ON_CLUSTER["trainer"] | {"offload_optimizer": "cpu"}}
    plan = planned(keys | vllm(replicas=1, tensor_parallel=4), TWO_OF_EIGHT)
    memories = {load.name: load for load in plan.pools if "memory" in load.name}
    assert list(memories) == ["memory of machine 1", "memory of machine 2"]
    # 12P of moments over 12 ranks, of which 8 and 4 are on the machines
    assert part(memories["memory of machine 1"], "moments") == 8 * 8_030_261_248
    assert part(memories["memory of machine 2"], "moments") == 4 * 8_030_261_248


def test_machines_that_are_used_alike_are_told_together() -> None:
    keys = ON_CLUSTER | {"trainer": {"kind": "deepspeed", "ranks": 16, "zero_stage": 3}}
    names = [load.name for load in planned(keys | vllm(replicas=16, placement="colocated"), TWO_OF_EIGHT).pools]
    assert names == ["each of machines 1-2, GPU 0-7 (h100-80): trains and samples", "memory of each of machines 1-2"]


def test_the_torch_trainer_keeps_the_first_gpu_from_the_replicas() -> None:
    assert uses({"device": "cuda"} | vllm(replicas=3)) == ["1 rank on GPU 0, 3 samplers on GPU 1-3"]
    only = Machine.gpus("h100-80", 1)
    assert uses({"device": "cuda"} | vllm(replicas=1, gpu_share=0.4), only) == ["1 rank on GPU 0, 1 sampler on GPU 0"]


def test_auto_is_one_rank_per_gpu_that_no_replica_takes() -> None:
    auto: dict[str, Any] = {"device": "cuda", "trainer": {"kind": "deepspeed", "zero_stage": 3}}
    assert uses(auto | vllm(replicas=2))[0] == "6 ranks on GPU 0-5, 2 samplers on GPU 6-7"
    assert [use.ranks for use in planned(auto | {"cluster": {"address": "auto"}}, TWO_OF_EIGHT).machines] == [8, 8]
    with pytest.raises(BadSpec, match="--machines"):
        planned(auto | {"cluster": {"address": "auto"}}, EIGHT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"trainer": {"kind": "deepspeed", "ranks": 17}}, "17 ranks do not fit, as the cluster has 2 machines of 8 GPUs"),
     (vllm(replicas=1, tensor_parallel=8), "12 ranks and 1 x 8 GPUs that sample do not fit")],
)  # fmt: skip
def test_more_gpus_than_the_cluster_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        planned(ON_CLUSTER | changes, TWO_OF_EIGHT)


def test_more_machines_are_named_as_ranks_on_a_cluster() -> None:
    # offloaded moments, masters and gradients of 70B are 20P = 1.3 TiB: too much for one machine of 1 TiB, not for two
    trainer = ON_CLUSTER["trainer"] | {"ranks": 8, "offload_optimizer": "cpu", "activation_checkpointing": "recompute"}
    keys = ON_CLUSTER | {"trainer": trainer} | vllm(replicas=1, tensor_parallel=8)
    ways = remedies(Scenario(LocalEngineSpec.model_validate(keys), work_of("70B"), EIGHT))
    assert any(way.startswith("trainer.ranks=16 on a Ray cluster") for way in ways), ways
