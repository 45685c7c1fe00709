"""Trains small models on several tasks, by Ostinato and by TRL, and writes what they learned to docs/results.md.

    python -m bench.learning rates                                  base pass rates of reasoning-gym's datasets
    python -m bench.learning run --task sums-grpo --side ours --seed 0
    python -m bench.learning run --missing [--task NAME ...] [--seeds 1]
    python -m bench.learning report

A run is a process: it trains, saves the model at regular steps, and then evaluates each of them on the held-out rows.
Its result is one line of results/runs.jsonl, so that the runs can be made one by one. `run --missing` makes those that
are not in this file, one after the other, seed by seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.learning import report
from bench.learning.evaluate import heldout_scores, mean_grade, open_model
from bench.learning.measured import CPUMeter, Point
from bench.learning.tasks import GYM, SEEDS, TASKS, Side, Task, gym_grader, gym_rows

MODEL = Path(".ostinato/models/smollm2-135m-instruct")
KEPT = Path(".ostinato/learning")
"""Folder of the last models of our side with seed 0 that other tasks need, each under the name of its task."""
NEEDED = {name for task in TASKS.values() for name in (task.teacher, task.start) if name}
RATE_PROMPTS, RATE_ANSWERS, RATE_TOKENS = 24, 8, 24


def train_and_measure(
    task: Task, side: Side, seed: int, *, model_folder: Path = MODEL, keep: Path | None = None
) -> dict[str, Any]:
    """Makes one run in this process. Returns its line of results. `keep` is a folder for a copy of the last model."""
    started, meter, data = time.time(), CPUMeter(), task.data()
    start = KEPT / task.start if task.start else model_folder
    with tempfile.TemporaryDirectory(prefix="ostinato-learning-") as name:
        work = Path(name)
        folders = {"model_folder": start, "teacher": KEPT / task.teacher, "work": work}
        if side == "ours":
            from bench.learning.ours import train

            points = asyncio.run(train(task, data, seed, meter=meter, **folders))
        elif side == "trl":
            from bench.learning.trl_side import train as train_by_trl

            points = train_by_trl(task, data, seed, meter=meter, **folders)
        else:
            points = [Point(0, start, 0.0)]
        wall = time.time() - started
        scores = asyncio.run(
            heldout_scores(
                [point.folder for point in points], data.heldout, task.grader(), new_tokens=task.new_tokens, work=work
            )
        )
        if keep is not None:
            shutil.copytree(points[-1].folder, keep, dirs_exist_ok=True)
    measured = []
    for point, score in zip(points, scores, strict=True):
        measured.append({
            "samples": point.samples, "sampled_tokens": point.sampled_tokens,
            "cpu_seconds": round(point.cpu_seconds, 1), "score": round(score, 4),
        })  # fmt: skip
    return {
        "task": task.name, "side": side, "seed": seed, "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "reasoning-gym")},
        "model": model_folder.name, "settings": task.settings, "heldout_rows": len(data.heldout),
        "wall_seconds": round(wall, 1), "load": round(os.getloadavg()[0], 1), "points": measured,
    }  # fmt: skip


def missing(tasks: Sequence[Task], seeds: Sequence[int]) -> list[tuple[Task, Side, int]]:
    """The runs without a result: seed by seed, and in the order of the tasks."""
    known = []
    for row in report.read("runs"):
        known.append((row["task"], row["side"], row["seed"], row["settings"]))
    runs: list[tuple[Task, Side, int]] = []
    for seed in seeds:
        for task in tasks:
            for side in task.sides:
                # the model before training is the same for all seeds
                if side == "base" and seed != SEEDS[0]:
                    continue
                if (task.name, side, seed, task.settings) not in known:
                    runs.append((task, side, seed))
    return runs


def run_process(task: Task, side: Side, seed: int) -> None:
    """Makes one run in a new process, and adds its line to the results."""
    needed = [name for name in (task.teacher, task.start) if name and not (KEPT / name).is_dir()]
    for name in needed if side != "base" or task.start else []:
        print(f"{task.name} needs the last model of {name}, which is trained first", flush=True)
        train_in_process(name, "ours", SEEDS[0])
    line = train_in_process(task.name, side, seed)
    with report.path_of("runs").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def train_in_process(task: str, side: Side, seed: int) -> str:
    """Runs `train` in a new process. Returns its last line."""
    command = [sys.executable, "-m", "bench.learning", "train", "--task", task, "--side", side, "--seed", str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


async def measure_rates(names: Sequence[str]) -> None:
    """Measures the share of right answers of the model without training, and adds a line for each dataset."""
    with tempfile.TemporaryDirectory(prefix="ostinato-learning-") as work:
        model = (await open_model(MODEL, Path(work))).max_gen_len(RATE_TOKENS)
        for name in names:
            rows = gym_rows(name, GYM[name][0], "heldout", RATE_PROMPTS)
            grader = gym_grader(name)
            greedy = await mean_grade(model.temperature(0.0), rows, grader)
            sampled = await mean_grade(model.temperature(1.0), rows * RATE_ANSWERS, grader)
            line = json.dumps({
                "dataset": name, "config": GYM[name][0], "answer_from": GYM[name][1], "prompts": len(rows),
                "answers": RATE_ANSWERS, "new_tokens": RATE_TOKENS, "greedy": round(greedy, 3),
                "sampled": round(sampled, 3), "date": datetime.now(UTC).date().isoformat(),
            })  # fmt: skip
            with report.path_of("rates").open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "train"):
        command = commands.add_parser(name)
        command.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
        command.add_argument("--side", choices=("base", "ours", "trl"))
        command.add_argument("--seed", type=int)
        if name == "run":
            command.add_argument("--missing", action="store_true", help="Makes all runs without a result.")
            command.add_argument("--seeds", type=int, default=len(SEEDS), help="Number of seeds, with --missing.")
    rates = commands.add_parser("rates")
    rates.add_argument("--dataset", nargs="+", choices=GYM, default=list(GYM))
    commands.add_parser("report")
    options = parser.parse_args()
    if options.command == "rates":
        asyncio.run(measure_rates(options.dataset))
    elif options.command == "report":
        report.write()
    elif options.command == "run" and options.missing:
        for task, side, seed in missing([TASKS[name] for name in options.task], SEEDS[: options.seeds]):
            run_process(task, side, seed)
    elif len(options.task) != 1 or options.side is None or options.seed is None:
        parser.error("give one --task with --side and --seed, or --missing")
    elif options.command == "run":
        run_process(TASKS[options.task[0]], options.side, options.seed)
    else:
        task, side, seed = TASKS[options.task[0]], options.side, options.seed
        is_needed = task.name in NEEDED and (side, seed) == ("ours", SEEDS[0])
        keep = KEPT / task.name if is_needed else None
        print(json.dumps(train_and_measure(task, side, seed, keep=keep)))


if __name__ == "__main__":
    main()
