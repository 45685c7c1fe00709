"""Supervision of a replica, and calls of its actor, on a private Ray. A stand-in replaces vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from engine.backends.replicas.replica import Replica
from engine.cluster.actors import ActorBase, ActorHandle, start_actor
from engine.cluster.connection import Cluster
from engine.errors import SamplerOutOfSync, WorkerDied
from tests.engine.vllm.pools import is_alive

OPTIONS = {"num_cpus": 0}


class StandIn(ActorBase):
    """Starts one process, as vLLM does. `config` says what goes wrong, and an argument of that process ("name")."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.failed = asyncio.Event()
        self.cancelled = False

    async def start(self, config: Mapping[str, str]) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)", config.get("name", "")]
        self.children.append(subprocess.Popen(command))
        if "fails" in config:
            print("no such device", flush=True)
            raise RuntimeError("vLLM did not start")
        if "hangs" in config:
            await asyncio.Event().wait()

    async def wait_for_failure(self) -> str:
        await self.failed.wait()
        return "its engine ended"

    async def fail(self) -> None:
        self.failed.set()

    async def refuse(self) -> None:
        raise SamplerOutOfSync("it holds None")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def count(self, end: int) -> AsyncIterator[int]:
        try:
            for number in range(end):
                yield number
        finally:
            self.cancelled = True

    async def was_cancelled(self) -> bool:
        return self.cancelled


def start() -> ActorHandle:
    return start_actor(StandIn, name="vLLM replica-0", options=OPTIONS, timeout=60)


async def nothing(replica: Replica) -> None:
    return None


@contextlib.asynccontextmanager
async def supervised_replica(
    config: Mapping[str, str],
    on_up: Callable[[Replica], Awaitable[None]] = nothing,
    seconds: float = 60,
    start_process: Callable[[], ActorHandle] = start,
) -> AsyncIterator[Replica]:
    replica = Replica("replica-0", start_process, config, on_up, seconds)
    supervisor = asyncio.create_task(replica.supervise())
    try:
        yield replica
    finally:
        await replica.close()
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def processes(actor: ActorHandle | None) -> list[psutil.Process]:
    assert actor is not None and actor.process is not None
    process = psutil.Process(actor.process.pid)
    return [process, *process.children(recursive=True)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# -- supervision ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_replica_that_ends_is_restarted_without_leftovers(cluster: Cluster, end: str) -> None:
    ups: list[ActorHandle | None] = []

    async def on_up(replica: Replica) -> None:
        assert replica.phase == "starting"
        ups.append(replica.actor)

    async def main() -> None:
        async with supervised_replica({}, on_up) as replica:
            await until(lambda: replica.phase == "up")
            first = processes(replica.actor)
            assert len(first) >= 2
            if end == "killed":
                first[0].kill()
            else:
                await replica.running_actor().call("fail")
            await until(lambda: len(ups) == 2 and replica.phase == "up")
            assert not any(map(is_alive, first))
            last = processes(replica.actor)
        assert ups[0] is not ups[1] and not any(map(is_alive, last))

    run(main())


def test_a_failed_start_shows_cause_and_log_and_is_repeated(cluster: Cluster) -> None:
    async def main() -> None:
        async with supervised_replica({"fails": ""}) as replica:
            await until(lambda: replica.failures >= 1)
            assert "vLLM did not start" in replica.error and "no such device" in replica.error
            assert replica.phase in ("down", "starting")
            await until(lambda: replica.starts >= 2)

    run(main())


@pytest.mark.slow
def test_a_replica_that_never_comes_up_is_killed(cluster: Cluster) -> None:
    """vLLM's start, which hangs, may take a second. Ray's start of the process takes what the machine needs."""
    started: list[psutil.Process] = []
    name = uuid4().hex

    def start_patiently() -> ActorHandle:
        actor = start()
        wait = actor.wait_until_running

        async def wait_long(timeout: float) -> Any:
            location = await wait(600)
            started.append(psutil.Process(location.pid))
            return location

        actor.wait_until_running = wait_long  # type: ignore[method-assign]
        return actor

    async def main() -> None:
        async with supervised_replica({"hangs": "", "name": name}, seconds=1, start_process=start_patiently) as replica:
            await until(lambda: replica.failures >= 1 and replica.phase == "down", seconds=900)
            assert "in start" in replica.error and "sampler.start_seconds is 1" in replica.error
            assert started and not any(map(is_alive, started))
            assert not any(name in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))

    run(main())


@pytest.mark.slow
def test_fail_kills_a_stopped_replica(cluster: Cluster) -> None:
    async def main() -> None:
        async with supervised_replica({}) as replica:
            await until(lambda: replica.phase == "up")
            hung, group = replica.running_actor(), processes(replica.actor)
            group[0].send_signal(signal.SIGSTOP)
            replica.loaded_state = "state"
            await replica.fail(hung)
            assert not any(map(is_alive, group)) and replica.loaded_state is None
            await until(lambda: replica.phase == "up" and replica.actor is not hung)
            await replica.fail(hung)  # a late failure of a call to the first process does not end the second
            assert replica.phase == "up"

    run(main())


# -- actors -------------------------------------------------------------------------------------------------------


def test_calls_raise_engine_errors_and_closed_streams_end(cluster: Cluster) -> None:
    async def main() -> None:
        actor = start()
        with pytest.raises(SamplerOutOfSync, match="it holds None"):
            await actor.call("refuse")
        with pytest.raises(WorkerDied, match="vLLM replica-0 failed in start: RuntimeError: vLLM did not start"):
            await actor.call("start", {"fails": ""})
        with pytest.raises(WorkerDied, match="vLLM replica-0 was silent for 1 s in sleep"):
            await actor.call("sleep", 600.0, timeout=1)
        assert [number async for number in actor.stream("count", 3)] == [0, 1, 2]
        async with contextlib.aclosing(actor.stream("count", 10**9)) as numbers:
            assert await anext(numbers) == 0
        deadline = time.monotonic() + 60
        while not await actor.call("was_cancelled"):
            assert time.monotonic() < deadline
        calling = asyncio.ensure_future(actor.call("sleep", 600.0))
        await actor.wait_until_running(60)
        await actor.kill()
        with pytest.raises(WorkerDied, match="vLLM replica-0 is gone in sleep"):
            await calling
        await actor.kill()  # again: nothing is left to kill

    run(main())


@pytest.mark.slow
def test_a_missing_interpreter_fails_the_start(cluster: Cluster, tmp_path: Path) -> None:
    async def main() -> None:
        actor = start_actor(
            StandIn, name="vLLM replica-0", options=OPTIONS, timeout=60, python=str(tmp_path / "python")
        )
        with pytest.raises(WorkerDied, match="vLLM replica-0"):
            await actor.wait_until_running(5)
        await actor.kill()

    run(main())
