"""Helpers of the tests of real vLLM replicas: prompts, loads, and the processes of a replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import OnUp, Replica
from engine.backends.replicas.runtime import Manifest
from engine.backends.vllm.architecture import EngineOptions
from engine.cluster.actors import ActorHandle
from engine.errors import BadSpec
from engine.protocol import Completion, SamplingParams
from tests.engine.vllm.planted import PLANTED
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).parents[3]
OPTIONS = EngineOptions(
    dtype="float32",
    max_context=512,
    vocab_size=259,
    eos_token_ids=(2,),
    kv_cache_bytes=128 << 20,
    extension=PLANTED,
)
PROMPTS = [[10 + group, 20, 30 + group] for group in range(4) for _ in range(4)]
SEEDS = list(range(len(PROMPTS)))
SHORT = SamplingParams(max_new_tokens=12, min_new_tokens=12)
LONG = SamplingParams(max_new_tokens=400, min_new_tokens=400)


class FakeSource:
    """A replica.ReplicaSource of replicas whose processes are stand-ins, which `start` returns for a name."""

    def __init__(self, start: Callable[[str], Any], replica_class: type[Replica] = Replica) -> None:
        self._start, self._replica_class = start, replica_class
        self.made = 0
        self.room = 8
        self.released: list[str] = []
        self.nodes: set[str] = set()
        """The nodes that will be taken away."""

    def make(self, on_up: OnUp) -> Replica:
        name = f"replica-{self.made}"
        self.made += 1
        return self._replica_class(
            name, partial(self._start, name), {}, on_up, 60.0, partial(self.released.append, name)
        )

    def check_room(self, count: int) -> None:
        if count > self.room:
            raise BadSpec(f"{count} replicas were asked for, and there is room for {self.room}")

    def draining_nodes(self) -> set[str]:
        return self.nodes

    def is_connected(self) -> bool:
        return True

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class WeightFiles:
    files: list[Path]
    manifest: Manifest
    state: str


def load(pool: ReplicaPool, weights: WeightFiles, **more: Any) -> None:
    pool.load(weights.files, weights.manifest, weights.state, **more)


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    wait_until(condition, seconds=seconds, interval=0.05)


def process_of(replica: Replica) -> psutil.Process:
    """The actor's own process, which answers the pool."""
    whereabouts = replica.running_actor().process
    assert whereabouts is not None
    return psutil.Process(whereabouts.pid)


def processes_of(replica: Replica) -> list[psutil.Process]:
    """The actor's process and all below it."""
    process = process_of(replica)
    return [process, *process.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def core_of(replica: Replica) -> psutil.Process:
    """vLLM's engine, a process below the one that answers; with one rank it computes, too."""
    return named(replica, "EngineCore")[0]


def named(replica: Replica, what: str) -> list[psutil.Process]:
    """The processes under a replica that go by such a title."""
    below = process_of(replica).children(recursive=True)
    return [process for process in below if what in " ".join([process.name(), *process.cmdline()])]


def call(pool: ReplicaPool, replica: Replica, method: str, *args: Any) -> Any:
    """A method of the actor itself, past the pool."""
    return pool._thread.run(replica.running_actor().call(method, *args))


def count_requests(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Completions that each replica is asked for from now on, by name."""
    counts: dict[str, int] = {}
    stream = ActorHandle.stream

    def counting(self: ActorHandle, method: str, *args: Any) -> Any:
        name, seeds = self.name.removeprefix("vLLM "), args[3]
        counts[name] = counts.get(name, 0) + len(seeds)
        return stream(self, method, *args)

    monkeypatch.setattr(ActorHandle, "stream", counting)
    return counts


def same(drawn: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in drawn] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in drawn] == [c.stop_reason for c in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
