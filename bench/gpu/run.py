"""Checks and measures this checkout on a GPU, part by part, in one command of at most ten minutes.

    bash bench/gpu/run.sh [--cpu-smoke] [--minutes 9.2] [PART ...]

Each part is a process of its own with a time limit. A part that fails, hangs or breaks its CUDA context does not affect
the others. Rows are printed immediately. If $OUT is set, they are also appended to $OUT/gpu-bench.jsonl. A table of all
rows comes last. The exit status is 1 if a row is not as expected or a part failed, and 2 if nothing can run. This
module does not import torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.rows import Row, row_of, table

LIMITS = {
    "device": 60,
    "correct": 120,
    "packing": 120,
    "train-small": 120,
    "train-large": 120,
    "sampler": 90,
    "sync": 90,
    "determinism": 120,
    "redo": 60,
    "checkpoint": 60,
    "deepspeed": 180,
    "vllm": 240,
}
"""Time limit of each part in seconds. The most important parts come first, and those whose package may be missing last.
"""
SMOKE_LIMIT = 60
DRAIN_SECONDS = 5
"""Time to wait for the last lines of a part that has ended."""


def rows_of(part: str, *, smoke: bool) -> Iterator[Row]:
    """Runs one part in this process, and yields its rows."""
    from bench.gpu import checking, figures, others
    from bench.gpu.setting import Setting, setting_of

    parts: dict[str, Callable[[Setting], Iterator[Row]]] = {
        "device": figures.device,
        "correct": checking.correctness,
        "packing": checking.packing,
        "train-small": lambda setting: figures.training(setting, setting.small),
        "train-large": lambda setting: figures.training(setting, setting.large),
        "sampler": figures.sampling,
        "sync": figures.syncing,
        "determinism": checking.determinism,
        "checkpoint": figures.checkpoints,
        "redo": figures.redos,
        "deepspeed": others.deepspeed,
        "vllm": others.vllm,
    }
    yield from parts[part](setting_of(smoke=smoke))


def run_part(part: str, command: Sequence[str], limit: float, on_line: Callable[[str], None]) -> list[Row]:
    """Runs a part as a process, and calls `on_line` with every line that it prints. Returns its rows, and one more row
    if it failed or was stopped."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line.strip())
            on_line(line.rstrip("\n"))

    # read in a thread: a child process that left the session of the part may keep the pipe open
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        # end processes that the part started and left, such as a group of ranks
        _end_session(process)
    process.wait()
    reader.join(timeout=DRAIN_SECONDS)

    # its rows, and its last other line, which may be the error
    rows = []
    last_text = ""
    for line in list(lines):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line:
            last_text = line[:200]
    if status is None:
        rows.append(Row(part, "stopped", f"after {limit:g} s", "", last_text, False))
    elif status:
        rows.append(Row(part, "failed", f"status {status}", "", last_text, False))
    return rows


def _end_session(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # no process of the session is left


def cannot_run(*, smoke: bool) -> str | None:
    """Returns why no part can run here, or None. It asks a child process, because this one does not import torch."""
    text = "import torch, engine.backends.torch.backend; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    if done.returncode:
        return f"the engine does not import here: {done.stderr.strip().splitlines()[-1]}"
    if not smoke and done.stdout.strip().splitlines()[-1] != "True":
        return "torch sees no GPU here; for a try on the CPU: bash bench/gpu/run.sh --cpu-smoke"
    return None


def run_parts(parts: Sequence[str], *, smoke: bool, seconds: float, out: Path | None) -> list[Row]:
    """Runs the parts one after the other until the time is over. Returns all rows."""
    deadline = time.monotonic() + seconds
    all_rows: list[Row] = []
    for part in parts:
        left = deadline - time.monotonic()
        limit = min(SMOKE_LIMIT if smoke else LIMITS[part], left)
        if limit < 1:
            rows = [Row(part, "not run", "no time left", "", f"--minutes {seconds / 60:g}", False)]
        else:
            print(f"== {part} (at most {limit:.0f} s)", flush=True)
            command = [sys.executable, "-m", "bench.gpu.run", "--part", part]
            if smoke:
                command.append("--cpu-smoke")
            rows = run_part(part, command, limit, lambda line: print(f"   {line}", flush=True))
        all_rows += rows
        if out is not None:
            with out.open("a") as file:
                file.writelines(row.line() + "\n" for row in rows)
    return all_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(LIMITS)}")
    parser.add_argument("--cpu-smoke", action="store_true", help="every part on the CPU, with tiny sizes")
    parser.add_argument("--minutes", type=float, default=9.2, help="for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in LIMITS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    # the process of one part
    if options.part:
        for row in rows_of(options.part, smoke=options.cpu_smoke):
            print(row.line(), flush=True)
        return 0
    # the process that runs the parts
    problem = cannot_run(smoke=options.cpu_smoke)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    out = None
    if os.environ.get("OUT"):
        out = Path(os.environ["OUT"]) / "gpu-bench.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
    parts = options.parts or list(LIMITS)
    rows = run_parts(parts, smoke=options.cpu_smoke, seconds=60 * options.minutes, out=out)
    print(table(rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
