"""Tests of the simulated training run: its virtual clock, and the bookkeeping of a short run with and without kills."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from bench.virtual_time import VirtualTime, run


def test_threads_and_the_loop_sleep_on_one_clock() -> None:
    """Two threads and a coroutine sleep at the same time; a chain of sleeps adds up. A thread that runs holds the clock
    up only for the CPU seconds that it uses."""
    clock = VirtualTime()
    ends: dict[str, float] = {}

    def sleep_twice(name: str, seconds: float) -> None:
        for _ in range(2):
            time.sleep(seconds)
        ends[name] = clock.read()

    async def main() -> None:
        await asyncio.gather(
            asyncio.to_thread(sleep_twice, "a", 500.0), asyncio.to_thread(sleep_twice, "b", 1000.0), asyncio.sleep(1500)
        )
        ends["gathered"] = clock.read()
        with clock.uncounted():
            sum(range(1_000_000))

    try:
        with clock.patched():
            run(clock, main())
    finally:
        clock.close()
    assert ends["a"] == pytest.approx(1000, abs=10)
    assert ends["b"] == pytest.approx(2000, abs=10)
    assert ends["gathered"] == pytest.approx(2000, abs=10)
    assert threading.active_count() >= 1 and time.monotonic is not clock.read


RUNS = """
import json, sys
from dataclasses import asdict
from bench.training_sim import Options, Seconds, simulate
seconds = Seconds(
    sample=90.0, score=200.0, train=400.0, digest=5.0, sketch=4.0, sync=3.0, sent=2.0, received=7.0, copy=100.0,
    upload=2000.0, download=1000.0, rows=1.5,
)
show = lambda line: None
reports = [simulate(Options(20, seconds, 2, ranks=4, kills=kills), show=show) for kills in (0, 2)]
print(json.dumps([asdict(report) for report in reports]))
"""


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """A run without kills and one with two. In a process of its own, because the bench's tasks run without Prefect."""
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return reports


@pytest.mark.slow
def test_the_parts_of_a_run_are_those_of_its_calls(runs: list[dict[str, Any]]) -> None:
    plain = runs[0]
    parts = plain["parts"]
    # each step samples, reads the reference's logprobs (half of `score`), trains and is sent to the samplers once
    assert parts["sampling"] == pytest.approx(20 * 90)
    assert parts["scoring"] == pytest.approx(20 * 100)
    assert parts["training"] == pytest.approx(20 * 400)
    assert parts["weight syncs"] == pytest.approx(20 * 3)
    assert parts["digests of synced weights, senders"] == pytest.approx(20 * 2)
    assert parts["digests of synced weights, receivers"] == pytest.approx(20 * 7)
    # a sketch before the first step and after each; a digest of each step and of each checkpoint
    assert parts["sketches"] == pytest.approx(21 * 4)
    copies = round(parts["copies of checkpoints"] / 100)
    assert parts["digests"] == pytest.approx((20 + copies) * 5)
    # a step takes about 620 s, a save 2,000 s, and then 300 s pass: a checkpoint at most every fourth step
    assert 3 <= copies <= 6
    assert parts["loop: rows that are not simulated"] == pytest.approx(20 * 1.5)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(plain["total"])
    # no call of the engine waits for an upload: what is left is requests of 30 ms
    assert parts["engine: its store requests and CPU"] < 20 * 5
    assert len(plain["records"]) == len(set(plain["records"])) == 20


@pytest.mark.slow
def test_kills_cost_steps_and_change_none(runs: list[dict[str, Any]]) -> None:
    plain, killed = runs
    assert killed["records"] == plain["records"], "every step is committed once, with the same weights"
    assert (killed["restarts"], plain["restarts"]) == (2, 0)
    assert killed["parts"]["steps again"] > 0 == plain["parts"].get("steps again", 0)
    assert killed["parts"]["training"] == plain["parts"]["training"]
    assert killed["total"] > plain["total"] + 2 * 60
