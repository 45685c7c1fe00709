"""Measures what a model learns with asynchronous rollouts: GRPO on sums, with rules.max_staleness of 0, 2, 4 and 8.

    python bench/async_learning.py [--steps 60] [--seeds 3] [--lr 1e-4] [--settings NAME ...] [--out FILE] [--plot FILE]

A Llama of 0.1M parameters first learns sums of three digits by SFT. Half of its training answers are "?", so that it
answers about a third of the held-out sums correctly. Each run of GRPO starts from this model. The settings take turns,
one run of each per seed, with the same rate and number of steps, and for equal seeds the same prompts. A held-out
reward is the share of right answers to 256 sums that no training prompt has, sampled at temperature 1. Its interval is
Student's t over the seeds, and that of a difference to the first setting is of the differences of equal seeds (95 %).

Engine, store, SFT and GRPO are the product's, in this process and without Prefect; the torch sampler has its own lane.
In "8 uncorrected" the bench replaces `Regularisation.corrected`, so that stale tokens have no importance weights. The
seconds of a step are the median over the steps that do not follow an evaluation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import bench.without_prefect  # noqa: F401 - first, before the tasks
from bench.cost_per_step import Context
from engine.backends.torch.tiny import build_tiny_model
from engine.handles import Model
from engine.models.training_model import TrainingModel
from engine.specs.engine import LocalEngineSpec, TorchSamplerSpec
from engine.workspace import Workspace
from flows.callbacks import Cadence, GraderEvaluation
from flows.configs.common import CheckpointConfig
from flows.configs.reinforcement import BatchRules, Regularisation
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.sft import SFT
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler, CosineScheduler
from storage.store.artifacts import Provenance
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import FileDataset
from tasks.evaluation.statistics import t_quantile
from tasks.evaluation.validation_curve import read_validations
from tasks.graders.spec import GraderSpec
from tasks.reports.metrics import StepMetrics
from tasks.reports.plots import series_style

HELDOUT_SUMS = 256
SAMPLES = 128
"""Completions per step, 8 per prompt. A step is one update."""
ENGINE = LocalEngineSpec(threads=1, compute_dtype="float32", max_rows=256, sampler=TorchSamplerSpec(own_lane=True))
GRADER = GraderSpec(path="tasks.graders.rules:LastNumber")
NO_CHECKPOINTS = CheckpointConfig(frequency=None)
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['content'] + '=' }}{% endif %}{% endfor %}"
)
"""A chat template that adds two tokens to a prompt: a sum is 7 tokens long, and its answer 2 or 3."""

UNCORRECTED = "8 uncorrected"
SETTINGS = {
    "0": BatchRules(),
    "2": BatchRules(max_staleness=2),
    "4 in flight": BatchRules(max_staleness=4, weight_updates="in_flight"),
    "8": BatchRules(max_staleness=8),
    UNCORRECTED: BatchRules(max_staleness=8),
}


class Recorder(TerminalProgress):
    """Notes the metrics of the steps, and the wall and CPU time at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[StepMetrics] = []
        self.ends: list[tuple[float, float]] = []

    def step(self, metrics: StepMetrics, *, seconds_left: float | None = None) -> None:
        self.metrics.append(metrics)
        self.ends.append((time.perf_counter(), time.process_time()))

    def note(self, text: str) -> None:
        """Prints nothing: the bench prints a line per run."""

    def seconds_of_step(self, every: int) -> list[float]:
        """The medians of the wall and CPU seconds of a step, without steps that follow an evaluation."""
        durations = []
        for step in range(1, len(self.ends)):
            if step % every:
                before, after = self.ends[step - 1 : step + 1]
                durations.append([end - start for start, end in zip(before, after, strict=True)])
        return [round(statistics.median(column), 3) for column in zip(*durations, strict=True)]


def write_sums(folder: Path) -> None:
    """Writes the rows of heldout.jsonl, of train.jsonl, which has the other sums, and of answers.jsonl for SFT, which
    has each of these with its answer and with "?"."""
    sums = list(itertools.product(range(10), repeat=3))
    Random(0).shuffle(sums)
    rows: dict[str, list[dict[str, Any]]] = {"heldout": [], "train": [], "answers": []}
    for number, digits in enumerate(sums):
        answer = str(sum(digits))
        row = {"prompt": "+".join(map(str, digits)), "metadata": {"answer": answer}}
        rows["heldout" if number < HELDOUT_SUMS else "train"].append(row)
        if number >= HELDOUT_SUMS:
            rows["answers"] += [row | {"completion": answer}, row | {"completion": "?"}]
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


async def spawn(folder: Path, key: str, run: str, seed: int) -> TrainingModel:
    """The model with this key, to be trained in a run of its own."""
    provenance = Provenance(code_version="bench", config_digest="0" * 64, seed=seed)
    workspace = Workspace(store=str(folder / "store"), engine=ENGINE, run=run, seed=seed, provenance=provenance)
    model = await Model(key).to_builder(Context(workspace)).spawn_train("policy")
    return model.temperature(1.0).max_gen_len(3)


def load(model: TrainingModel, folder: Path, name: str, use: Any) -> LoadedDataset:
    spec = FileDataset(path=str(folder / f"{name}.jsonl"))
    return load_dataset(model.workspace.open_store(), spec, use=use, provenance=model.workspace.provenance)


async def teach_sums(folder: Path) -> str:
    """Trains a new model on sums with SFT. Returns its key."""
    tiny = build_tiny_model(folder / "tiny", seed=0, hidden=64, layers=2)
    (tiny / "chat_template.jinja").write_text(TEMPLATE)
    model = await spawn(folder, str(tiny), "sft", 0)
    loop = SFT(
        load(model, folder, "answers", "completion"), model, max_steps=220, samples_per_batch=128,
        lr_scheduler=CosineScheduler(5e-3), logger=Recorder(), checkpoints=CheckpointSchedule(NO_CHECKPOINTS),
    )  # fmt: skip
    await loop.run()
    return await model.save("sums")


async def train(folder: Path, key: str, setting: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Makes one run of GRPO, and returns its curve, lag and seconds per step."""
    model = await spawn(folder, key, f"{setting.replace(' ', '-')}-{seed}", seed)
    recorder = Recorder()
    sums, heldout = (load(model, folder, name, "prompt") for name in ("train", "heldout"))
    evaluation = GraderEvaluation(heldout, GRADER, Cadence(every_steps=options.every), sampling=model.sampling)
    correction: AbstractContextManager[Any] = nullcontext()
    if setting == UNCORRECTED:
        correction = patch.object(Regularisation, "corrected", lambda self, *_: self)
    with correction:
        loop = GRPO(
            sums, model, GRADER, max_num_grpo_steps=options.steps, rules=SETTINGS[setting], data_seed=seed, kl_beta=0.0,
            samples_per_batch=SAMPLES, samples_per_mini_batch=SAMPLES, completions_per_sample=8, max_idle_steps=None,
            lr_scheduler=ConstantScheduler(options.lr), logger=recorder, checkpoints=CheckpointSchedule(NO_CHECKPOINTS),
            callbacks=[evaluation],
        )  # fmt: skip
    await loop.run()
    evaluations = read_validations(model.workspace.open_store(), model.workspace.run, "0-grpo")
    wall, cpu = recorder.seconds_of_step(options.every)
    steps = recorder.metrics
    return {
        "setting": setting, "seed": seed, "heldout": {one.step: one.measures["reward"] for one in evaluations},
        "lag_mean": _mean([step.lag_mean or 0 for step in steps]), "lag_max": max(step.lag_max or 0 for step in steps),
        "effective_sample_size": _mean([step.effective_sample_size or 1 for step in steps]),
        "wall_seconds": wall, "cpu_seconds": cpu,
    }  # fmt: skip


def _mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 3)


def interval(values: list[float]) -> list[float]:
    """The mean and the ends of its 95 % interval, Student's t over the seeds."""
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    mean = statistics.fmean(values)
    return [round(value, 3) for value in (mean, mean - half, mean + half)]


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per setting, over the seeds."""
    of_setting: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        of_setting.setdefault(run["setting"], []).append(run)
    first = next(iter(of_setting.values()))
    rows = []
    for setting, group in of_setting.items():
        curves = [run["heldout"] for run in group]
        last = max(curves[0])
        changes = [curve[last] - run["heldout"][last] for curve, run in zip(curves, first, strict=True)]
        heldout = {step: interval([curve[step] for curve in curves]) for step in curves[0]}
        row: dict[str, Any] = {"setting": setting, "seeds": len(group), "heldout": heldout}
        row |= {"difference_to_first": interval(changes), "lag_max": max(run["lag_max"] for run in group)}
        for name in ("lag_mean", "effective_sample_size", "wall_seconds", "cpu_seconds"):
            row[name] = _mean([run[name] for run in group])
        rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the mean held-out reward of each setting over the steps, with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        colour, steps = series_style(number)[0], list(row["heldout"])
        means, lows, highs = zip(*row["heldout"].values(), strict=True)
        axes.plot(steps, means, color=colour, label=row["setting"])
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out reward")
    axes.legend(title="max_staleness")
    figure.savefig(path)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_sums(folder)
    key = await teach_sums(folder)
    runs = []
    for seed, setting in itertools.product(range(options.seeds), options.settings):
        runs.append(await train(folder, key, setting, seed, options))
        print(json.dumps(runs[-1]), flush=True)
    arguments = {"steps": options.steps, "lr": options.lr, "load": os.getloadavg()[0]}
    return arguments | {"settings": summary(runs), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as name:
        result = asyncio.run(measure(options, Path(name)))
    for row in result["settings"]:
        print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result["settings"], options.plot)


if __name__ == "__main__":
    main()
