"""Measures whether the cost of a step and the memory grow with the number of steps.

    python bench/cost_per_step.py [--steps 5000] [--algorithm grpo] [--out FILE.json] [--plot FILE.png]

It makes one run of the tiny model (1M parameters) with the training class, tasks, store and engine in this process.
There is no Prefect server: each task is called directly (bench/prefect_overhead.py measures the server). GRPO samples
four prompts with four completions of six tokens, and grades them. SFT trains on four rows. Per step it records the CPU
seconds of the process, and every tenth step its resident memory and the number of Python objects. A run at a different
speed of the machine shows in CPU-seconds too, so the same amount of plain Python work is timed beside every tenth step.

The cost at a step is the median over WINDOW steps that end there, without steps that write a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import bench.without_prefect  # noqa: F401 - first, before the tasks
from engine.backends.torch.tiny import build_tiny_model
from engine.handles import Model
from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from flows.display.terminal import TerminalProgress
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler
from storage.store.artifacts import Provenance
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import FileDataset
from tasks.reports.metrics import StepMetrics

WINDOW = 50
"""Number of steps over which a cost is the median."""
EVERY = 10
"""Number of steps between two samples of the memory."""
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)


class Recorder(TerminalProgress):
    """Notes CPU time and memory after each step, and prints every hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_seconds: list[float] = []
        self.samples: list[dict[str, float]] = []
        self._process = psutil.Process()
        self._last = time.process_time()

    def step(self, metrics: StepMetrics, *, seconds_left: float | None = None) -> None:
        self.cpu_seconds.append(time.process_time() - self._last)
        step = metrics.step + 1
        if step % EVERY == 0:
            memory = self._process.memory_info().rss / 2**20
            self.samples.append({"step": step, "rss_mib": memory, "plain_work": plain_work()})
        if step % 500 == 0:
            self.samples[-1]["objects"] = len(gc.get_objects())
            print(f"step {step}: {1000 * cost_at(self.cpu_seconds, step):.1f} CPU-ms, {memory:.0f} MiB", flush=True)
        self._last = time.process_time()


def plain_work() -> float:
    """CPU-seconds of a fixed amount of Python work: the speed of the machine at this time."""
    started = time.process_time()
    json.dumps(list(range(20_000)))
    return time.process_time() - started


def cost_at(values: list[float], step: int) -> float:
    """The median over the WINDOW steps that end with `step` (from 1)."""
    return statistics.median(values[max(0, step - WINDOW) : step])


def write_rows(path: Path) -> None:
    with path.open("w") as file:
        for n in range(64):
            row = {"prompt": f"{n} + {n} = ", "completion": str(2 * n), "metadata": {"answer": str(2 * n)}}
            file.write(json.dumps(row) + "\n")


async def train(folder: Path, algorithm: str, steps: int, recorder: Recorder) -> None:
    """Takes the steps."""
    write_rows(folder / "rows.jsonl")
    workspace = Workspace(
        store=str(folder / "store"), engine=LocalEngineSpec(threads=1), run="bench", provenance=PROVENANCE
    )
    tiny = Model(str(build_tiny_model(folder / "tiny", seed=0)))
    model = await tiny.to_builder(Context(workspace)).spawn_train("policy")
    options: dict[str, Any] = {
        "logger": recorder, "lr_scheduler": ConstantScheduler(1e-5),
        "checkpoints": CheckpointSchedule(CheckpointConfig(frequency=None, recovery_steps=500)),
    }  # fmt: skip
    if algorithm == "sft":
        from flows.sft import SFT

        data = load(workspace, folder, "completion")
        await SFT(data, model, max_steps=steps, samples_per_batch=4, **options).run()
        return
    from flows.grpo import GRPO
    from tasks.graders.spec import GraderSpec

    view = model.temperature(1.0).max_gen_len(6)
    loop = GRPO(
        load(workspace, folder, "prompt"), view, GraderSpec(path="tasks.graders.rules:LastNumber"),
        max_num_grpo_steps=steps, samples_per_batch=16, samples_per_mini_batch=16, completions_per_sample=4, **options,
    )  # fmt: skip
    await loop.run()


class Context:
    """What a model builder needs of a run."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace


def load(workspace: Workspace, folder: Path, use: Any) -> LoadedDataset:
    spec = FileDataset(path=str(folder / "rows.jsonl"))
    return load_dataset(workspace.open_store(), spec, use=use, provenance=PROVENANCE)


def figures_of(recorder: Recorder) -> list[dict[str, float]]:
    """Cost and memory at every WINDOW-th step."""
    figures = []
    for sample in recorder.samples:
        step = int(sample["step"])
        if step % WINDOW:
            continue
        near = [other["plain_work"] for other in recorder.samples if step - WINDOW < other["step"] <= step]
        figures.append(
            {
                "step": step,
                "cpu_ms": round(1000 * cost_at(recorder.cpu_seconds, step), 2),
                "rss_mib": round(sample["rss_mib"], 1),
                "plain_work_ms": round(1000 * statistics.median(near), 3),
            }
        )
    return figures


def plot(figures: list[dict[str, float]], path: Path) -> None:
    """Draws the cost and the memory over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in figures]
    for axis, name, label in zip(axes, ("cpu_ms", "rss_mib"), ("CPU-ms per step", "resident MiB"), strict=True):
        axis.plot(steps, [row[name] for row in figures])
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--algorithm", choices=("grpo", "sft"), default="grpo")
    parser.add_argument("--folder", help="where the run is written; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-", dir=options.folder) as folder:
        asyncio.run(train(Path(folder), options.algorithm, options.steps, recorder))
    figures = figures_of(recorder)
    for row in figures:
        print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
