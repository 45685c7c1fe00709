"""Computes which GPUs of which machine train and which sample, as Ray would place the processes. Without torch and Ray.

The ranks fill one machine after the other. Replicas on dedicated GPUs take the GPUs that are left. The process of
the engine itself runs on the first machine: the torch trainer takes the first GPU there. """

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import BadSpec
from engine.memory_plan.records import Machine, MachineUse
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import DeepSpeedSpec


@dataclass(frozen=True, slots=True)
class _GpuSlot:
    """A GPU: the index of its machine and its number there."""

    machine: int
    gpu: int


_ProcessGpus = tuple[_GpuSlot, ...]
"""The GPUs of one process."""


def count_ranks(spec: LocalEngineSpec, machine: Machine) -> int:
    """Returns the number of processes that train. Raises BadSpec where it depends on a cluster of unknown size."""
    if machine.device == "cpu":
        return spec.ranks(0)
    is_automatic = isinstance(spec.trainer, DeepSpeedSpec) and spec.trainer.ranks == "auto"
    machines = 1 if spec.cluster.address is None else machine.count
    if is_automatic and machines is None:
        raise BadSpec(
            "trainer.ranks='auto' takes every GPU of the cluster, and the plan does not know how many there are; say "
            "how many machines the cluster has (--machines), or set trainer.ranks"
        )
    return spec.ranks(machine.devices * (machines or 1))


def place_processes(spec: LocalEngineSpec, machine: Machine) -> tuple[MachineUse, ...]:
    """Returns the processes of each machine, in order. Raises BadSpec if there are not enough GPUs."""
    ranks, samplers = count_ranks(spec, machine), max(1, spec.replicas)
    if machine.device == "cpu":
        return (MachineUse(frozenset(), frozenset(), ranks, samplers),)

    # Ray places the ranks first, one GPU each.
    free = _FreeGpus(spec, machine, ranks)
    training = [free.take(1) for _ in range(ranks)]

    vllm = spec.sampler if isinstance(spec.sampler, VllmSpec) else None
    if vllm is None or not vllm.replicas:
        # The sampler runs in the engine's own process, on the first machine.
        gpus = 1 if vllm is None else vllm.tensor_parallel
        if gpus > machine.devices:
            raise _too_few_gpus(spec, machine, ranks)
        sampling = [tuple(_GpuSlot(0, gpu) for gpu in range(gpus))]
    elif vllm.placement == "colocated":
        # Replica i uses the GPU of rank i.
        sampling = training[: vllm.replicas]
    elif machine.devices == 1 and free.engine_trains_alone:
        # The engine's process and the replicas share the only GPU.
        sampling = training * vllm.replicas
    else:
        sampling = [free.take(vllm.tensor_parallel) for _ in range(vllm.replicas)]
    return _uses_by_machine(training, sampling)


@dataclass
class _FreeGpus:
    """Hands out the GPUs that no process has yet."""

    spec: LocalEngineSpec
    machine: Machine
    ranks: int

    def __post_init__(self) -> None:
        self._taken: dict[int, int] = {}
        """Number of GPUs taken on each machine, from the first on."""

    @property
    def engine_trains_alone(self) -> bool:
        """Whether only the engine's own process trains, on a GPU of this machine."""
        return not isinstance(self.spec.trainer, DeepSpeedSpec) and self.spec.cluster.address is None

    def take(self, count: int) -> _ProcessGpus:
        """Returns `count` GPUs of the first machine that has so many left. Raises BadSpec."""
        # vLLM's Ray executor may use GPUs of several machines for one replica.
        if count > self.machine.devices and self.spec.cluster.address is not None:
            gpus: list[_GpuSlot] = []
            for _ in range(count):
                gpus.extend(self.take(1))
            return tuple(gpus)

        # Otherwise all GPUs of a process are on one machine. Without a known count, the cluster has as many as needed.
        machines = 1 if self.spec.cluster.address is None else self.machine.count
        index = 0
        while count <= self.machine.devices and (machines is None or index < machines):
            first = self._taken.get(index, 0)
            if first + count <= self.machine.devices:
                self._taken[index] = first + count
                return tuple(_GpuSlot(index, gpu) for gpu in range(first, first + count))
            index += 1
        raise _too_few_gpus(self.spec, self.machine, self.ranks)


def _uses_by_machine(training: Sequence[_ProcessGpus], sampling: Sequence[_ProcessGpus]) -> tuple[MachineUse, ...]:
    machines = 1 + max(process[0].machine for process in [*training, *sampling])
    uses = []
    for index in range(machines):
        uses.append(
            MachineUse(
                training_gpus=_gpus_on(index, training),
                sampling_gpus=_gpus_on(index, sampling),
                ranks=_count_on(index, training),
                samplers=_count_on(index, sampling),
            )
        )
    return tuple(uses)


def _gpus_on(index: int, processes: Sequence[_ProcessGpus]) -> frozenset[int]:
    gpus: set[int] = set()
    for process in processes:
        gpus.update(slot.gpu for slot in process if slot.machine == index)
    return frozenset(gpus)


def _count_on(index: int, processes: Sequence[_ProcessGpus]) -> int:
    """Returns the number of processes whose first GPU is on the machine."""
    return sum(process[0].machine == index for process in processes)


def _too_few_gpus(spec: LocalEngineSpec, machine: Machine, ranks: int) -> BadSpec:
    processes = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if isinstance(spec.sampler, VllmSpec):
        processes += f" and {max(1, spec.replicas)} x {spec.sampler.tensor_parallel} GPUs that sample"
    if spec.cluster.address is None:
        available = f"this machine has {machine.devices} GPUs"
    else:
        available = f"the cluster has {machine.count or 'any number of'} machines of {machine.devices} GPUs"
    return BadSpec(
        f"{processes} do not fit, as {available}; lower trainer.ranks, sampler.replicas or sampler.tensor_parallel, or "
        "give cluster.address of a larger cluster"
    )
