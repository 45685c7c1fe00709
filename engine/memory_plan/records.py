"""The records of a memory plan: machines, what is trained on them, and what lies in each memory. No torch.

A *load* is one memory: a GPU, or a machine's. It holds *parts*, each with bytes for four moments: "start" (loading the
model), "backward" (the start of the last micro-batch's backward pass), "step" (AdamW) and "sampling". What it needs
is its fullest moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.memory_plan.shape import ModelShape

GIB = 1 << 30
Phase = Literal["start", "backward", "step", "sampling"]
PHASES: tuple[Phase, ...] = ("start", "backward", "step", "sampling")

DEVICES_GIB = {"h100-80": 79.1, "h200-141": 139.7, "a100-80": 79.1, "a100-40": 39.4, "l40s-48": 44.4}
"""Memory as CUDA reports it, which is less than the name says."""
USABLE = {"cpu": 0.8, "cuda": 0.95}
"""Share of a memory that may be planned. CPU: the rest is gaps of the C library's heap (bench/memory_plan.py) and other
programs; GPU: gaps of torch's allocator, assumed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and on what."""

    shape: ModelShape
    context: int
    """Prompt and completion together, tokens."""
    lora_rank: int | None = None
    """None: all weights are trained."""
    frozen: int = 1
    """Reference and past policies in memory. Of a LoRA run the first is the base, which costs nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine; all machines of the cluster are alike."""

    device: Literal["cpu", "cuda"]
    name: str
    devices: int
    """GPUs per machine; 1 on the CPU, whose device is the machine's memory."""
    device_bytes: int
    node_bytes: int | None
    """The machine's memory. None: not known, so not checked."""
    native_bfloat16: bool = True
    count: int | None = None
    """Machines of the cluster at cluster.address. None: not known, so not checked."""

    @classmethod
    def cpu(cls, memory: int, *, native_bfloat16: bool = True) -> Machine:
        return cls("cpu", "cpu", 1, memory, memory, native_bfloat16)

    @classmethod
    def gpus(cls, name: str, count: int, *, gib: float | None = None, node_gib: float | None = None) -> Machine:
        """`name` is one of DEVICES_GIB unless `gib` is given."""
        size = DEVICES_GIB[name] if gib is None else gib
        return cls("cuda", name, count, int(size * GIB), None if node_gib is None else int(node_gib * GIB))


@dataclass(frozen=True, slots=True)
class Part:
    """One use of a memory: bytes by moment, and where the number comes from."""

    key: str
    name: str
    bytes: dict[Phase, float]
    why: str


@dataclass(frozen=True, slots=True)
class Load:
    """One memory, or several alike, and what lies in each."""

    name: str
    capacity: int | None
    parts: tuple[Part, ...]
    kind: Literal["cpu", "cuda"] = "cuda"

    def at(self, phase: Phase) -> float:
        return sum(part.bytes.get(phase, 0.0) for part in self.parts)

    @property
    def needed(self) -> float:
        """Bytes of the fullest moment."""
        return max(self.at(phase) for phase in PHASES)

    @property
    def usable(self) -> float | None:
        return None if self.capacity is None else USABLE[self.kind] * self.capacity

    @property
    def fits(self) -> bool:
        return self.usable is None or self.needed <= self.usable


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What runs on one machine."""

    trains: frozenset[int]
    """GPUs that train, by their number on the machine; none on the CPU."""
    samples: frozenset[int]
    """GPUs that sample."""
    ranks: int
    """Processes that train."""
    samplers: int
    """Copies of the sampler."""

    def describe(self) -> str:
        """Such as "8 ranks on GPU 0-7, 2 samplers on GPU 0-1"."""
        words = []
        for count, what, gpus in ((self.ranks, "rank", self.trains), (self.samplers, "sampler", self.samples)):
            if count:
                where = f" on GPU {spans(gpus)}" if gpus else ""
                words.append(f"{count} {what}{'s' * (count > 1)}{where}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    loads: tuple[Load, ...]
    machines: tuple[MachineUse, ...] = ()
    """What runs on each machine."""
    problems: tuple[str, ...] = ()
    """What cannot be, beyond a memory that is too small."""
    sequences: int | None = None
    """Sequences of the whole context that the KV caches of all samplers hold at once. None: it is made to measure."""

    @property
    def fits(self) -> bool:
        return not self.problems and all(load.fits for load in self.loads)

    def reasons(self) -> list[str]:
        """Why it does not fit."""
        full = [
            f"{load.name} needs {load.needed / GIB:.1f} GiB, of {(load.capacity or 0) / GIB:.1f} GiB "
            f"({USABLE[load.kind]:.0%} of it usable)"
            for load in self.loads
            if not load.fits
        ]
        return [*full, *self.problems]


def spans(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} as "0-2, 5"."""
    ordered, shown = sorted(numbers), []
    for _, length in Counter(number - index for index, number in enumerate(ordered)).items():
        first, ordered = ordered[0], ordered[length:]
        shown.append(str(first) if length == 1 else f"{first}-{first + length - 1}")
    return ", ".join(shown)
