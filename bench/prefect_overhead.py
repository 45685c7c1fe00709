"""What orchestration and storage cost a GRPO step on a real Prefect server: client time, server CPU, database.

    python bench/prefect_overhead.py [--steps 1000] [--model FOLDER]        (default model: a tiny one, made here)

One run of `grpo` from start to end: flow, tasks, commits, checkpoints, the page that is watched, the log. Its engine is
in its process, its store a folder, its server SQLite, each new. Client seconds are wall, as the run's own clock splits
them (tasks.reports.clock): "orchestration" and "storage" are what is not an engine call or a grade; the first step is
left out. Server CPU is that of its processes, from the start of the run until every task run is written down. Database
growth counts SQLite's pages in use, and rows by table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from engine.backends.torch.tiny import build_tiny_model
from flows.ops.local_server import ServerHandle, local_prefect_server, use_server
from storage.store.objects import open_store
from tasks.reports.metrics import ACTIVITIES, StepMetrics
from tasks.reports.step_metrics import read_metrics

TABLES = ("task_run", "task_run_state", "events", "event_resources", "log", "artifact", "artifact_collection")
PROMPTS, COMPLETIONS, NEW_TOKENS = 4, 4, 6


def config_of(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """A GRPO run whose engine has little to do: 16 completions of 6 tokens in one shard."""
    prompts = folder / "prompts.jsonl"
    rows = ({"prompt": f"{n} + {n} = ", "metadata": {"answer": str(2 * n)}} for n in range(32))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"key": str(model)},
        "data": {"train": {"kind": "file", "path": str(prompts)}},
        "grader": {"path": "tasks.graders.rules:LastNumber", "arguments": {}},
        "sampling": {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
        "algorithm": {
            "steps": steps,
            "samples_per_batch": PROMPTS * COMPLETIONS,
            "samples_per_mini_batch": PROMPTS * COMPLETIONS,
            "completions_per_sample": COMPLETIONS,
        },
        "optimizer": {"lr": 1e-5, "schedule": "constant"},
        "checkpoints": {"frequency": None},
        "engine": {"threads": 1},
        "storage": {"url": str(folder / "data")},
        "run": "overhead",
    }


def train(config: dict[str, Any]) -> list[StepMetrics]:
    """The metrics of the steps of one run."""
    from flows.configs.common import GRPOConfig
    from flows.grpo import grpo

    asyncio.run(grpo(GRPOConfig.model_validate(config)))
    store = open_store(config["storage"]["url"])
    return read_metrics(store, config["run"], "0-grpo", steps=config["algorithm"]["steps"])


def server_cpu_seconds(server: ServerHandle) -> float:
    """Of the server and its children."""
    process = psutil.Process(server.pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def database(home: Path) -> dict[str, int]:
    """Bytes in use and rows per table."""
    (path,) = home.glob("prefect-*.db")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as read:
        pages, free, size = (
            read.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        found = {"bytes": (pages - free) * size}
        for table in TABLES:
            found[table] = read.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return found


def settled(home: Path, *, quiet_seconds: float = 10.0) -> dict[str, int]:
    """The database once the server has written down all that it was told."""
    last, since = database(home), time.monotonic()
    while time.monotonic() - since < quiet_seconds:
        time.sleep(1.0)
        now = database(home)
        if {table: now[table] for table in TABLES} != {table: last[table] for table in TABLES}:
            last, since = now, time.monotonic()
    return last


def report(metrics: list[StepMetrics], steps: int, cpu: float, grown: dict[str, int]) -> None:
    """Prints what a step costs."""
    counted = [step.seconds for step in metrics[1:]]
    print(f"{steps} steps; client, ms of wall time a step: median, mean, 95th percentile")
    rows = {name: [1000 * seconds.get(name, 0.0) for seconds in counted] for name in ACTIVITIES}
    outside = zip(rows["orchestration"], rows["storage"], strict=True)
    rows["orchestration + storage"] = [sum(parts) for parts in outside]
    rows["together"] = [1000 * sum(seconds.values()) for seconds in counted]
    for name, values in rows.items():
        high = statistics.quantiles(values, n=20)[-1]
        print(f"  {name:24} {statistics.median(values):8.1f} {statistics.mean(values):8.1f} {high:8.1f}")
    tenth = max(1, len(counted) // 10)
    first, last = (statistics.median(part) for part in (rows["together"][:tenth], rows["together"][-tenth:]))
    print(f"  a step of the first tenth {first:.1f}, of the last {last:.1f}")
    print(f"server: {1000 * cpu / steps:.1f} ms of CPU a step")
    size = grown["bytes"]
    print(f"database: {size / steps / 1000:.1f} kB a step, {size / 1e6:.1f} MB in all; rows a step:")
    print("  " + ", ".join(f"{table} {grown[table] / steps:.2f}" for table in TABLES if grown[table]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        home = Path(folder)
        model = options.model.absolute() if options.model else build_tiny_model(home / "tiny", seed=0)
        with local_prefect_server(home / "prefect") as server:
            before, cpu = settled(home / "prefect"), server_cpu_seconds(server)
            with use_server(server.api_url):
                metrics = train(config_of(home, model, options.steps))
            after = settled(home / "prefect")
            used = server_cpu_seconds(server) - cpu
        report(metrics, options.steps, used, {name: after[name] - before[name] for name in after})


if __name__ == "__main__":
    main()
