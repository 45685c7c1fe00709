"""Measures how long a command takes to its first line, and to the first step of a tiny run.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python bench/startup.py [--runs 3]

The runs take turns in one new folder: the first one also starts the folder's Prefect server, which the others use. CPU
seconds are those of the command and of the processes that it waited for, up to its end, without those of the server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.backends.torch.tiny import build_tiny_model

CONFIG = """
model: {key: model}
data: {train: {kind: file, path: rows.jsonl}}
algorithm: {steps: 2, samples_per_batch: 4}
checkpoints: {frequency: null}
"""


def timed_run(folder: Path) -> tuple[float, float, float, float]:
    """Returns the seconds to the first line, to the first step and to the end, and the CPU seconds."""
    command = [Path(sys.executable).with_name("ostinato"), "run", "sft", "--config", "sft.yaml", "--new"]
    start = time.perf_counter()
    first_line = first_step = 0.0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            first_line = first_line or time.perf_counter() - start
            if line.startswith("step 1/"):
                first_step = time.perf_counter() - start
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first_step:
        sys.exit(f"the run ended with status {process.returncode}; its log is in {folder / 'ostinato-logs'}")
    return first_line, first_step, time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="number of runs")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_model(folder / "model", seed=0)
        rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(9) for b in range(9)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "sft.yaml").write_text(CONFIG)
        print("| run | first line, s | first step, s | end, s | CPU seconds |\n|---|---:|---:|---:|---:|")
        for number in range(1, runs + 1):
            figures = timed_run(folder)
            print(f"| {number} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |", flush=True)
        # the keeper of the folder's server ends when its state file is gone
        for file in (folder / ".ostinato" / "prefect").glob("server-*.json"):
            file.unlink()
        time.sleep(5)


if __name__ == "__main__":
    main()
