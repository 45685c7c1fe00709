"""Tests of the weights that a pool records for its replicas, with stand-ins for the actors: overlapping loads, sleeps,
adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import Replica
from engine.backends.replicas.runtime import Manifest
from engine.errors import SamplerOutOfSync, WorkerDied
from tests.engine.vllm.pools import FakeSource


class StandIn:
    """Answers as a replica's actor with one worker does; `calls` lists them in order, `gate` holds up loads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = None
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gate: asyncio.Event | None = None
        self.overrides: dict[str, Any] = {}
        """Values that replace those of later replies."""
        self.dead = False

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        if self.dead:
            raise WorkerDied(f"{self.name} is gone")
        if method == "load":
            if self.gate is not None:
                await self.gate.wait()
            return [self._reply(state=args[2])]
        if method == "score":
            return [[-1.0] * (len(tokens) - 1) for tokens in args[1]]
        return [self._reply(state=None)]

    async def kill(self) -> None:
        self.dead = True

    def _reply(self, **values: Any) -> dict[str, Any]:
        defaults = {"tensors": 1, "values": 1, "unread": (), "seconds": {}}
        return {"rank": 0, "worker_id": "worker", "error": None} | defaults | values | self.overrides

    def arguments(self, method: str) -> list[tuple[Any, ...]]:
        """Of every call of a method."""
        return [args for called, args in self.calls if called == method]


class Standing(Replica):
    """Comes up at once, and stays; `fail` ends it for good."""

    async def supervise(self) -> None:
        self.actor = self.start_process()
        await self.on_up(self)
        self.set_phase("up")
        await asyncio.Event().wait()


def stand_in(replica: Replica) -> StandIn:
    actor = replica.actor
    assert isinstance(actor, StandIn)
    return actor


@pytest.fixture
def pool() -> Iterator[ReplicaPool]:
    pool = ReplicaPool(FakeSource(StandIn, Standing), 2)
    yield pool
    pool.close()


def manifest_of(sha256: str) -> Manifest:
    return {"w": ("torch.float32", (1,), sha256)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    path.touch()
    return path


@pytest.mark.parametrize("gone", [False, True])
def test_a_replica_that_comes_back_during_a_load_holds_what_was_sent_last_or_nothing(
    pool: ReplicaPool, file: Path, gone: bool
) -> None:
    """By the same state, with other bytes: what it was about to hold must not pass for what the others hold."""
    pool.load([file], manifest_of("before"), "state")
    back = pool.replicas[1]
    stood = stand_in(back)

    async def come_back() -> asyncio.Future[None]:
        back.loaded_state, back.phase, stood.gate = None, "starting", asyncio.Event()
        coming = asyncio.ensure_future(pool._restore_replica(back))
        while len(stood.arguments("load")) < 2:
            await asyncio.sleep(0)
        return coming

    async def go_on(coming: asyncio.Future[None]) -> None:
        assert stood.gate is not None
        stood.gate.set()
        await coming

    # The replica loads the weights of before while others are loaded into the pool.
    coming = pool._thread.run(come_back())
    pool.load([file], manifest_of("after"), "state")
    assert back.loaded_state is None
    if gone:
        file.unlink()
    pool._thread.run(go_on(coming))
    # It must not report the new state with the old weights.
    digests = [manifest["w"][2] for _, manifest, *_ in stood.arguments("load")]
    assert digests[:2] == ["before", "before"]
    assert (digests[2:], back.loaded_state) == (([], None) if gone else (["after"], "state"))


def test_no_replica_holds_weights_in_a_sleep_or_after_it(pool: ReplicaPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    pool.sleep()
    assert [replica.loaded_state for replica in pool.replicas] == [None, None]
    with pytest.raises(SamplerOutOfSync):
        pool.check("state")
    back = pool.replicas[1]
    back.phase = "starting"  # it was started again, and does not wake the trainer's GPU by that
    pool._thread.run(pool._restore_replica(back))
    assert back.loaded_state is None and len(stand_in(back).arguments("sleep")) == 2
    back.phase = "up"
    pool.wake()
    assert all(stand_in(replica).calls[-1] == ("wake", ()) for replica in pool.replicas)
    with pytest.raises(SamplerOutOfSync):
        pool.check("state")
    pool.load([file], manifest_of("a"), "state")
    pool.check("state")


def test_a_replica_that_is_gone_does_not_keep_the_others_from_sleeping(pool: ReplicaPool) -> None:
    first, second = pool.replicas
    gone = stand_in(first)
    gone.dead = True
    pool.sleep()
    assert first.phase == "down" and stand_in(second).arguments("sleep") == [()]
    pool.wake()
    assert stand_in(second).arguments("wake") == [()] and not gone.arguments("wake")


def test_a_broken_replica_is_down_and_the_load_refused(pool: ReplicaPool, file: Path) -> None:
    first, second = pool.replicas
    stand_in(second).overrides = {"error": "no room", "broken": True}
    with pytest.raises(SamplerOutOfSync, match="replica-1, worker 0: no room"):
        pool.load([file], manifest_of("a"), "state")
    assert (first.phase, second.phase) == ("up", "down") and first.loaded_state is None
    pool.load([file], manifest_of("a"), "state")
    assert (first.loaded_state, second.loaded_state) == ("state", None)


def test_an_adapter_that_one_replica_does_not_prove_stays_nowhere(pool: ReplicaPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    first, second = pool.replicas
    stand_in(second).overrides = {"error": "it is not what the slot holds"}
    with pytest.raises(SamplerOutOfSync, match="replica-1"):
        pool.load_adapter(file.parent, "first", manifest_of("b"))
    assert not first.adapters and not second.adapters
    assert [stand_in(replica).arguments("remove_adapter") for replica in (first, second)] == [[("first",)]] * 2


def test_an_adapter_is_with_the_replicas_that_took_it(pool: ReplicaPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    first, second = pool.replicas
    stand_in(second).dead = True
    pool.load_adapter(file.parent, "first", manifest_of("b"))
    assert first.adapters == {"first"} and second.phase == "down"
    assert [replica.name for replica in pool._thread.run(pool._ready_replicas("first"))] == ["replica-0"]
    pool.remove_adapter("first")
    with pytest.raises(SamplerOutOfSync, match="no replica holds adapter first"):
        pool.check_adapter("first")


def test_a_replica_that_only_scored_may_end_before_the_check(pool: ReplicaPool, file: Path) -> None:
    """As the gate asks for scores at the end of a sync: an end after it would else cost the next call its draws."""
    pool.load([file], manifest_of("a"), "state")
    assert pool.score([[n, 1, 2] for n in range(16)]) == [[-1.0, -1.0]] * 16
    first, second = pool.replicas
    assert stand_in(first).arguments("score") and stand_in(second).arguments("score")
    pool._thread.run(second.fail(second.actor))
    pool.check("state")
    assert (first.loaded_state, second.loaded_state) == ("state", None)
