"""The memory plan of an engine: what each device and each machine holds, before anything is started. No torch.

The formulas are those of `engine.memory_plan.parts`; `engine.memory_plan.layout` says which devices train and sample.

Not in the plan: copies of a shared prompt's keys in attention (one per completion of a group), and further runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.memory_plan.layout import lay_out, ranks_of
from engine.memory_plan.records import GIB, Load, Machine, MachineUse, Part, Plan, Workload, spans
from engine.memory_plan.sampler import Sampling, sequences_of, torch_sampler, vllm_sampler
from engine.memory_plan.trainer import Group, Held, trainer_parts
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec

BUDGET = {"cpu": 0.8, "cuda": 0.7}
"""Share of the memory that `memory_gib` = "auto" gives to weights, moments and gradients (engine.backends.machine)."""
BUDGETED = ("base", "weights", "moments", "gradients", "frozen", "sampler")
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def plan_memory(spec: LocalEngineSpec, work: Workload, machine: Machine) -> Plan:
    """The plan of one policy in training, with its sampler. Raises BadSpec for GPUs that the machines lack."""
    group = group_of(spec, machine)
    machines = lay_out(spec, machine)
    training = trainer_parts(spec, work, machine, group)
    vllm = spec.sampler if isinstance(spec.sampler, VllmSpec) else None
    colocated = any(use.trains & use.samples for use in machines)
    if work.shape.scalar:
        sampling = Sampling(Held((), ()))  # values are read, not sampled
    elif vllm is None:
        sampling = torch_sampler(spec, work, group)
    else:
        sampling = vllm_sampler(vllm, spec, work, machine, group, colocated=colocated)
    if machine.device == "cpu":
        loads = [_cpu_memory(machine, training, sampling, machines[0])]
    else:
        loads = [
            *_devices(machine, training.device, sampling.held.device, machines),
            *_memories(machine, training, sampling, machines),
        ]
    samplers = sum(use.samplers for use in machines)
    sequences = None if sampling.kv_bytes is None else samplers * sequences_of(work, sampling.kv_bytes, group.compute)
    problems = _problems(spec, work, machine, loads, sampling, group, colocated=colocated)
    shown = [replace(load, parts=tuple(p for p in load.parts if any(p.bytes.values()))) for load in loads]
    return Plan(tuple(shown), machines, tuple(problems), sequences)


def group_of(spec: LocalEngineSpec, machine: Machine) -> Group:
    """Ranks and the size of a number."""
    if spec.compute_dtype != "auto":
        compute = _BYTES[spec.compute_dtype]
    else:
        compute = 2 if machine.native_bfloat16 and not spec.deterministic else 4
    return Group(ranks_of(spec, machine), compute)


def _cpu_memory(machine: Machine, training: Held, sampling: Sampling, use: MachineUse) -> Load:
    """One memory for all processes."""
    parts = [
        *_times([*training.device, *training.node], use.ranks),
        *_times([*sampling.held.device, *sampling.held.node], use.samplers),
        *([] if sampling.staged is None else [sampling.staged]),
    ]
    processes = "process" if use.ranks == 1 else "processes"
    what = f"{use.ranks} trainer {processes}, {use.samplers} sampler{'s' * (use.samplers > 1)}"
    return Load(f"this machine's memory ({what})", machine.device_bytes, tuple(parts), "cpu")


def _devices(
    machine: Machine, trainer: tuple[Part, ...], sampler: tuple[Part, ...], machines: Sequence[MachineUse]
) -> list[Load]:
    """The GPUs, those alike together."""
    loads = []
    for use, where in _alike(machines):
        prefix = f"{where}, " if where else ""
        for role, gpus, parts in (
            ("trains and samples", use.trains & use.samples, (*trainer, *sampler)),
            ("trains", use.trains - use.samples, trainer),
            ("samples", use.samples - use.trains, sampler),
        ):
            if gpus:
                loads.append(Load(f"{prefix}GPU {spans(gpus)} ({machine.name}): {role}", machine.device_bytes, parts))
    return loads


def _memories(
    machine: Machine, training: Held, sampling: Sampling, machines: Sequence[MachineUse]
) -> list[Load]:
    """The machines' own memory, those alike together: of the first machine if one of them is, the engine's."""
    loads = []
    for use, where in _alike(machines):
        parts = [*_times(list(training.node), use.ranks), *_times(list(sampling.held.node), use.samplers)]
        if use == machines[0] and sampling.staged is not None:
            parts.append(sampling.staged)
        name = f"memory of {where or 'the machine'}"
        loads.append(Load(name, machine.node_bytes, tuple(parts), "cpu"))
    return loads


def _alike(machines: Sequence[MachineUse]) -> list[tuple[MachineUse, str]]:
    """Each use of a machine, and the numbers of the machines used so; no words where there is only one machine."""
    if len(machines) == 1:
        return [(machines[0], "")]
    numbers: dict[MachineUse, list[int]] = {}
    for number, use in enumerate(machines, 1):
        numbers.setdefault(use, []).append(number)
    return [
        (use, f"machine {those[0]}" if len(those) == 1 else f"each of machines {spans(those)}")
        for use, those in numbers.items()
    ]


def _times(parts: list[Part], count: int) -> list[Part]:
    """The parts of `count` processes in one memory."""
    if count == 0:
        return []
    if count == 1:
        return parts
    return [
        replace(p, name=f"{count} x {p.name}", bytes={phase: count * size for phase, size in p.bytes.items()})
        for p in parts
    ]


def _problems(
    spec: LocalEngineSpec, work: Workload, machine: Machine, loads: list[Load], sampling: Sampling, group: Group, *,
    colocated: bool,
) -> list[str]:  # fmt: skip
    found = []
    if work.context > spec.max_tokens_per_forward:
        found.append(
            f"a sequence of {work.context} tokens does not go into a forward of max_tokens_per_forward="
            f"{spec.max_tokens_per_forward}"
        )
    if sampling.kv_bytes is not None and sequences_of(work, sampling.kv_bytes, group.compute) < 1:
        size = sampling.kv_bytes / GIB
        found.append(f"the sampler's KV cache of {size:.1f} GiB holds no context of {work.context} tokens")
    if isinstance(spec.sampler, VllmSpec) and colocated and machine.device == "cuda":
        held = max(sum(p.bytes.get("sampling", 0.0) for p in load.parts if p.key in BUDGETED) for load in loads[:1])
        if spec.sampler.sleep is False and held / machine.device_bytes + spec.sampler.gpu_share > 1:
            found.append("vLLM refuses to start where less than gpu_share of the GPU is free")
    return found + _budget(spec, machine, loads[0], group)


def _budget(spec: LocalEngineSpec, machine: Machine, load: Load, group: Group) -> list[str]:
    """What the engine itself admits in one memory: `memory_gib` is that of all ranks together."""
    auto = BUDGET[machine.device] * machine.device_bytes
    memories = group.ranks if machine.device == "cuda" else 1
    budget = auto if spec.memory_gib == "auto" else spec.memory_gib * GIB / memories
    held = sum(max(part.bytes.values(), default=0.0) for part in load.parts if part.key in BUDGETED)
    if held <= budget:
        return []
    return [
        f"weights, gradients, moments and copies take {held / GIB:.1f} GiB, and memory_gib={spec.memory_gib} admits "
        f"{budget / GIB:.1f} GiB of them there"
    ]
