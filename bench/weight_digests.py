"""Seconds that the digest and the sketch of a model's weights take, by the number of ranks that share them.

    PYTHONPATH=. .venv/bin/python bench/weight_digests.py --parameters 1e9

Each rank is a process with its part of float32 weights, as after a step. The parts are those of one tensor per
transformer layer. sha256 of the whole model in one process is what a digest took before.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
from multiprocessing.synchronize import Barrier

import torch

from engine.backends.weight_files.digests import tensor_sums
from engine.backends.weight_files.sketches import tensor_sketch

TENSORS = 32


def rank(parameters: int, ranks: int, barrier: Barrier, seconds: multiprocessing.Queue[tuple[float, float]]) -> None:
    """Sends the seconds of (digest, sketch) of one rank's part, with one thread."""
    torch.set_num_threads(1)
    part = torch.randn(parameters // TENSORS // ranks)
    tensor_sums(part[:1000])
    tensor_sketch(part[:1000])
    times = []
    for work in (tensor_sums, tensor_sketch):
        barrier.wait()
        started = time.perf_counter()
        for _ in range(TENSORS):
            work(part)
        times.append(time.perf_counter() - started)
    seconds.put((times[0], times[1]))


def measure(parameters: int, ranks: int) -> tuple[float, float]:
    """Seconds of the slowest rank."""
    barrier = multiprocessing.Barrier(ranks)
    seconds: multiprocessing.Queue[tuple[float, float]] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=rank, args=(parameters, ranks, barrier, seconds)) for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    times = [seconds.get() for _ in processes]
    for process in processes:
        process.join()
    return max(digest for digest, _ in times), max(sketch for _, sketch in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parameters = int(parser.parse_args().parameters)
    part = torch.randn(parameters // TENSORS)
    started = time.perf_counter()
    for _ in range(TENSORS):
        hashlib.sha256(part.numpy().data).hexdigest()
    print(f"sha256, one thread: {time.perf_counter() - started:.2f} s")
    for ranks in (1, 2, 4):
        digest, sketch = measure(parameters, ranks)
        rate = 4 * parameters / digest / 1e9
        print(f"{ranks} ranks: digest {digest:.2f} s ({rate:.2f} GB/s), sketch {sketch:.2f} s")


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
