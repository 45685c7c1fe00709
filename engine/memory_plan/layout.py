"""Which GPUs of which machine train and sample, as Ray would place them. No torch, no Ray.

Ranks fill one machine after the other, then replicas that are placed apart take the GPUs that are left. The process of
the engine itself runs on the first machine: the torch trainer there takes its first GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import BadSpec
from engine.memory_plan.records import Machine, MachineUse
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import DeepSpeedSpec


def ranks_of(spec: LocalEngineSpec, machine: Machine) -> int:
    """Processes that train. Raises BadSpec where that depends on a cluster of unknown size."""
    if machine.device == "cpu":
        return spec.ranks(0)
    automatic = isinstance(spec.trainer, DeepSpeedSpec) and spec.trainer.ranks == "auto"
    count = 1 if spec.cluster.address is None else machine.count
    if automatic and count is None:
        raise BadSpec(
            "trainer.ranks='auto' takes every GPU of the cluster, and the plan does not know how many there are; say "
            "how many machines the cluster has (--machines), or set trainer.ranks"
        )
    return spec.ranks(machine.devices * (count or 1))


def lay_out(spec: LocalEngineSpec, machine: Machine) -> tuple[MachineUse, ...]:
    """What runs on each machine, in order. Raises BadSpec for more GPUs than the machines have."""
    ranks, samplers = ranks_of(spec, machine), max(1, spec.replicas)
    if machine.device == "cpu":
        return (MachineUse(frozenset(), frozenset(), ranks, samplers),)
    free = _Free(spec, machine, ranks)
    trains = [free.take(1) for _ in range(ranks)]
    vllm = spec.sampler if isinstance(spec.sampler, VllmSpec) else None
    if vllm is None or not vllm.replicas:
        wanted = 1 if vllm is None else vllm.tensor_parallel
        if wanted > machine.devices:
            raise _too_many(spec, machine, ranks)
        samples = [tuple((0, gpu) for gpu in range(wanted))]
    elif vllm.placement == "beside":
        samples = trains[: vllm.replicas]
    elif machine.devices == 1 and free.alone:
        samples = trains * vllm.replicas  # the engine's process and the replicas share the only GPU
    else:
        samples = [free.take(vllm.tensor_parallel) for _ in range(vllm.replicas)]
    return _by_machine(trains, samples)


_Gpus = tuple[tuple[int, int], ...]
"""(machine, GPU on it) of one process."""


@dataclass
class _Free:
    """The GPUs that no process has yet."""

    spec: LocalEngineSpec
    machine: Machine
    ranks: int

    def __post_init__(self) -> None:
        self._taken: dict[int, int] = {}

    @property
    def alone(self) -> bool:
        """Whether the engine's own process trains, on the GPU of this machine alone."""
        return not isinstance(self.spec.trainer, DeepSpeedSpec) and self.spec.cluster.address is None

    def take(self, count: int) -> _Gpus:
        """`count` GPUs of the first machine that has so many left. Raises BadSpec."""
        if count > self.machine.devices and self.spec.cluster.address is not None:
            return tuple(gpu for _ in range(count) for gpu in self.take(1))  # vLLM's Ray executor spans machines
        limit = 1 if self.spec.cluster.address is None else self.machine.count
        number = 0
        while count <= self.machine.devices and (limit is None or number < limit):
            first = self._taken.get(number, 0)
            if first + count <= self.machine.devices:
                self._taken[number] = first + count
                return tuple((number, gpu) for gpu in range(first, first + count))
            number += 1
        raise _too_many(self.spec, self.machine, self.ranks)


def _by_machine(trains: list[_Gpus], samples: list[_Gpus]) -> tuple[MachineUse, ...]:
    def gpus(processes: list[_Gpus], number: int) -> frozenset[int]:
        return frozenset(gpu for process in processes for machine, gpu in process if machine == number)

    def count(processes: list[_Gpus], number: int) -> int:
        return sum(process[0][0] == number for process in processes)

    machines = 1 + max(process[0][0] for process in [*trains, *samples])
    return tuple(
        MachineUse(gpus(trains, n), gpus(samples, n), count(trains, n), count(samples, n)) for n in range(machines)
    )


def _too_many(spec: LocalEngineSpec, machine: Machine, ranks: int) -> BadSpec:
    asked = f"{ranks} rank{'s' * (ranks > 1)}"
    if isinstance(spec.sampler, VllmSpec):
        asked += f" and {max(1, spec.replicas)} x {spec.sampler.tensor_parallel} GPUs that sample"
    if spec.cluster.address is None:
        there = f"this machine has {machine.devices} GPUs"
    else:
        there = f"the cluster has {machine.count or 'any number of'} machines of {machine.devices} GPUs"
    return BadSpec(
        f"{asked} do not fit, as {there}; lower trainer.ranks, sampler.replicas or sampler.tensor_parallel, or give "
        "cluster.address of a larger cluster"
    )
