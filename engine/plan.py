"""The memory plan of an engine: what each device and each machine holds, before anything is started. No torch.

The formulas are those of `engine.plan_parts`; which devices train and which sample is decided here.

Not in the plan: copies of a shared prompt's keys in attention (one per completion of a group), and further runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from engine.errors import BadSpec
from engine.plan_records import GIB, Load, Machine, Part, Plan, Workload
from engine.plan_sampler import Sampling, sequences_of, torch_sampler, vllm_sampler
from engine.plan_trainer import Group, Held, trainer_parts
from engine.sampler_spec import VllmSpec
from engine.spec import LocalEngineSpec
from engine.trainer_spec import TorchTrainerSpec

BUDGET = {"cpu": 0.8, "cuda": 0.7}
"""Share of the memory that `memory_gib` = "auto" gives to weights, moments and gradients (engine.backends.machine)."""
BUDGETED = ("base", "weights", "moments", "gradients", "frozen", "sampler")
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def plan_memory(spec: LocalEngineSpec, work: Workload, machine: Machine) -> Plan:
    """The plan of one policy in training, with its sampler. Raises BadSpec for a device that the machine lacks."""
    group = group_of(spec, machine)
    training = trainer_parts(spec, work, machine, group)
    vllm = spec.sampler if isinstance(spec.sampler, VllmSpec) else None
    trains = set(range(group.ranks))
    samples = sampler_devices(spec, machine)
    colocated = bool(trains & samples) and (vllm is None or not vllm.urls)
    servers = 1 if vllm is None else max(1, vllm.servers, len(vllm.urls))
    sampling = (
        Sampling(Held((), ()))  # values are read, not sampled
        if work.shape.scalar
        else torch_sampler(spec, work, group)
        if vllm is None
        else vllm_sampler(vllm, spec, work, machine, group, colocated=colocated)
    )
    elsewhere = bool(vllm and vllm.urls)
    if machine.device == "cpu":
        shared = [*training.device, *training.node]
        parts = [*_times(shared, group.ranks), *_times([*sampling.held.device, *sampling.held.node], servers)]
        name = f"this machine's memory ({_what(group.ranks, servers)})"
        loads = [Load(name, machine.device_bytes, tuple(parts), "cpu")]
    else:
        loads = [
            *_devices(machine, training.device, sampling.held.device, trains, set() if elsewhere else samples, group),
            *([] if not elsewhere else [_server_device(machine, sampling, servers)]),
            *_nodes(machine, training.node, sampling.held.node, group, servers, elsewhere=elsewhere),
        ]
    sequences = None if sampling.kv_bytes is None else servers * sequences_of(work, sampling.kv_bytes, group.compute)
    problems = _problems(spec, work, machine, loads, sampling, group, colocated=colocated)
    shown = [replace(load, parts=tuple(p for p in load.parts if any(p.bytes.values()))) for load in loads]
    return Plan(tuple(shown), tuple(problems), sequences)


def group_of(spec: LocalEngineSpec, machine: Machine) -> Group:
    """Ranks, nodes and the size of a number."""
    if spec.compute_dtype != "auto":
        compute = _BYTES[spec.compute_dtype]
    else:
        compute = 2 if machine.native_bfloat16 and not spec.deterministic else 4
    if isinstance(spec.trainer, TorchTrainerSpec):
        return Group(1, 1, compute)
    ranks = machine.devices if spec.trainer.ranks == "auto" else spec.trainer.ranks
    if machine.device == "cuda" and ranks > machine.devices:
        raise BadSpec(f"trainer.ranks={ranks} was given, but a node has {machine.devices} GPUs; give at most as many")
    return Group(ranks, spec.trainer.nodes, compute)


def sampler_devices(spec: LocalEngineSpec, machine: Machine) -> set[int]:
    """GPUs of the first node that sample. Raises BadSpec for one that it lacks."""
    vllm = spec.sampler
    if not isinstance(vllm, VllmSpec):
        return {0}
    wanted = set(vllm.devices or range(vllm.tensor_parallel * max(1, vllm.servers)))
    if machine.device == "cuda" and not vllm.urls and max(wanted) >= machine.devices:
        raise BadSpec(
            f"the sampler takes GPU {max(wanted)}, but a node has {machine.devices}, from 0; lower sampler.servers or "
            "sampler.tensor_parallel, or name others in sampler.devices"
        )
    if machine.device == "cuda" and vllm.urls and vllm.tensor_parallel > machine.devices:
        raise BadSpec(f"sampler.tensor_parallel={vllm.tensor_parallel} exceeds the {machine.devices} GPUs of a node")
    return wanted


def _devices(
    machine: Machine, trainer: tuple[Part, ...], sampler: tuple[Part, ...], trains: set[int], samples: set[int],
    group: Group,
) -> list[Load]:  # fmt: skip
    """The GPUs, those alike together. Only the first node samples."""
    found = []
    for role, those, parts in (
        ("trains and samples", trains & samples, (*trainer, *sampler)),
        ("trains", trains - samples, trainer),
        ("samples", samples - trains, sampler),
    ):
        if those:
            found.append(Load(f"GPU {_spans(those)} ({machine.name}): {role}", machine.device_bytes, parts))
    if group.nodes > 1 and trains & samples:
        name = f"GPU {_spans(trains)} of each other node ({machine.name}): trains"
        found.append(Load(name, machine.device_bytes, trainer))
    return found


def _server_device(machine: Machine, sampling: Sampling, servers: int) -> Load:
    name = f"each GPU of the {servers} servers at sampler.urls ({machine.name}): samples"
    return Load(name, machine.device_bytes, sampling.held.device)


def _nodes(
    machine: Machine, trainer: tuple[Part, ...], sampler: tuple[Part, ...], group: Group, servers: int, *,
    elsewhere: bool,
) -> list[Load]:  # fmt: skip
    """The machines' own memory: the first node's is the fullest."""
    parts = [*_times(list(trainer), group.ranks), *([] if elsewhere else _times(list(sampler), servers))]
    loads = [Load("the first node's memory", machine.node_bytes, tuple(parts), "cpu")]
    if elsewhere:
        name = "memory of the servers' node, if all are on one"
        loads.append(Load(name, machine.node_bytes, tuple(_times(list(sampler), servers)), "cpu"))
    return loads


def _times(parts: list[Part], count: int) -> list[Part]:
    """The parts of `count` processes in one memory."""
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
    memories = group.world if machine.device == "cuda" else group.nodes
    budget = auto if spec.memory_gib == "auto" else spec.memory_gib * GIB / memories
    held = sum(max(part.bytes.values(), default=0.0) for part in load.parts if part.key in BUDGETED)
    if held <= budget:
        return []
    return [
        f"weights, gradients, moments and copies take {held / GIB:.1f} GiB, and memory_gib={spec.memory_gib} admits "
        f"{budget / GIB:.1f} GiB of them there"
    ]


def _what(ranks: int, servers: int) -> str:
    return f"{ranks} trainer {'process' if ranks == 1 else 'processes'}, {servers} sampler{'s' * (servers > 1)}"


def _spans(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as 0-2, 5."""
    ordered, spans = sorted(numbers), []
    for _, run in Counter(n - i for i, n in enumerate(ordered)).items():
        first, ordered = ordered[0], ordered[run:]
        spans.append(str(first) if run == 1 else f"{first}-{first + run - 1}")
    return ", ".join(spans)
