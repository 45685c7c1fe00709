"""The value types of a memory plan: machines, the workload, and the parts of each memory. Without torch.

A `MemoryPool` is the memory of one GPU or of one machine. It holds parts, and each part has a number of bytes for each
of four phases: "start" (loading the model), "backward" (the start of the last micro-batch's backward pass), "step"
(AdamW) and "sampling". A pool needs the bytes of its largest phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.memory_plan.shape import ModelShape

GIB = 1 << 30
Phase = Literal["start", "backward", "step", "sampling"]
PHASES: tuple[Phase, ...] = ("start", "backward", "step", "sampling")

DEVICES_GIB = {"h100-80": 79.1, "h200-141": 139.7, "a100-80": 79.1, "a100-40": 39.4, "l40s-48": 44.4}
"""Memory of each GPU as CUDA reports it, in GiB. It is less than the name says."""
USABLE = {"cpu": 0.8, "cuda": 0.95}
"""Share of a memory that a plan may use. On the CPU, other programs and gaps in the C library's heap take the rest
(bench/memory_plan.py). On a GPU, gaps of torch's allocator do (assumed)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The model that an engine trains, and how."""

    shape: ModelShape
    context: int
    """Tokens of prompt and completion together."""
    lora_rank: int | None = None
    """Rank of the LoRA adapter. None: all weights are trained."""
    load_in_4bit: bool = False
    """Whether the linear layers of the adapter's base are held in 4 bits."""
    frozen: int = 1
    """Number of reference and past policies in memory. In a LoRA run the first of them is the base, which needs no
    memory of its own."""
    staged: int = 1
    """Largest number of policies whose weights wait for the samplers at the same time. Adapters are not counted."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. All machines of a cluster are alike."""

    device: Literal["cpu", "cuda"]
    name: str
    devices: int
    """GPUs per machine; 1 on the CPU, whose device is the machine's memory."""
    device_bytes: int
    node_bytes: int | None
    """Memory of the machine. None: it is not known, and not checked."""
    native_bfloat16: bool = True
    count: int | None = None
    """Machines of the cluster at cluster.address. None: it is not known, and not checked."""

    @classmethod
    def cpu(cls, memory: int, *, native_bfloat16: bool = True) -> Machine:
        return cls("cpu", "cpu", 1, memory, memory, native_bfloat16)

    @classmethod
    def gpus(cls, name: str, count: int, *, gib: float | None = None, node_gib: float | None = None) -> Machine:
        """Returns a machine with `count` GPUs. `name` is a key of DEVICES_GIB unless `gib` is given."""
        device_gib = DEVICES_GIB[name] if gib is None else gib
        machine = cls("cuda", name, count, int(device_gib * GIB), None)
        if node_gib is None:
            return machine
        return replace(machine, node_bytes=int(node_gib * GIB))


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of a memory."""

    key: str
    """Kind of use. Several parts may have the same key."""
    name: str
    bytes: dict[Phase, float]
    """Bytes in each phase; 0 in a phase that is missing."""
    source: str
    """The formula or the assumption that the number comes from."""

    @classmethod
    def constant(cls, key: str, name: str, size: float, source: str, phases: tuple[Phase, ...] = PHASES) -> MemoryPart:
        """Returns a part of `size` bytes in each of `phases`."""
        return cls(key, name, dict.fromkeys(phases, size), source)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The parts of one rank, or of one sampler."""

    device: tuple[MemoryPart, ...]
    """Parts on its device."""
    host: tuple[MemoryPart, ...]
    """Parts in the machine's memory."""


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """The memory of one GPU or one machine, and its parts. It may stand for several that are used alike."""

    name: str
    capacity: int | None
    """Bytes. None: they are not known, and not checked."""
    parts: tuple[MemoryPart, ...]
    kind: Literal["cpu", "cuda"] = "cuda"

    def bytes_in(self, phase: Phase) -> float:
        return sum(part.bytes.get(phase, 0.0) for part in self.parts)

    @property
    def needed(self) -> float:
        """Bytes of the largest phase."""
        return max(self.bytes_in(phase) for phase in PHASES)

    @property
    def usable(self) -> float | None:
        """Bytes that the plan may use. None: not known."""
        if self.capacity is None:
            return None
        return USABLE[self.kind] * self.capacity

    @property
    def fits(self) -> bool:
        return self.usable is None or self.needed <= self.usable


@dataclass(frozen=True, slots=True)
class MachineUse:
    """The processes on one machine, and their GPUs."""

    training_gpus: frozenset[int]
    """GPUs that train, by their number on the machine; none on the CPU."""
    sampling_gpus: frozenset[int]
    """GPUs that sample."""
    ranks: int
    """Processes that train."""
    samplers: int
    """Copies of the sampler."""

    def describe(self) -> str:
        """Returns a text such as "8 ranks on GPU 0-7, 2 samplers on GPU 0-1"."""
        texts = [
            _describe_processes(self.ranks, "rank", self.training_gpus),
            _describe_processes(self.samplers, "sampler", self.sampling_gpus),
        ]
        return ", ".join(text for text in texts if text)


def _describe_processes(count: int, noun: str, gpus: Iterable[int]) -> str:
    if not count:
        return ""
    plural = "s" if count > 1 else ""
    where = f" on GPU {format_ranges(gpus)}" if gpus else ""
    return f"{count} {noun}{plural}{where}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that an engine needs, and why it does not fit if it does not."""

    pools: tuple[MemoryPool, ...]
    machines: tuple[MachineUse, ...] = ()
    """The processes on each machine."""
    problems: tuple[str, ...] = ()
    """Why the plan cannot work, besides a memory that is too small."""
    sequences: int | None = None
    """Number of sequences of the whole context that the KV caches of all samplers hold at once. None: the cache is as
    large as the sampler's batch needs."""

    @property
    def fits(self) -> bool:
        return not self.problems and all(pool.fits for pool in self.pools)

    def reasons(self) -> list[str]:
        """Returns the reasons why the plan does not fit."""
        reasons = []
        for pool in self.pools:
            if not pool.fits:
                capacity = (pool.capacity or 0) / GIB
                reasons.append(
                    f"{pool.name} needs {pool.needed / GIB:.1f} GiB, of {capacity:.1f} GiB "
                    f"({USABLE[pool.kind]:.0%} of it usable)"
                )
        return [*reasons, *self.problems]


def format_ranges(numbers: Iterable[int]) -> str:
    """Formats {0, 1, 2, 5} as "0-2, 5"."""
    # Each range is [first, last]. A number that follows the last one extends its range.
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for first, last in ranges:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(texts)
