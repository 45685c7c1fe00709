"""Measures the memory that an engine may use on this machine's device, and the speed of its matrix products."""

from __future__ import annotations

import os
import time
from functools import lru_cache

import torch

CPU_SHARE = 0.8
GPU_SHARE = 0.7
"""Share of the memory that weights, moments and gradients may fill. The rest is for activations and other processes."""

_SIDE = {"cpu": 512, "cuda": 8192}


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
