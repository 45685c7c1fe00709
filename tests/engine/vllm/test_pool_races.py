"""What a pool does while a replica ends, drains or is checked. Stand-ins replace the processes of the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import Replica, describe_replicas
from engine.errors import SamplerOutOfSync
from engine.protocol import SamplingParams
from tests.engine.vllm.pools import FakeSource
from tests.fixtures.waiting import wait_until

PROMPTS, SEEDS, PARAMS = [[n] for n in range(8)], list(range(8)), SamplingParams(max_new_tokens=1)


class FakeActor:
    """One start of a replica. `blocked`: the methods whose calls wait until they are taken out of the set."""

    def __init__(self, name: str, blocked: set[str]) -> None:
        self.name, self.blocked, self.calls = name, blocked, list[str]()
        self.process = None
        self.worker_id = uuid4().hex
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        self.calls.append(method)
        while method in self.blocked:
            await asyncio.sleep(0.01)
        if method == "score":
            return [[-1.0] * (len(sequence) - 1) for sequence in args[1]]
        reply = {"worker_id": self.worker_id, "rank": 0, "state": "state-0", "tensors": 0, "values": 0}
        return [{**reply, "unread": (), "seconds": {}}]

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        seeds = args[3]
        yield [(position, [1], [-1.0], "length") for position in range(len(seeds))]

    async def wait_until_running(self, timeout: float) -> None:
        return None

    async def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("it was killed")

    def log_tail(self) -> str:
        return ""


Pool = tuple[ReplicaPool, dict[str, set[str]]]
"""The pool, and the methods that each replica blocks."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Both replicas are up and hold state-0, from a file that exists."""
    blocked: dict[str, set[str]] = {"replica-0": set(), "replica-1": set()}

    pool = ReplicaPool(FakeSource(lambda name: FakeActor(name, blocked[name])), 2)
    file = tmp_path / "0.safetensors"
    file.touch()
    pool.load([file], {}, "state-0")
    yield pool, blocked
    for methods in blocked.values():
        methods.clear()
    pool.close()


def end(pool: ReplicaPool, replica: Replica) -> None:
    """Ends the process of a replica, as a crash does."""
    actor: Any = replica.actor
    pool._thread.loop.call_soon_threadsafe(actor.ended.set_result, "it crashed")
    wait_until(lambda: replica.actor is not actor, seconds=10)


def test_work_waits_for_a_starting_replica_while_another_one_drains(pool: Pool) -> None:
    replicas, blocked = pool[0].replicas, pool[1]
    blocked["replica-1"].add("start")
    end(pool[0], replicas[1])
    replicas[0].set_phase("draining")
    with ThreadPoolExecutor() as threads:
        scores = threads.submit(pool[0].score, [[1, 2, 3]])
        try:
            # The replica can start only if the pool's event loop is not busy.
            blocked["replica-1"].clear()
            assert scores.result(timeout=10) == [[-1.0, -1.0]]
        finally:
            replicas[0].loaded_state = None


@pytest.mark.parametrize("sampled_before", [False, True])
def test_a_check_proves_nothing_about_completions_that_end_during_it(pool: Pool, sampled_before: bool) -> None:
    replicas, blocked = pool[0].replicas, pool[1]
    actors: list[Any] = [replica.actor for replica in replicas]
    if sampled_before:
        pool[0].generate(PROMPTS, SEEDS, PARAMS)
    blocked["replica-0"].add("rpc")
    with ThreadPoolExecutor() as threads:
        check = threads.submit(pool[0].check, "state-0")
        wait_until(lambda: "rpc" in actors[0].calls, seconds=10)
        pool[0].generate(PROMPTS, SEEDS, PARAMS)
        blocked["replica-0"].clear()
        check.result(timeout=10)
    end(pool[0], replicas[0])
    with pytest.raises(SamplerOutOfSync, match="replica-0 sampled completions and ended before its weights"):
        pool[0].check("state-0")


def test_a_replica_that_came_up_again_shows_no_error(pool: Pool) -> None:
    replicas, blocked = pool[0].replicas, pool[1]
    blocked["replica-0"].add("start")
    end(pool[0], replicas[0])
    assert "replica-0 ended: it crashed" in describe_replicas(replicas)
    blocked["replica-0"].clear()
    wait_until(lambda: replicas[0].phase == "up", seconds=10)
    assert describe_replicas(replicas) == "replica-0 is up; replica-1 is up"
