"""Tests of `ostinato engine serve` as the driver of Ray: it leaves no process behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from engine.errors import TransientEngineError
from engine.http.service import TICK_SECONDS
from engine.protocol import LogprobsRequest, TokenSequence
from tests.engine.http.test_serve import Served, wait_for_end
from tests.fixtures.engines import new_policy

pytestmark = [pytest.mark.slow]

RANKS = ("trainer.kind=deepspeed", "trainer.ranks=2", "device=cpu", "compute_dtype=float32", "threads=1")
SECONDS_AFTER_KILL = 120.0
"""Two agents of Ray end a minute after all others: they try so long to report that the head node is gone."""


def children_of(served: Served) -> list[psutil.Process]:
    return psutil.Process(served.process.pid).children(recursive=True)


def still_there(processes: list[psutil.Process]) -> list[str]:
    return [
        " ".join(process.cmdline())[:120]
        for process in psutil.wait_procs(processes, timeout=0)[1]
        if process.status() != psutil.STATUS_ZOMBIE
    ]


def wait_for_metrics(served: Served, lines: set[str]) -> None:
    """The server updates its gauges every TICK_SECONDS."""
    deadline = time.monotonic() + 12 * TICK_SECONDS
    while not lines <= set(metrics := httpx.get(f"{served.url}/metrics").text.splitlines()):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_ray_outlives_the_server(tiny_folder: Path, tmp_path: Path, end: signal.Signals) -> None:
    store = f"file://{tmp_path}/store"
    served = Served(store, tmp_path / "log", keys=RANKS)
    client = served.client(store)
    policy = await new_policy(client, tiny_folder)
    await client.logprobs(LogprobsRequest(policy, [TokenSequence([10, 11, 12], [0.0, 1.0, 1.0])]))
    processes = children_of(served)
    names = " ".join(" ".join(process.cmdline()) for process in processes)
    assert "raylet" in names and "gcs_server" in names and names.count("ray::Rank") == 2
    gauges = {
        "ostinato_cluster_nodes 1.0",
        "ostinato_ranks 2.0",
        "ostinato_ranks_alive 2.0",
        "ostinato_ranks_restarts 0.0",
    }
    await asyncio.to_thread(wait_for_metrics, served, gauges)
    await client.close()
    served.process.send_signal(end)
    status = await asyncio.to_thread(wait_for_end, served)
    assert status == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    if end is signal.SIGKILL:
        await asyncio.to_thread(psutil.wait_procs, processes, SECONDS_AFTER_KILL)
    assert still_there(processes) == [], served.log.read_text()


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
async def test_a_killed_process_of_the_private_ray_is_a_transient_error(
    tiny_folder: Path, tmp_path: Path, victim: str
) -> None:
    store = f"file://{tmp_path}/store"
    served = Served(store, tmp_path / "log", keys=(*RANKS, "trainer.hang_seconds=20"))
    try:
        client = served.client(store)
        policy = await new_policy(client, tiny_folder)
        request = LogprobsRequest(policy, [TokenSequence([10, 11, 12], [0.0, 1.0, 1.0])])
        before = await client.logprobs(request)
        process = next(process for process in children_of(served) if process.name() == victim)
        process.kill()
        await asyncio.sleep(1.0)
        # As the retries of a task: any other error fails the test.
        after = None
        for _ in range(4):
            with contextlib.suppress(TransientEngineError):
                after = await client.logprobs(request)
                break
        assert after == before, served.log.read_text()
        assert served.process.poll() is None
        assert f"the private Ray of this process is gone: its {victim} ended" in served.log.read_text()
        await client.close()
    finally:
        served.process.kill()
        served.process.wait()
