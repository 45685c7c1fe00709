"""Everything that a GPU can tell of this checkout, part by part, in one command of at most ten minutes.

    bash bench/gpu/run.sh [--cpu-smoke] [--minutes 9.2] [PART ...]

Each part is a process of its own with a time limit: one that fails, hangs or breaks its CUDA context costs the others
nothing. Rows are printed as they are found and, where $OUT is set, appended to $OUT/gpu-bench.jsonl; the table
comes last. Exit status 1 when a row is not what it should be or a part failed, 2 when nothing can run. No torch in this
module.
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
    "determinism": 60,
    "checkpoint": 60,
    "deepspeed": 180,
    "vllm": 240,
}
"""Seconds of each part, in their order: what decides most comes first, what may be missing last."""
SMOKE_LIMIT = 60
DRAIN_SECONDS = 5
"""What an ended part printed last is waited for this long."""


def rows_of(part: str, *, smoke: bool) -> Iterator[Row]:
    """Runs one part in this process."""
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
        "deepspeed": others.deepspeed,
        "vllm": others.vllm,
    }
    yield from parts[part](setting_of(smoke=smoke))


def run_part(part: str, command: Sequence[str], limit: float, hear: Callable[[str], None]) -> list[Row]:
    """The rows of a part that runs as `command`, and one more if it failed or was stopped. `hear` gets every line."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line.strip())
            hear(line.rstrip("\n"))

    # a thread: a process that the part left behind in a session of its own keeps the pipe open
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end_session(process)  # what the part started and left, a group of ranks say
    process.wait()
    reader.join(timeout=DRAIN_SECONDS)
    found = [row for line in list(lines) if (row := row_of(line)) is not None]
    last = next((line for line in reversed(list(lines)) if line and row_of(line) is None), "")[:200]
    if status is None:
        found.append(Row(part, "stopped", f"after {limit:g} s", "", last, False))
    elif status:
        found.append(Row(part, "failed", f"status {status}", "", last, False))
    return found


def _end_session(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, and left nothing
        return


def cannot_run(*, smoke: bool) -> str | None:
    """Why no part can run here, or None. In a process of its own: this one stays without torch and CUDA."""
    text = "import torch, engine.backends.torch.backend; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    if done.returncode:
        return f"the engine does not import here: {done.stderr.strip().splitlines()[-1]}"
    if not smoke and done.stdout.strip().splitlines()[-1] != "True":
        return "torch sees no GPU here; for a try on the CPU: bash bench/gpu/run.sh --cpu-smoke"
    return None


def run_parts(parts: Sequence[str], *, smoke: bool, seconds: float, out: Path | None) -> list[Row]:
    """All parts in turn while there is time."""
    deadline = time.monotonic() + seconds
    found: list[Row] = []
    for part in parts:
        left = deadline - time.monotonic()
        limit = min(SMOKE_LIMIT if smoke else LIMITS[part], left)
        if limit < 1:
            rows = [Row(part, "not run", "no time left", "", f"--minutes {seconds / 60:g}", False)]
        else:
            print(f"== {part} (at most {limit:.0f} s)", flush=True)
            command = [sys.executable, "-m", "bench.gpu.run", "--part", part, *(["--cpu-smoke"] if smoke else [])]
            rows = run_part(part, command, limit, lambda line: print(f"   {line}", flush=True))
        found += rows
        if out is not None:
            with out.open("a") as file:
                file.writelines(row.line() + "\n" for row in rows)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(LIMITS)}")
    parser.add_argument("--cpu-smoke", action="store_true", help="every part on the CPU, with tiny sizes")
    parser.add_argument("--minutes", type=float, default=9.2, help="for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in LIMITS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    if given.part:
        for row in rows_of(given.part, smoke=given.cpu_smoke):
            print(row.line(), flush=True)
        return 0
    why = cannot_run(smoke=given.cpu_smoke)
    if why:
        print(why, file=sys.stderr)
        return 2
    out = Path(os.environ["OUT"]) / "gpu-bench.jsonl" if os.environ.get("OUT") else None
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    rows = run_parts(given.parts or list(LIMITS), smoke=given.cpu_smoke, seconds=60 * given.minutes, out=out)
    print(table(rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
