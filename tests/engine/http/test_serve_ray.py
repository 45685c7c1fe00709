"""Tests of `ostinato engine serve` as the driver of Ray: it leaves no process behind, however it ends."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import psutil
import pytest

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


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_ray_outlives_the_server(tiny_folder: Path, tmp_path: Path, end: signal.Signals) -> None:
    store = f"file://{tmp_path}/store"
    served = Served(store, tmp_path / "log", keys=RANKS)
    client = served.client(store)
    policy = await new_policy(client, tiny_folder)
    await client.logprobs(LogprobsRequest(policy, [TokenSequence([10, 11, 12], [0.0, 1.0, 1.0])]))
    processes = children_of(served)
    names = " ".join(" ".join(process.cmdline()) for process in processes)
    assert "raylet" in names and "gcs_server" in names and names.count("ray::Rank ") == 2
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "ostinato_cluster_nodes 1.0\n" in metrics
    for line in ("ostinato_ranks 2.0", "ostinato_ranks_alive 2.0", "ostinato_ranks_restarts 0.0"):
        assert f"{line}\n" in metrics
    await client.close()
    served.process.send_signal(end)
    status = await asyncio.to_thread(wait_for_end, served)
    assert status == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    if end is signal.SIGKILL:
        await asyncio.to_thread(psutil.wait_procs, processes, SECONDS_AFTER_KILL)
    assert still_there(processes) == [], served.log.read_text()
