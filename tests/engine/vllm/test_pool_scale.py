"""Replicas that join and leave a pool while it works. Stand-ins replace their processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from engine.backends.replicas import pool as pool_module
from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import Replica, count_replicas
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import ActorCount, Completion, SamplingParams
from tests.engine.vllm.pools import FakeSource
from tests.fixtures.waiting import wait_until

LENGTH = 6
PROMPTS = [[10 + number] for number in range(16)]
SEEDS = list(range(100, 116))
PARAMS = SamplingParams(max_new_tokens=LENGTH)


def token_of(text: list[int]) -> int:
    """The next token of the model of these tests: it depends on the whole text before it."""
    return sha256(repr(text).encode()).digest()[0]


def whole(prompt: list[int]) -> list[int]:
    """The completion of a prompt that one replica samples alone."""
    text = list(prompt)
    for _ in range(LENGTH):
        text.append(token_of(text))
    return text[len(prompt) :]


class FakeActor:
    """One start of a replica. It knows its weights, and samples only with them.

    `blocked`: methods whose calls wait until they are taken out. "stream" waits after the second token.
    """

    def __init__(self, name: str, blocked: set[str]) -> None:
        self.name, self.blocked, self.calls = name, blocked, list[str]()
        self.process = SimpleNamespace(node=f"node of {name}")
        self.worker_id, self.state = uuid4().hex, ""
        self.sampled: Counter[int] = Counter()
        """Tokens by seed."""
        self.finished_work = True
        self.spoiled: set[str] = set()
        """The checks that do not pass."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        self.calls.append(method)
        await self._while_blocked(method)
        reply: dict[str, Any] = {"worker_id": self.worker_id, "rank": 0, "state": "", "tensors": 0, "values": 0}
        if method == "load":
            self.state = reply["state"] = args[2]
        if method == "sleep":
            self.state = ""
        if method == "rpc" and (args[0] in self.spoiled or (args[0] == "ostinato_check" and args[1] != self.state)):
            reply["error"] = "it holds other weights"
        return [{**reply, "unread": (), "seconds": {}}]

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        self.calls.append("stream")
        state, prompts, prompt_indices, seeds, _, _, _, _, earlier = args
        assert state == self.state
        self.finished_work = False
        texts = [list(prompts[index]) for index in prompt_indices]
        for position, tokens in enumerate(earlier or []):
            texts[position] += tokens
        for number in range(LENGTH):
            chunks = []
            for position, text in enumerate(texts):
                done = len(earlier[position]) if earlier else 0
                if number < LENGTH - done:
                    text.append(token_of(text))
                    self.sampled[seeds[position]] += 1
                    stop = "length" if number == LENGTH - done - 1 else None
                    chunks.append((position, text[-1:], [-1.0], stop))
            if chunks:
                yield chunks
            if number == 1:
                await self._while_blocked("stream")
        self.finished_work = True

    async def _while_blocked(self, method: str) -> None:
        while method in self.blocked:
            if self.ended.done():
                raise WorkerDied(f"{self.name} is gone")
            await asyncio.sleep(0.005)

    async def wait_until_running(self, timeout: float) -> None:
        await self._while_blocked("run")

    async def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("it was killed")

    def log_tail(self) -> str:
        return ""


class Scaled:
    """A pool of stand-ins, with what a test does to it."""

    def __init__(self, count: int, file: Path) -> None:
        self.blocked: dict[str, set[str]] = {f"replica-{number}": set() for number in range(8)}
        self.actors: dict[str, FakeActor] = {}
        """The last process of each replica."""
        self.source = FakeSource(self._start)
        self.pool = ReplicaPool(self.source, count)
        self.file = file
        self.threads = ThreadPoolExecutor()
        file.touch()
        self.load("state-0")

    def _start(self, name: str) -> FakeActor:
        self.actors[name] = FakeActor(name, self.blocked[name])
        return self.actors[name]

    def load(self, state: str) -> None:
        self.pool.load([self.file], {"w": ("torch.float32", (1,), state)}, state)

    def generate(self, **options: Any) -> list[Completion]:
        return self.pool.generate(PROMPTS, SEEDS, PARAMS, **options)

    def in_thread(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        return self.threads.submit(call, *args, **options)

    def names(self) -> list[str]:
        return [replica.name for replica in self.pool.replicas]

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self.pool.replicas if replica.name == name)

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, seconds=10)

    def until_up(self, *names: str) -> None:
        self.until(lambda: self.names() == list(names) and all(r.phase == "up" for r in self.pool.replicas))

    def close(self) -> None:
        for methods in self.blocked.values():
            methods.clear()
        self.threads.shutdown()
        self.pool.close()


@pytest.fixture
def scaled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scaled]:
    """Replicas, two unless the test says how many, that hold state-0."""
    scaled = Scaled(getattr(request, "param", 2), tmp_path / "w.safetensors")
    yield scaled
    scaled.close()


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


WHOLE = [whole(prompt) for prompt in PROMPTS]


# -- joining ------------------------------------------------------------------------------------------------------


def test_a_replica_that_joins_loads_the_weights_and_then_gets_work(scaled: Scaled) -> None:
    scaled.blocked["replica-2"].add("load")
    scaled.pool.scale(3)
    scaled.until(lambda: "load" in scaled.actors["replica-2"].calls)
    assert count_replicas(scaled.pool.replicas) == ActorCount(wanted=3, alive=2)
    assert tokens_of(scaled.generate()) == WHOLE
    assert not scaled.actors["replica-2"].sampled
    scaled.blocked["replica-2"].clear()
    scaled.until_up("replica-0", "replica-1", "replica-2")
    assert tokens_of(scaled.generate()) == WHOLE
    assert scaled.actors["replica-2"].sampled
    scaled.pool.check("state-0")
    assert scaled.actors["replica-2"].calls == ["start", "load", "stream", "rpc"]


def test_a_replica_that_joins_after_the_files_are_gone_waits_for_the_next_sync(scaled: Scaled) -> None:
    scaled.file.unlink()
    scaled.pool.scale(3)
    scaled.until_up("replica-0", "replica-1", "replica-2")
    assert scaled.replica("replica-2").loaded_state is None
    assert tokens_of(scaled.generate()) == WHOLE
    assert not scaled.actors["replica-2"].sampled
    scaled.pool.check("state-0")
    scaled.load("state-1")
    scaled.generate()
    assert scaled.actors["replica-2"].sampled


def test_a_replica_that_never_comes_up_holds_up_nothing(scaled: Scaled) -> None:
    scaled.blocked["replica-2"].add("run")
    scaled.pool.scale(3)
    scaled.load("state-1")
    assert tokens_of(scaled.generate()) == WHOLE
    scaled.pool.check("state-1")
    assert count_replicas(scaled.pool.replicas) == ActorCount(wanted=3, alive=2)
    # It is the first to go, and frees its resources.
    scaled.pool.scale(2)
    scaled.until(lambda: scaled.source.released == ["replica-2"])
    scaled.until_up("replica-0", "replica-1")
    assert scaled.actors["replica-2"].ended.done()


def test_a_replica_that_joins_gets_work_for_the_adapters_that_are_loaded_after_it(
    scaled: Scaled, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    scaled.pool.load_adapter(tmp_path / "adapter", "adapter-0", {})
    scaled.pool.scale(3)
    scaled.until_up("replica-0", "replica-1", "replica-2")
    scaled.generate(adapter="adapter-0")
    assert not scaled.actors["replica-2"].sampled
    scaled.pool.load_adapter(tmp_path / "adapter", "adapter-1", {})
    scaled.generate(adapter="adapter-1")
    assert scaled.actors["replica-2"].sampled
    scaled.pool.check_adapter("adapter-1")
    scaled.pool.check("state-0")


def test_too_many_replicas_are_refused_and_nothing_changes(scaled: Scaled) -> None:
    with pytest.raises(BadSpec, match="9 replicas were asked for, and there is room for 8"):
        scaled.pool.scale(9)
    assert scaled.names() == ["replica-0", "replica-1"] and scaled.source.made == 2


def test_the_same_number_changes_nothing(scaled: Scaled) -> None:
    scaled.pool.scale(2)
    scaled.until_up("replica-0", "replica-1")
    assert scaled.source.made == 2 and not scaled.source.released
    assert [replica.starts for replica in scaled.pool.replicas] == [1, 1]


# -- leaving ------------------------------------------------------------------------------------------------------


def test_interruptible_completions_of_a_leaving_replica_continue_elsewhere_from_their_tokens(scaled: Scaled) -> None:
    scaled.blocked["replica-1"].add("stream")
    told: dict[int, list[int]] = {}
    call = scaled.in_thread(
        scaled.generate,
        on_token=lambda index, token, logprob: told.setdefault(index, []).append(token),
        interrupted=lambda: False,
    )
    leaving = scaled.actors["replica-1"]
    scaled.until(lambda: bool(leaving.sampled))
    scaled.pool.scale(1)
    begun = call.result(timeout=10)
    # The replica ends only after its weights were proven, and the caller's check passes without it.
    scaled.until(lambda: scaled.source.released == ["replica-1"])
    assert leaving.calls[-1] == "rpc" and leaving.ended.done()
    scaled.pool.check("state-0")

    cut = [index for index, completion in enumerate(begun) if completion.stop_reason == "interrupted"]
    of_leaving = [index for index in cut if SEEDS[index] in leaving.sampled]
    assert len(of_leaving) == len(leaving.sampled)
    assert [len(begun[index].token_ids) for index in of_leaving] == [2] * len(of_leaving)
    rest = scaled.pool.generate(
        [PROMPTS[index] for index in cut], [1000 + index for index in cut], PARAMS,
        lambda position, token, logprob: told[cut[position]].append(token),
        sampled=[begun[index].token_ids for index in cut], interrupted=lambda: False,
    )  # fmt: skip
    scaled.pool.check("state-0")
    wholes = tokens_of(begun)
    for index, completion in zip(cut, rest, strict=True):
        wholes[index] = wholes[index] + completion.token_ids
    assert wholes == WHOLE
    assert [told[index] for index in range(len(PROMPTS))] == WHOLE  # each token was told once
    assert sum(sum(actor.sampled.values()) for actor in scaled.actors.values()) == LENGTH * len(PROMPTS)


def test_a_leaving_replica_finishes_calls_that_cannot_be_interrupted(scaled: Scaled) -> None:
    scaled.blocked["replica-1"].add("stream")
    call = scaled.in_thread(scaled.generate)
    leaving = scaled.actors["replica-1"]
    scaled.until(lambda: bool(leaving.sampled))
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.replica("replica-1").phase == "draining")
    assert count_replicas(scaled.pool.replicas) == ActorCount(wanted=1, alive=1, leaving=1)
    # Another call gets nothing from it.
    assert tokens_of(scaled.generate()) == WHOLE
    assert set(leaving.sampled.values()) == {2} and not leaving.ended.done()
    scaled.blocked["replica-1"].clear()
    assert tokens_of(call.result(timeout=10)) == WHOLE
    assert leaving.finished_work and set(leaving.sampled.values()) == {LENGTH}  # nothing was sampled twice
    scaled.until(lambda: scaled.names() == ["replica-0"])
    assert leaving.calls[-1] == "rpc"
    scaled.pool.check("state-0")


@pytest.mark.parametrize("spoiled", ["ostinato_check", "ostinato_check_adapter"])
def test_completions_of_a_leaving_replica_with_other_weights_are_refused(
    scaled: Scaled, tmp_path: Path, spoiled: str
) -> None:
    (tmp_path / "adapter").mkdir()
    scaled.pool.load_adapter(tmp_path / "adapter", "adapter-0", {})
    scaled.generate(adapter="adapter-0")
    scaled.actors["replica-1"].spoiled.add(spoiled)
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.names() == ["replica-0"])
    with pytest.raises(SamplerOutOfSync, match="replica-1 sampled completions and ended before its weights"):
        scaled.pool.check("state-0")
    scaled.load("state-0")
    scaled.generate()
    scaled.pool.check("state-0")


def test_a_check_that_runs_while_a_replica_leaves_passes(scaled: Scaled) -> None:
    scaled.generate()
    scaled.blocked["replica-1"].add("rpc")
    check = scaled.in_thread(scaled.pool.check, "state-0")
    scaled.until(lambda: "rpc" in scaled.actors["replica-1"].calls)
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.replica("replica-1").phase == "draining")
    scaled.blocked["replica-1"].clear()
    check.result(timeout=10)
    scaled.until(lambda: scaled.names() == ["replica-0"])
    scaled.pool.check("state-0")


def test_a_leaving_replica_that_dies_is_repeated_by_others_and_not_restarted(scaled: Scaled) -> None:
    scaled.blocked["replica-1"].add("stream")
    call = scaled.in_thread(scaled.generate)
    leaving = scaled.actors["replica-1"]
    scaled.until(lambda: bool(leaving.sampled))
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.replica("replica-1").phase == "draining")
    scaled.pool._thread.loop.call_soon_threadsafe(leaving.ended.set_result, "its machine is gone")
    assert tokens_of(call.result(timeout=10)) == WHOLE
    scaled.until(lambda: scaled.names() == ["replica-0"])
    assert scaled.actors["replica-1"] is leaving and scaled.source.released == ["replica-1"]
    scaled.pool.check("state-0")


def test_a_replica_that_leaves_during_a_load_ends_after_it(scaled: Scaled) -> None:
    scaled.blocked["replica-1"].add("load")
    load = scaled.in_thread(scaled.load, "state-1")
    leaving = scaled.actors["replica-1"]
    scaled.until(lambda: leaving.calls.count("load") == 2)
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.replica("replica-1").phase == "draining")
    assert not leaving.ended.done()
    scaled.blocked["replica-1"].clear()
    load.result(timeout=10)
    scaled.until(lambda: scaled.names() == ["replica-0"])
    assert tokens_of(scaled.generate()) == WHOLE
    scaled.pool.check("state-1")


# -- sleep --------------------------------------------------------------------------------------------------------


def test_replicas_join_and_leave_a_pool_that_sleeps(scaled: Scaled) -> None:
    scaled.pool.sleep()
    scaled.pool.scale(1)
    scaled.until(lambda: scaled.names() == ["replica-0"])
    scaled.pool.scale(2)
    scaled.until_up("replica-0", "replica-2")
    assert scaled.actors["replica-2"].calls[-1] == "sleep"
    scaled.pool.wake()
    scaled.load("state-1")
    assert tokens_of(scaled.generate()) == WHOLE
    assert scaled.actors["replica-0"].sampled and scaled.actors["replica-2"].sampled
    scaled.pool.check("state-1")


# -- machines that are taken away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [1], indirect=True)
def test_the_last_replica_works_on_until_its_replacement_holds_the_weights(
    scaled: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MACHINES_INTERVAL", 0.01)
    scaled.blocked["replica-1"].add("load")
    scaled.source.nodes = {"node of replica-0", "another node"}
    wait_until(lambda: scaled.names() == ["replica-0", "replica-1"], seconds=10)  # the first interval is a long one
    scaled.until(lambda: "load" in scaled.actors["replica-1"].calls)
    assert tokens_of(scaled.generate()) == WHOLE  # by the one that is still there
    scaled.pool.check("state-0")
    scaled.blocked["replica-1"].clear()
    scaled.until_up("replica-1")
    assert scaled.source.released == ["replica-0"] and scaled.source.made == 2
    assert tokens_of(scaled.generate()) == WHOLE
    scaled.pool.check("state-0")
    assert scaled.actors["replica-1"].sampled
