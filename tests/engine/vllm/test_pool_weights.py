"""Which weights a pool takes a server's to be, with stand-ins for the servers: loads that overlap, sleeps, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.vllm.pool import VllmPool
from engine.backends.vllm.runtime import Manifest
from engine.backends.vllm.server import Server
from engine.errors import SamplerOutOfSync, WorkerDied


class StandIn:
    """Answers as a vLLM server with one worker does; `calls` are told in order, `gate` holds up loads."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.calls: list[tuple[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.wrong: dict[str, Any] = {}
        """In the answers of what is called next."""
        self.dead = False

    async def rpc(self, method: str, *args: Any) -> tuple[list[dict[str, Any]], str]:
        self.calls.append((method, args))
        if self.gate is not None:
            await self.gate.wait()
        return [self._answer(state=args[2] if len(args) > 2 else None)], "start"

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        self.calls.append((route, body))
        if self.dead:
            raise WorkerDied(f"{self.name} is gone")
        scores = [[-1.0] * (len(tokens) - 1) for tokens in body.get("sequences", ())]
        return {"answer": True, "answers": [self._answer()], "logprobs": scores}

    async def reset_prefix_cache(self) -> None:
        return None

    async def healthy(self) -> bool:
        return not self.dead

    def _answer(self, **found: Any) -> dict[str, Any]:
        told = {"tensors": 1, "values": 1, "unread": (), "seconds": {}}
        return {"rank": 0, "boot": "worker", "wrong": None} | told | found | self.wrong

    def said(self, what: str) -> list[Any]:
        return [body for name, body in self.calls if name == what]


class Standing(Server):
    """Comes up at once, and stays; `fail` ends it for good."""

    async def keep(self) -> None:
        await self.on_up(self)
        self.enter("up")
        await asyncio.Event().wait()


def stand_in(server: Server) -> StandIn:
    found = server.remote
    assert isinstance(found, StandIn)
    return found


@pytest.fixture
def pool() -> Iterator[VllmPool]:
    def make(on_up: Any) -> list[Server]:
        return [Standing(StandIn(f"server-{n}"), None, on_up, 10.0) for n in range(2)]  # type: ignore[arg-type]

    async def nothing() -> None:
        return None

    pool = VllmPool(make, nothing)
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
def test_a_server_that_comes_back_during_a_load_holds_what_was_sent_last_or_nothing(
    pool: VllmPool, file: Path, gone: bool
) -> None:
    """By the same state, with other bytes: what it was about to hold must not pass for what the others hold."""
    pool.load([file], manifest_of("before"), "state")
    back = pool.servers[1]
    stood = stand_in(back)

    async def come_back() -> asyncio.Future[None]:
        back.held, back.phase, stood.gate = None, "starting", asyncio.Event()
        coming = asyncio.ensure_future(pool._bring_up(back))
        while len(stood.said("ostinato_load")) < 2:
            await asyncio.sleep(0)
        return coming

    async def go_on(coming: asyncio.Future[None]) -> None:
        assert stood.gate is not None
        stood.gate.set()
        await coming

    coming = pool._run(come_back())
    pool.load([file], manifest_of("after"), "state")
    assert back.held is None
    if gone:
        file.unlink()
    pool._run(go_on(coming))
    given = [manifest["w"][2] for _, manifest, *_ in stood.said("ostinato_load")]
    assert given[:2] == ["before", "before"]
    assert (given[2:], back.held) == (([], None) if gone else (["after"], "state"))


def test_nobody_holds_anything_in_a_sleep_or_after_it(pool: VllmPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    pool.sleep()
    assert [server.held for server in pool.servers] == [None, None]
    with pytest.raises(SamplerOutOfSync):
        pool.check("state")
    back = pool.servers[1]
    back.phase = "starting"  # it was started again, and does not wake the trainer's GPU by that
    pool._run(pool._bring_up(back))
    assert back.held is None and [body["what"] for body in stand_in(back).said("do")] == ["sleep", "sleep"]
    back.phase = "up"
    pool.wake()
    assert [stand_in(server).said("do")[-1]["what"] for server in pool.servers] == ["wake", "wake"]
    with pytest.raises(SamplerOutOfSync):
        pool.check("state")
    pool.load([file], manifest_of("a"), "state")
    pool.check("state")


def test_a_server_that_is_gone_does_not_keep_the_others_from_sleeping(pool: VllmPool) -> None:
    one, two = pool.servers
    stand_in(one).dead = True
    pool.sleep()
    assert one.phase == "down" and [body["what"] for body in stand_in(two).said("do")] == ["sleep"]
    pool.wake()
    assert stand_in(two).said("do")[-1]["what"] == "wake" and len(stand_in(one).said("do")) == 1


def test_a_broken_server_is_down_and_the_load_refused(pool: VllmPool, file: Path) -> None:
    one, two = pool.servers
    stand_in(two).wrong = {"wrong": "no room", "broken": True}
    with pytest.raises(SamplerOutOfSync, match="server-1, worker 0: no room"):
        pool.load([file], manifest_of("a"), "state")
    assert (one.phase, two.phase) == ("up", "down") and one.held is None
    pool.load([file], manifest_of("a"), "state")
    assert (one.held, two.held) == ("state", None)


def test_an_adapter_that_one_server_does_not_prove_stays_nowhere(pool: VllmPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    one, two = pool.servers
    stand_in(two).wrong = {"wrong": "it is not what the slot holds"}
    with pytest.raises(SamplerOutOfSync, match="server-1"):
        pool.load_adapter(file.parent, "first", manifest_of("b"))
    assert not one.adapters and not two.adapters
    assert [stand_in(server).said("forget") for server in (one, two)] == [[{"name": "first"}]] * 2


def test_an_adapter_is_with_the_servers_that_took_it(pool: VllmPool, file: Path) -> None:
    pool.load([file], manifest_of("a"), "state")
    one, two = pool.servers
    stand_in(two).dead = True
    pool.load_adapter(file.parent, "first", manifest_of("b"))
    assert one.adapters == {"first"} and two.phase == "down"
    assert [server.name for server in pool._run(pool._ready("first"))] == ["server-0"]
    pool.remove_adapter("first")
    with pytest.raises(SamplerOutOfSync, match="no server holds adapter first"):
        pool.check_adapter("first")


def test_a_server_that_only_scored_may_end_before_the_check(pool: VllmPool, file: Path) -> None:
    """As the gate asks for scores at the end of a sync: an end after it would else cost the next call its draws."""
    pool.load([file], manifest_of("a"), "state")
    assert pool.score([[n, 1, 2] for n in range(16)]) == [[-1.0, -1.0]] * 16
    one, two = pool.servers
    assert stand_in(one).said("score") and stand_in(two).said("score")
    pool._run(two.fail(None))
    pool.check("state")
    assert (one.held, two.held) == ("state", None)
