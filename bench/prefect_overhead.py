"""Measures what orchestration and storage add to a GRPO step on a real Prefect server: client time, server CPU,
database.

    python bench/prefect_overhead.py [--steps 1000] [--model FOLDER]        (default model: a tiny one, made here)

The bench makes one complete run of `grpo`: flow, tasks, commits, checkpoints, the live page, the log. The engine is in
the process of the run, the store is a new folder, and the server is new and uses SQLite.

Client seconds are wall seconds, as the run's clock divides them (tasks.reports.clock). "orchestration" and "storage"
are the time outside engine calls and grades. The first step is left out. Server CPU is the CPU time of the server's
processes from the start of the run until every task run is in the database. Database growth counts SQLite's used pages,
and the rows of each table.
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
    """Returns the config of a GRPO run with little work for the engine: 16 completions of 6 tokens in one shard."""
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for n in range(32):
            row = {"prompt": f"{n} + {n} = ", "metadata": {"answer": str(2 * n)}}
            file.write(json.dumps(row) + "\n")
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
    """Makes one run, and returns the metrics of its steps."""
    from flows.configs.common import GRPOConfig
    from flows.grpo import grpo

    asyncio.run(grpo(GRPOConfig.model_validate(config)))
    store = open_store(config["storage"]["url"])
    return read_metrics(store, config["run"], "0-grpo", steps=config["algorithm"]["steps"])


def server_cpu_seconds(server: ServerHandle) -> float:
    """Returns the CPU time of the server and its child processes."""
    server_process = psutil.Process(server.pid)
    seconds = 0.0
    for process in (server_process, *server_process.children(recursive=True)):
        times = process.cpu_times()
        seconds += times.user + times.system
    return seconds


def database_size(home: Path) -> dict[str, int]:
    """Returns the used bytes of the database, and the number of rows of each table."""
    (path,) = home.glob("prefect-*.db")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:

        def number(query: str) -> int:
            return int(connection.execute(query).fetchone()[0])

        used_pages = number("PRAGMA page_count") - number("PRAGMA freelist_count")
        sizes = {"bytes": used_pages * number("PRAGMA page_size")}
        for table in TABLES:
            sizes[table] = number(f"SELECT count(*) FROM {table}")
    return sizes


def settled_size(home: Path, *, quiet_seconds: float = 10.0) -> dict[str, int]:
    """Waits until no table has grown for `quiet_seconds`, and returns the size of the database."""
    last, since = database_size(home), time.monotonic()
    while time.monotonic() - since < quiet_seconds:
        time.sleep(1.0)
        now = database_size(home)
        if any(now[table] != last[table] for table in TABLES):
            last, since = now, time.monotonic()
    return last


def report(metrics: list[StepMetrics], steps: int, cpu: float, grown: dict[str, int]) -> None:
    """Prints the client's time, the server's CPU time and the growth of the database, each per step."""
    # the client
    counted = [step.seconds for step in metrics[1:]]
    print(f"{steps} steps; client, ms of wall time a step: median, mean, 95th percentile")
    rows = {name: [1000 * seconds.get(name, 0.0) for seconds in counted] for name in ACTIVITIES}
    both_parts = zip(rows["orchestration"], rows["storage"], strict=True)
    rows["orchestration + storage"] = list(map(sum, both_parts))
    rows["together"] = [1000 * sum(seconds.values()) for seconds in counted]
    for name, values in rows.items():
        high = statistics.quantiles(values, n=20)[-1]
        print(f"  {name:24} {statistics.median(values):8.1f} {statistics.mean(values):8.1f} {high:8.1f}")
    tenth = max(1, len(counted) // 10)
    first, last = statistics.median(rows["together"][:tenth]), statistics.median(rows["together"][-tenth:])
    print(f"  a step of the first tenth {first:.1f}, of the last {last:.1f}")
    # the server and its database
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
            before, cpu = settled_size(home / "prefect"), server_cpu_seconds(server)
            with use_server(server.api_url):
                metrics = train(config_of(home, model, options.steps))
            after = settled_size(home / "prefect")
            used = server_cpu_seconds(server) - cpu
        report(metrics, options.steps, used, {name: after[name] - before[name] for name in after})


if __name__ == "__main__":
    main()
