"""The backend of `trainer.kind = "torch"`: trainers in the engine's process, and the memory and speed of its device."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from engine.backends.torch.causal_lm import CausalLM, master_dtype_of
from engine.backends.torch.determinism import repeats_sums, use_deterministic_kernels
from engine.backends.torch.loading import load_model, load_with_head
from engine.backends.torch.lora import check_four_bit
from engine.backends.torch.shared_base import AdapterOff, AdapterTrainer, SharedBase
from engine.backends.torch.trainer import TorchTrainer
from engine.protocol import ActorCount
from engine.specs.adapters import Head, LoraSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Numerics

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

KERNELS = "1"
"""Revision of this package's own computations. Raise it with every change that may change the last bits of a step (the
packing, attention, loss or optimizer), so that a redo of an older step is not taken for a fault of the machine."""

CPU_SHARE = 0.8
GPU_SHARE = 0.7
"""Share of the memory that weights, moments and gradients may fill. The rest is for activations and other processes."""

_SIDE = {"cpu": 512, "cuda": 8192}


class TorchBackend:
    """Implements engine.backends.protocol.TrainerBackend."""

    transfers = None

    def __init__(self, spec: LocalEngineSpec) -> None:
        self.spec = spec
        self.threads = cpu_threads(fixed=spec.deterministic) if spec.threads == "auto" else spec.threads
        cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        if not cuda:
            # transformers imports an installed DeepSpeed when it saves, and DeepSpeed logs errors if it finds no GPU.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.compute_dtype = self._compute_dtype()
        self.master_dtype = master_dtype_of(self.compute_dtype)

    def _compute_dtype(self) -> torch.dtype:
        if self.spec.compute_dtype != "auto":
            return COMPUTE_DTYPES[self.spec.compute_dtype]
        lower = not self.spec.deterministic and has_native_bfloat16(self.device)
        return torch.bfloat16 if lower else torch.float32

    @property
    def actors(self) -> ActorCount:
        return ActorCount()

    @property
    def devices(self) -> int:
        return 1

    def numerics(self) -> Numerics:
        return Numerics(
            backend="torch",
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine(),
            compute_dtype=str(self.compute_dtype).removeprefix("torch."),
            threads=self.threads,
            max_tokens=self.spec.max_tokens_per_forward,
            versions={"torch": torch.__version__, "transformers": version("transformers"), "kernels": KERNELS},
            repeats=repeats_sums(self.device, self.compute_dtype),
        )

    def prepare_thread(self) -> None:
        """Sets the thread count, which is a setting of the calling thread. It is called once in each thread
        that computes."""
        torch.set_num_threads(self.threads)
        if self.device.type == "cuda" and (self.spec.deterministic or self.spec.deterministic_kernels):
            # If equal bytes are promised, an operation without such a kernel is an error: the gradient of attention in
            # float32 would still be summed in any order.
            use_deterministic_kernels(strict=self.spec.deterministic)
        disable_progress_bar()  # transformers' progress bars would be mixed into the engine's own output

    @staticmethod
    @contextlib.contextmanager
    def threads_of(numerics: Numerics) -> Iterator[None]:
        """Within this context, torch computes with the thread count of a committed step. "auto" may have chosen another
        one since."""
        before = torch.get_num_threads()
        torch.set_num_threads(numerics.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def memory_bytes(self) -> int:
        """Bytes that weights, moments and gradients may take."""
        if self.spec.memory_gib == "auto":
            return memory_bytes(self.device)
        return int(self.spec.memory_gib * (1 << 30))

    def operations_per_second(self) -> float:
        return operations_per_second(self.device, self.compute_dtype)

    def load(self, folder: Path, *, head: Head = "lm", init_seed: int = 0) -> TorchTrainer:
        """A model all of whose weights are trained."""
        model = load_with_head(
            folder,
            head=head,
            init_seed=init_seed,
            dtype=self.master_dtype,
            compute_dtype=self.compute_dtype,
            device=self.device,
        )
        return TorchTrainer(model)

    def try_load(self, folder: Path) -> None:
        """Raises BadModelFolder for a folder that `load` would refuse. It uses this machine's memory, not the device's.
        """
        self._load_on_cpu(folder)

    def load_base(self, folder: Path, *, key: str = "", load_in_4bit: bool = False) -> SharedBase:
        """A frozen model that adapters share. `key` is its registry key, which exported adapters name."""
        if load_in_4bit:
            check_four_bit(self.device, self.compute_dtype)
        # Load on the CPU, so that the device only gets the linear layers in compute precision or in 4 bits.
        return SharedBase(self._load_on_cpu(folder), device=self.device, key=key, load_in_4bit=load_in_4bit)

    def _load_on_cpu(self, folder: Path) -> CausalLM:
        return load_model(folder, dtype=self.master_dtype, compute_dtype=self.compute_dtype, device=torch.device("cpu"))

    @staticmethod
    def adapter(base: SharedBase, spec: LoraSpec, *, init_seed: int) -> AdapterTrainer:
        """A new adapter on `base`, which it does not change. Before its first update, it computes what the base
        computes."""
        return AdapterTrainer(base, spec, init_seed=init_seed)

    @staticmethod
    def adapter_off(base: SharedBase) -> AdapterOff:
        """The base itself, as a policy that is only read."""
        return AdapterOff(base)

    def close(self) -> None:
        """Does nothing: weights are freed with the trainers that hold them."""


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cpu_threads(*, fixed: bool = False) -> int:
    """All cores when the machine is idle, else one: under contention, two OpenMP threads are slower than one. With
    `fixed`, all cores whatever the load, because the bits of a sum may depend on the number of threads."""
    cores = available_cores()
    if fixed or os.getloadavg()[0] < 0.5 * cores:
        return cores
    return 1


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 without emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def memory_bytes(device: torch.device) -> int:
    """Bytes of the device that an engine may fill by default."""
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(CPU_SHARE * min(_physical_memory(), _cgroup_limit()))


@lru_cache(maxsize=4)
def operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of an (n, n) matrix product: 2n³ over the shortest of five runs, with the thread count of
    the calling thread."""
    side = _SIDE.get(device.type, 512)
    left = torch.ones(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, left)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limit() -> int:
    """The memory limit of this container in bytes, or 2**62 when there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                return int(file.read())
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 1 << 62
