"""`plan_memory`: computes what each device and each machine holds, before anything starts. Without torch.

The formulas are in `engine.memory_plan.shape`. Processes are placed on GPUs as Ray would place them: the ranks fill
one machine after the other, replicas on dedicated GPUs take those that are left, and the engine's own process runs on
the first machine, where the torch trainer takes the first GPU.

The plan leaves out two things: copies of the keys and values of a shared prompt in attention (one per completion of a
group), and further runs on the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.errors import BadSpec
from engine.memory_plan.processes import (
    SamplerMemory,
    TrainingSetup,
    count_sequences,
    torch_sampler,
    trainer_memory,
    vllm_sampler,
)
from engine.memory_plan.records import (
    GIB,
    Machine,
    MachineUse,
    MemoryPart,
    MemoryPlan,
    MemoryPool,
    ProcessMemory,
    Workload,
    format_ranges,
)
from engine.specs.adapters import LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec

BUDGET = {"cpu": 0.8, "cuda": 0.7}
"""Share of the memory that `memory_gib` = "auto" gives to weights, moments and gradients
(engine.backends.torch.backend)."""
BUDGETED = ("base", "weights", "moments", "gradients", "frozen", "sampler")
"""Keys of the parts that count against `memory_gib`."""
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def plan_memory(spec: LocalEngineSpec, work: Workload, machine: Machine) -> MemoryPlan:
    """Returns the plan for one policy in training and its sampler. Raises BadSpec if there are not enough GPUs, or if
    the engine has no base in 4 bits."""
    if work.load_in_4bit:
        spec.check_trainable(LoraSpec(load_in_4bit=True))
    # Decide what runs where.
    setup = setup_of(spec, machine)
    machines = place_processes(spec, machine)
    colocated = any(use.training_gpus & use.sampling_gpus for use in machines)

    # Compute what each process holds.
    trainer = trainer_memory(spec, work, machine, setup)
    sampler = _sampler_memory(spec, work, machine, setup, colocated=colocated)

    # Add up the processes that share a memory. On the CPU all of them share the machine's.
    if machine.device == "cpu":
        pools = [_cpu_memory(machine, trainer, sampler, machines[0])]
    else:
        pools = [
            *_device_memories(machine, trainer.device, sampler.process.device, machines),
            *_machine_memories(machine, trainer, sampler, machines),
        ]

    # Find other reasons why the plan cannot work, and how many sequences the samplers can hold.
    problems = _Problems(spec, work, machine, setup, sampler, colocated=colocated).find(pools[0])
    sequences = None
    if sampler.kv_bytes is not None:
        copies = sum(use.samplers for use in machines)
        sequences = copies * count_sequences(work, sampler.kv_bytes, setup.compute_bytes)
    return MemoryPlan(tuple(_without_empty_parts(pool) for pool in pools), machines, tuple(problems), sequences)


def budgeted_bytes(spec: LocalEngineSpec, work: Workload, machine: Machine, *, own_base: bool = True) -> int:
    """Returns the bytes that count against `memory_gib`: those of one policy in training, its frozen policies and its
    sampler, over all ranks. Without `own_base`, the base of its adapter belongs to another policy.

    The engine counts each kind at its largest, in whatever phase that is."""
    setup = setup_of(spec, machine)
    keys = [key for key in BUDGETED if own_base or key != "base"]

    def largest(parts: Sequence[MemoryPart]) -> float:
        return sum(max(part.bytes.values(), default=0.0) for part in parts if part.key in keys)

    trainer = trainer_memory(spec, work, machine, setup)
    on_host = trainer.host if machine.device == "cpu" else ()
    sampler = _sampler_memory(spec, work, machine, setup, colocated=False)
    return int(setup.ranks * largest([*trainer.device, *on_host]) + largest(sampler.process.device))


def _sampler_memory(
    spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup, *, colocated: bool
) -> SamplerMemory:
    if work.shape.scalar:
        return SamplerMemory(ProcessMemory((), ()))  # a scalar head gives values, and nothing is sampled
    if isinstance(spec.sampler, VllmSpec):
        return vllm_sampler(spec.sampler, spec, work, machine, setup, colocated=colocated)
    return torch_sampler(spec, work, machine, setup)


def setup_of(spec: LocalEngineSpec, machine: Machine) -> TrainingSetup:
    """Returns the number of ranks and the size of a number in the compute dtype."""
    if spec.compute_dtype != "auto":
        compute_bytes = _BYTES[spec.compute_dtype]
    elif machine.native_bfloat16 and not spec.deterministic:
        compute_bytes = _BYTES["bfloat16"]
    else:
        compute_bytes = _BYTES["float32"]
    return TrainingSetup(count_ranks(spec, machine), compute_bytes)


def _without_empty_parts(pool: MemoryPool) -> MemoryPool:
    return replace(pool, parts=tuple(part for part in pool.parts if any(part.bytes.values())))


# -- the memories ----------------------------------------------------------------------------------------------


def _cpu_memory(machine: Machine, trainer: ProcessMemory, sampler: SamplerMemory, use: MachineUse) -> MemoryPool:
    """Returns the memory that all processes share on the CPU."""
    parts = [
        *_multiply([*trainer.device, *trainer.host], use.ranks),
        *_multiply([*sampler.process.device, *sampler.process.host], use.samplers),
    ]
    if sampler.staged is not None:
        parts.append(sampler.staged)
    processes = "process" if use.ranks == 1 else "processes"
    samplers = "samplers" if use.samplers > 1 else "sampler"
    name = f"this machine's memory ({use.ranks} trainer {processes}, {use.samplers} {samplers})"
    return MemoryPool(name, machine.device_bytes, tuple(parts), "cpu")


def _device_memories(
    machine: Machine, trainer: tuple[MemoryPart, ...], sampler: tuple[MemoryPart, ...], machines: Sequence[MachineUse]
) -> list[MemoryPool]:
    """Returns the memories of the GPUs, one for each group of GPUs with the same use."""
    # Equal GPUs are listed once, since a large cluster would give a long list of equal lines.
    pools = []
    for use, machine_names in _group_equal_uses(machines):
        prefix = f"{machine_names}, " if machine_names else ""
        for role, gpus, parts in (
            ("trains and samples", use.training_gpus & use.sampling_gpus, (*trainer, *sampler)),
            ("trains", use.training_gpus - use.sampling_gpus, trainer),
            ("samples", use.sampling_gpus - use.training_gpus, sampler),
        ):
            if gpus:
                name = f"{prefix}GPU {format_ranges(gpus)} ({machine.name}): {role}"
                pools.append(MemoryPool(name, machine.device_bytes, parts))
    return pools


def _machine_memories(
    machine: Machine, trainer: ProcessMemory, sampler: SamplerMemory, machines: Sequence[MachineUse]
) -> list[MemoryPool]:
    """Returns the memories of the machines, one for each group of machines with the same use.

    A group that includes the first machine, where the engine runs, is counted with the weights on their way to
    samplers."""
    pools = []
    for use, machine_names in _group_equal_uses(machines):
        parts = [*_multiply(list(trainer.host), use.ranks), *_multiply(list(sampler.process.host), use.samplers)]
        if use == machines[0] and sampler.staged is not None:
            parts.append(sampler.staged)
        name = f"memory of {machine_names or 'the machine'}"
        pools.append(MemoryPool(name, machine.node_bytes, tuple(parts), "cpu"))
    return pools


def _group_equal_uses(machines: Sequence[MachineUse]) -> list[tuple[MachineUse, str]]:
    """Returns each different use of a machine, and the names of the machines used so; "" for the only machine."""
    if len(machines) == 1:
        return [(machines[0], "")]
    numbers_by_use: dict[MachineUse, list[int]] = {}
    for number, use in enumerate(machines, 1):
        numbers_by_use.setdefault(use, []).append(number)
    groups = []
    for use, numbers in numbers_by_use.items():
        if len(numbers) == 1:
            groups.append((use, f"machine {numbers[0]}"))
        else:
            groups.append((use, f"each of machines {format_ranges(numbers)}"))
    return groups


def _multiply(parts: list[MemoryPart], processes: int) -> list[MemoryPart]:
    """Returns the parts of `processes` equal processes in one memory."""
    if processes == 0:
        return []
    if processes == 1:
        return parts
    multiplied = []
    for part in parts:
        total = {phase: processes * size for phase, size in part.bytes.items()}
        multiplied.append(replace(part, name=f"{processes} x {part.name}", bytes=total))
    return multiplied


# -- problems --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problems:
    """Finds why a plan cannot work, besides a memory that is too small."""

    spec: LocalEngineSpec
    work: Workload
    machine: Machine
    setup: TrainingSetup
    sampler: SamplerMemory
    colocated: bool
    """Whether some GPU both trains and samples."""

    def find(self, first_pool: MemoryPool) -> list[str]:
        """Returns the problems. `first_pool` is the memory of the first device that trains."""
        checks = [self._context(), self._kv_cache(), self._vllm_share(first_pool), self._budget()]
        return [problem for problem in checks if problem]

    def _context(self) -> str:
        if self.work.context <= self.spec.max_tokens_per_forward:
            return ""
        return (
            f"a sequence of {self.work.context} tokens does not go into a forward of max_tokens_per_forward="
            f"{self.spec.max_tokens_per_forward}"
        )

    def _kv_cache(self) -> str:
        kv_bytes = self.sampler.kv_bytes
        if kv_bytes is None or count_sequences(self.work, kv_bytes, self.setup.compute_bytes) >= 1:
            return ""
        return f"the sampler's KV cache of {kv_bytes / GIB:.1f} GiB holds no context of {self.work.context} tokens"

    def _vllm_share(self, pool: MemoryPool) -> str:
        vllm = self.spec.sampler
        if not isinstance(vllm, VllmSpec) or not self.colocated or self.machine.device != "cuda":
            return ""
        # vLLM checks the free memory when it starts, while the trainer holds its weights.
        trainer_bytes = sum(part.bytes.get("sampling", 0.0) for part in pool.parts if part.key in BUDGETED)
        if vllm.sleep is False and trainer_bytes / self.machine.device_bytes + vllm.gpu_share > 1:
            return "vLLM refuses to start where less than gpu_share of the GPU is free"
        return ""

    def _budget(self) -> str:
        """What the engine admits, over all ranks."""
        if self.spec.memory_gib == "auto":
            memories = self.setup.ranks if self.machine.device == "cuda" else 1
            budget = memories * BUDGET[self.machine.device] * self.machine.device_bytes
        else:
            budget = self.spec.memory_gib * GIB
        needed = budgeted_bytes(self.spec, self.work, self.machine)
        if needed <= budget:
            return ""
        return (
            f"weights, gradients, moments and copies take {needed / GIB:.1f} GiB, and "
            f"memory_gib={self.spec.memory_gib} admits {budget / GIB:.1f} GiB of them"
        )


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
