"""Compares the peak memory of our checkpoint reader and writer with that of safetensors' functions.

    python bench/memory_checkpoint.py [MEGABYTES]        (default 200)

Ours transfers one tensor at a time. Each line is measured in a new process, on a state of 25 float32 tensors. The bench
prints by how much the memory of the process grows, in units of the state's size: anonymous memory, which the kernel
cannot drop, and resident memory, which includes the pages of mapped files that the kernel may drop. Another process
samples the memory every half millisecond.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.weight_files.tensor_files import read_into, write_tensors

TENSORS = 25


def state(megabytes: int) -> dict[str, Tensor]:
    return {f"layer.{n}.weight": torch.ones(megabytes * (1 << 18) // TENSORS) for n in range(TENSORS)}


def read_with_load_file(path: Path, weights: dict[str, Tensor]) -> None:
    for name, tensor in load_file(path).items():
        weights[name].copy_(tensor)


CASES: dict[str, Callable[[Path, dict[str, Tensor]], object]] = {
    "write, ours": lambda path, weights: write_tensors(path, weights.items()),
    "write, save_file": lambda path, weights: save_file(weights, path),
    "read, ours": lambda path, weights: read_into(path, weights.__getitem__),
    "read, load_file": read_with_load_file,
}


def memory(pid: int | str) -> tuple[int, int]:
    """Returns the (anonymous, resident) bytes of a process now."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10, int(fields["VmRSS"].split()[0]) << 10


def watch(pid: str) -> None:
    """Samples the memory of `pid` until standard input ends, and prints the peaks of (anonymous, resident) bytes.

    It runs in a process of its own: a thread could not sample while a library holds the interpreter's lock.
    """
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set())).start()
    anonymous, resident = memory(pid)
    print("watching", flush=True)
    while not done.wait(0.0005):
        now = memory(pid)
        anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
    print(anonymous, resident)


def peak(run: Callable[[], object]) -> tuple[int, int]:
    """Returns by how many (anonymous, resident) bytes the memory grew at most while `run` ran."""
    before = memory("self")
    command = [sys.executable, __file__, "watch", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        run()
        highest = watcher.communicate()[0].split()
    return int(highest[0]) - before[0], int(highest[1]) - before[1]


def measure(case: str, megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, weights = Path(folder) / "file", state(megabytes)
        # libraries load modules on first use, which must not count
        for case_function in CASES.values():
            case_function(path, {"x": torch.zeros(1)})
        write_tensors(path, weights.items())
        anonymous, resident = peak(lambda: CASES[case](path, weights))
    size = megabytes << 20
    print(f"{case:18} +{anonymous / size:5.2f} anonymous   +{resident / size:5.2f} resident   (1.00 = {megabytes} MiB)")


def main() -> None:
    if sys.argv[1:2] == ["watch"]:
        return watch(sys.argv[2])
    # with a case, this is the process that measures it; otherwise start one process for each case
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    if len(sys.argv) > 2:
        return measure(sys.argv[2], megabytes)
    for case in CASES:
        subprocess.run([sys.executable, __file__, str(megabytes), case], check=True)


if __name__ == "__main__":
    main()
