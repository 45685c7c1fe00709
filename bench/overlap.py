"""Measures how much time a GRPO step saves when grading and the store overlap with the engine's work.

    python bench/overlap.py [--rounds 6] [--steps 8] [--grade-seconds 0.5] [--write-seconds 0.05] [--out FILE]

The engine is another process (`ostinato engine serve`). A grade takes `--grade-seconds` of waiting, and each write of
the run to the store takes `--write-seconds` more. A round takes each combination of max_staleness and number of shards
in turn, as a new run of the tiny model, so that a slow minute of the machine slows all of them. The result is the wall
time per step of each setting, and the paired ratios between settings, with 95 % bootstrap intervals over the rounds.
The engine counts as working while the run waits for samples, logprobs or a gradient step. The first and the
last step of a run are left out. There is no Prefect server; bench/prefect_overhead.py measures that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench.without_prefect  # noqa: F401 - first, before the tasks
from bench.cost_per_step import PROVENANCE, Context, load, write_rows
from bench.grpo_work import bootstrap_interval
from engine.backends.torch.tiny import build_tiny_model
from engine.handles import Model
from engine.http.client import EngineClient
from engine.specs.engine import HttpEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler
from storage.store.objects import ObjectStore
from tasks.graders.base import BaseGrader, Grade
from tasks.graders.spec import GraderSpec
from tasks.reports.metrics import StepMetrics

ENGINE_CALLS = ("generate", "logprobs_of_rows", "take_gradient_step")
WRITES = ("put", "put_file", "put_if_absent")
PROMPTS, COMPLETIONS = 4, 4

Setting = tuple[int, int]
"""(max_staleness, number of shards)"""
SETTINGS: tuple[Setting, ...] = ((0, 1), (1, 1), (0, 4), (1, 4))
COMPARISONS: tuple[tuple[Setting, Setting], ...] = (
    ((0, 1), (1, 1)),
    ((0, 4), (1, 4)),
    ((0, 1), (0, 4)),
    ((1, 1), (1, 4)),
)
"""Pairs of settings. The ratio is the first one's wall time divided by the second one's."""


class SlowGrader(BaseGrader):
    """Grades an answer by its length, after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__("slow")
        self.seconds = seconds

    async def grade(self, thread: StringThread) -> Grade:
        await asyncio.sleep(self.seconds)
        return Grade(grader_key=self.grader_key, value=float(len(thread.last_content()) % 7))


class EngineTimes:
    """The times in which at least one call of the engine was open."""

    def __init__(self) -> None:
        self.open_calls, self.seconds, self._since = 0, 0.0, 0.0

    def wrap(self, name: str) -> None:
        """Counts the calls of a method of the engine's client."""
        method = getattr(EngineClient, name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.open_calls:
                self._since = time.perf_counter()
            self.open_calls += 1
            try:
                return await method(*args, **kwargs)
            finally:
                self.open_calls -= 1
                if not self.open_calls:
                    self.seconds += time.perf_counter() - self._since

        setattr(EngineClient, name, counted)


class StepTimes(TerminalProgress):
    """Notes the time and the engine's seconds at the end of each step."""

    def __init__(self, engine: EngineTimes) -> None:
        super().__init__()
        self.engine = engine
        self.ends: list[tuple[float, float]] = []

    def step(self, metrics: StepMetrics, *, seconds_left: float | None = None) -> None:
        self.ends.append((time.perf_counter(), self.engine.seconds))


def slow_down_writes(seconds: float) -> None:
    """Makes each write to a store take `seconds` longer."""
    for name in WRITES:
        method = getattr(ObjectStore, name)

        def slow(*args: Any, method: Any = method, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return method(*args, **kwargs)

        setattr(ObjectStore, name, slow)


@contextmanager
def engine_server(store_url: str) -> Iterator[str]:
    """Starts an engine for the store, and returns its address."""
    command = [sys.executable, "-m", "flows.cli.main", "engine", "serve", "--port=0", f"--storage={store_url}"]
    server = subprocess.Popen(
        [*command, "--set=threads=1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait(60)


async def train(
    folder: Path, url: str, times: StepTimes, setting: Setting, *, number: int, steps: int, seconds: float
) -> None:
    """Makes one run. `seconds` is the time of a grade."""
    staleness, shards = setting
    workspace = Workspace(
        store=f"file://{folder}/store",
        engine=HttpEngineSpec(url=url),
        run=f"round-{number}-staleness-{staleness}-shards-{shards}",
        provenance=PROVENANCE,
    )
    model = await Model(str(folder / "tiny")).to_builder(Context(workspace)).spawn_train("policy")
    grader = GraderSpec(path="bench.overlap:SlowGrader", arguments={"seconds": seconds})
    loop = GRPO(
        load(workspace, folder, "prompt"), model.temperature(1.0).max_gen_len(32), grader, max_num_grpo_steps=steps,
        samples_per_batch=PROMPTS * COMPLETIONS, samples_per_mini_batch=PROMPTS * COMPLETIONS,
        completions_per_sample=COMPLETIONS, prompts_per_shard=PROMPTS // shards, max_staleness=staleness,
        importance_cap=2.0, logger=times, lr_scheduler=ConstantScheduler(1e-5),
        checkpoints=CheckpointSchedule(CheckpointConfig(frequency=None, recovery_steps=5)),
    )  # fmt: skip
    await loop.run()


async def measure(options: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    engine = EngineTimes()
    for name in ENGINE_CALLS:
        engine.wrap(name)
    seconds: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    shares: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    for number in range(options.rounds):
        for setting in SETTINGS:
            times = StepTimes(engine)
            await train(folder, url, times, setting, number=number, steps=options.steps, seconds=options.grade_seconds)
            # From the end of the first step to the end of the last but one: the last step has no rollouts of a
            # next step beside it, so with it, a step of max_staleness 1 would seem faster than it is.
            (first, busy_before), (last, busy) = times.ends[0], times.ends[-2]
            seconds[setting].append((last - first) / (options.steps - 2))
            shares[setting].append((busy - busy_before) / (last - first))
            print(number, setting, round(seconds[setting][-1], 3), flush=True)
    return summary(seconds, shares)


def summary(seconds: dict[Setting, list[float]], shares: dict[Setting, list[float]]) -> dict[str, Any]:
    """The JSON of the result. The values of a setting are in the order of the rounds."""
    settings = []
    for (staleness, shards), values in seconds.items():
        settings.append(
            {
                "max_staleness": staleness,
                "shards": shards,
                "seconds_per_step": mean_with_interval(values),
                "engine_share": mean_with_interval(shares[staleness, shards]),
                "rounds": [round(value, 3) for value in values],
            }
        )
    ratios = []
    for slow, fast in COMPARISONS:
        pairs = zip(seconds[slow], seconds[fast], strict=True)
        ratios.append({"of": slow, "to": fast, "ratio": mean_with_interval([a / b for a, b in pairs])})
    return {"load": os.getloadavg()[0], "settings": settings, "ratios_of_seconds": ratios}


def mean_with_interval(values: list[float]) -> list[float]:
    """The mean, and the ends of its 95 % interval."""
    return [round(number, 3) for number in (statistics.fmean(values), *bootstrap_interval(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--grade-seconds", type=float, default=0.5)
    parser.add_argument("--write-seconds", type=float, default=0.05)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as name:
        folder = Path(name)
        build_tiny_model(folder / "tiny", seed=0)
        write_rows(folder / "rows.jsonl")
        with engine_server(f"file://{folder}/store") as url:
            slow_down_writes(options.write_seconds)
            result = asyncio.run(measure(options, folder, url))
    for entry in (*result["settings"], *result["ratios_of_seconds"]):
        print(json.dumps(entry))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
