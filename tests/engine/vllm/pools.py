"""What the tests of real vLLM servers share: prompts, plans with faults planted, and looks at processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.backends.vllm.launching import Plan
from engine.backends.vllm.pool import VllmPool
from engine.backends.vllm.runtime import EngineOptions, Manifest
from engine.backends.vllm.server import Launch, Server
from engine.protocol import Completion, SamplingParams

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OPTIONS = EngineOptions(
    dtype="float32",
    max_context=512,
    vocab_size=259,
    eos_token_ids=(2,),
    kv_cache_bytes=128 << 20,
    extension="planted.Planted",
)
PROMPTS = [[10 + group, 20, 30 + group] for group in range(4) for _ in range(4)]
SEEDS = list(range(len(PROMPTS)))
SHORT = SamplingParams(max_new_tokens=12, min_new_tokens=12)
LONG = SamplingParams(max_new_tokens=400, min_new_tokens=400)


@dataclass(frozen=True, slots=True)
class PlantedPlan(Plan):
    """Servers whose workers do wrong what the folder of faults tells them to."""

    faults: Path = Path()

    def launch(self, index: int, *, host: str = "127.0.0.1", port: int = 0) -> Launch:
        launch = Plan.launch(self, index, host=host, port=port)
        planted = {"OSTINATO_TEST_FAULTS": str(self.faults), "OSTINATO_TEST_SERVER": launch.name}
        path = f"{launch.environment['PYTHONPATH']}{os.pathsep}{HERE}"
        return replace(launch, environment={**launch.environment, **planted, "PYTHONPATH": path})


@dataclass(frozen=True)
class Weights:
    files: list[Path]
    manifest: Manifest
    state: str


def load(pool: VllmPool, weights: Weights, **more: Any) -> None:
    pool.load(weights.files, weights.manifest, weights.state, **more)


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_of(server: Server) -> int:
    assert server.process is not None
    return server.process.group


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def web_of(server: Server) -> psutil.Process:
    """The process that answers HTTP: the one child of the leash."""
    (web,) = psutil.Process(group_of(server)).children()
    return web


def core_of(server: Server) -> psutil.Process:
    """vLLM's engine, a process below the one that answers HTTP; with one rank it computes, too."""
    return named(server, "EngineCore")[0]


def named(server: Server, what: str) -> list[psutil.Process]:
    """The processes under a server that go by such a title."""
    below = web_of(server).children(recursive=True)
    return [process for process in below if what in " ".join([process.name(), *process.cmdline()])]


def given(pool: VllmPool, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Completions that each server is asked for from now on."""
    counts: dict[str, int] = {}
    for server in pool.servers:
        chunks = server.remote.chunks

        def counting(body: dict[str, Any], server: Server = server, chunks: Any = chunks) -> Any:
            counts[server.name] = counts.get(server.name, 0) + len(body["seeds"])
            return chunks(body)

        monkeypatch.setattr(server.remote, "chunks", counting)
    return counts


def same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in found] == [c.stop_reason for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
