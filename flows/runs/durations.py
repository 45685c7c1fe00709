"""Estimates how long the parts of a run take: its start, steps, evaluations, checkpoints and other writes.

Computation is counted in operations: 2P per token that is read or sampled, and 6P per token that is trained (forward
and backward; Kaplan et al., arXiv:2001.08361), at the speed that the engine measured. Writes are counted in objects and
bytes, at the speed that was measured on the run's store. The parts are added, although some of them overlap.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from uuid import uuid4

from storage.errors import StorageError
from storage.store.objects import ObjectStore

PROBE_PUTS = 3
"""Small objects that are written to measure the time of one write."""
PROBE_BYTES = 8 << 20
"""Size of the object that is written and read to measure the store's speed."""
TASK_SECONDS = 0.03
"""What Prefect adds to a task, measured on an idle machine."""
FIXED_START_SECONDS = 3.0
"""Start-up besides the weights: imports of the libraries and the first contact of tasks with the Prefect server."""


@dataclass(frozen=True)
class StoreSpeed:
    """The measured speed of a store."""

    put_seconds: float
    """Duration of a small write."""
    write_bytes_per_second: float
    """Includes the digests of what is written."""
    read_bytes_per_second: float

    def write_seconds(self, size: int, objects: int = 1) -> float:
        """Seconds to write `size` bytes in a number of objects."""
        return objects * self.put_seconds + size / self.write_bytes_per_second


FAST_STORE = StoreSpeed(put_seconds=0.0, write_bytes_per_second=float("inf"), read_bytes_per_second=float("inf"))
"""A store whose time does not count."""


@dataclass(frozen=True)
class Durations:
    """Expected seconds of each part of a run."""

    start: float = 0.0
    """Loading the weights."""
    steps: float = 0.0
    """Sampling and training."""
    evaluation: float = 0.0
    """Evaluations or validations before, during and after training."""
    checkpoints: float = 0.0
    """Checkpoints and the published model."""
    storage: float = 0.0
    """The other artifacts of the steps, and their tasks."""

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    def __add__(self, other: Durations) -> Durations:
        """The durations of two stages that run one after the other."""
        return Durations(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def parts(self) -> dict[str, float]:
        """The parts that take at least a second, by name."""
        seconds = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in seconds.items() if value >= 1}


def measure_store(store: ObjectStore) -> StoreSpeed:
    """Measures the speed of a store with a few objects, which are removed again. Raises StorageError."""
    prefix = f"doctor/{uuid4().hex}"
    try:
        small = [_seconds_of_put(store, f"{prefix}/{number}", os.urandom(1024)) for number in range(PROBE_PUTS)]
        put_seconds = statistics.median(small)
        key = f"{prefix}/large"
        data = os.urandom(PROBE_BYTES)
        write_seconds = _seconds_of_digests(data) + _seconds_of_put(store, key, data)
        started = time.perf_counter()
        store.get(key)
        read_seconds = time.perf_counter() - started
    finally:
        with suppress(StorageError):
            for info in store.list(f"{prefix}/"):
                store.delete(info.key)
    # the time of a small write is counted for each object
    transfer_seconds = max(write_seconds - put_seconds, write_seconds / 10)
    return StoreSpeed(put_seconds, PROBE_BYTES / transfer_seconds, PROBE_BYTES / read_seconds)


def _seconds_of_digests(data: bytes) -> float:
    """Seconds for the digests of a checkpoint: one of its tensors and one of its files."""
    started = time.perf_counter()
    for _ in range(2):
        hashlib.sha256(data).digest()
    return time.perf_counter() - started


def _seconds_of_put(store: ObjectStore, key: str, data: bytes) -> float:
    started = time.perf_counter()
    store.put(key, data)
    return time.perf_counter() - started
