"""Processes of a pool of two real vLLM servers: killed, hung, drained, orphaned. Nothing is lost or left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.backends.vllm.pool import VllmPool
from engine.backends.vllm.server import Server
from engine.errors import SamplerOutOfSync
from engine.protocol import Completion
from tests.engine.vllm.pools import (
    LONG,
    PROMPTS,
    ROOT,
    SEEDS,
    SHORT,
    Weights,
    core_of,
    given,
    group_of,
    load,
    members,
    same,
    until,
    web_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_kill_of_a_server_in_the_middle_of_a_call_loses_nothing(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = given(loaded, monkeypatch)
    victim = web_of(loaded.servers[0])
    heard: dict[int, list[int]] = {}

    def on_token(index: int, token: int, logprob: float) -> None:
        if not heard:
            victim.kill()
        heard.setdefault(index, []).append(token)

    drawn = loaded.generate(PROMPTS, SEEDS, LONG, on_token)
    same(drawn, expected[400])
    assert [heard[index] for index in range(len(PROMPTS))] == [c.token_ids for c in drawn]  # each told once
    assert asked["server-0"] and sum(asked.values()) > len(PROMPTS)  # it had work, which another did again
    loaded.check("state-0")


def test_a_server_that_died_between_calls_comes_back_with_proven_weights_or_none(
    loaded: VllmPool, weights: list[Weights], expected: dict[int, list[Completion]], tmp_path: Path
) -> None:
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
    server = loaded.servers[1]
    before = server.starts
    core_of(server).kill()  # vLLM's engine, not the process that answers
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0"  # the files are still there
    loaded.check("state-0")

    gone = Weights([tmp_path / weights[0].files[0].name], weights[0].manifest, "state-0b")
    gone.files[0].write_bytes(weights[0].files[0].read_bytes())
    load(loaded, gone)
    gone.files[0].unlink()
    before = server.starts
    web_of(server).kill()
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held is None  # up, with random weights: it must not draw
    answer = asyncio.run_coroutine_threadsafe(_ask(server), loaded._loop).result()
    assert "holds None" in answer
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


async def _ask(server: Server) -> str:
    body = {"state": "state-0b", "prompts": [[5]], "of": [0], "seeds": [0], "params": {}, "every": 1, "adapter": None}
    with pytest.raises(SamplerOutOfSync) as refused:
        async for _ in server.remote.chunks(body):
            pass
    return str(refused.value)


def test_a_hung_server_is_killed_and_its_requests_go_elsewhere(
    loaded: VllmPool, expected: dict[int, list[Completion]]
) -> None:
    server = loaded.servers[0]
    before, victim = server.starts, web_of(server)
    victim.send_signal(signal.SIGSTOP)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    until(lambda: server.starts > before and server.phase == "up")


def test_a_server_that_drew_and_ended_before_the_check_is_not_trusted(loaded: VllmPool) -> None:
    loaded.generate(PROMPTS, SEEDS, SHORT)
    server = loaded.servers[1]
    victim = web_of(server)
    victim.kill()
    until(lambda: server.phase != "up" or not server.held)
    with pytest.raises(SamplerOutOfSync, match="server-1"):
        loaded.check("state-0")


def test_no_server_outlives_a_parent_that_is_killed(tmp_path: Path, weights: list[Weights]) -> None:
    program = f"""
import dataclasses, json, time
from pathlib import Path
from engine.backends.vllm.opening import open_pool
from engine.backends.vllm.runtime import EngineOptions
from engine.sampler_spec import VllmSpec
options = EngineOptions(dtype="float32", max_context=512, vocab_size=259, kv_cache_bytes=128 << 20)
pool = open_pool(VllmSpec(servers=1), Path({str(weights[0].files[0].parent)!r}), options)
print(pool.servers[0].process.group, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    group = json.loads(parent.stdout.readline())
    assert len(members(group)) >= 3  # the leash, the web process, the engine
    parent.kill()
    parent.communicate()
    until(lambda: not members(group), seconds=30)


def test_kill_of_the_engine_in_the_middle_of_a_call_loses_nothing(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that answers lives on for a while: what it says of its dead engine must not be believed."""
    asked = given(loaded, monkeypatch)
    server = loaded.servers[0]
    before, victim, heard = server.starts, core_of(server), list[int]()

    def on_token(index: int, token: int, logprob: float) -> None:
        if not heard:
            victim.kill()
        heard.append(token)

    same(loaded.generate(PROMPTS, SEEDS, LONG, on_token), expected[400])
    assert sum(asked.values()) > len(PROMPTS)
    loaded.check("state-0")
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0"
    loaded.check("state-0")


def test_an_engine_that_is_killed_while_nobody_calls_is_replaced_all_the_same(loaded: VllmPool) -> None:
    server = loaded.servers[1]
    before, group = server.starts, group_of(server)
    core_of(server).kill()
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0" and not members(group)
    loaded.check("state-0")


def test_an_engine_that_is_killed_in_a_load_leaves_it_to_the_others(loaded: VllmPool, weights: list[Weights]) -> None:
    one, two = loaded.servers
    before, victim = two.starts, core_of(two)
    victim.send_signal(signal.SIGSTOP)
    loading = threading.Thread(target=load, args=(loaded, weights[1]))
    loading.start()
    until(lambda: one.held == "state-1")
    victim.kill()
    loading.join(timeout=60)
    assert not loading.is_alive() and one.held == "state-1"
    until(lambda: two.starts > before and two.phase == "up")
    assert two.held == "state-1"
    loaded.check("state-1", full=True)


def test_a_server_that_says_it_is_broken_is_another_process_before_it_draws_again(
    loaded: VllmPool, weights: list[Weights], expected: dict[int, list[Completion]], faults: Path
) -> None:
    server = loaded.servers[1]
    before, group = server.starts, group_of(server)
    (faults / "server-1.broken").touch()
    with pytest.raises(SamplerOutOfSync, match="server-1"):
        load(loaded, weights[1])
    assert server.held is None and not members(group)
    (faults / "server-1.broken").unlink()
    load(loaded, weights[0])
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0"
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0", full=True)


def test_a_server_that_breaks_while_it_comes_back_is_not_up(loaded: VllmPool, faults: Path) -> None:
    server = loaded.servers[0]
    (faults / "server-0.broken").touch()
    web_of(server).kill()
    until(lambda: server.failures > 0)
    assert "broke while it took weights" in server.error and server.phase != "up"
    (faults / "server-0.broken").unlink()
    until(lambda: server.phase == "up")
    assert server.held == "state-0"
    loaded.check("state-0")


def test_a_draining_server_finishes_what_it_has_and_ends(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = given(loaded, monkeypatch)
    server = loaded.servers[1]
    assert server.process is not None
    group = server.process.group
    draining: list[threading.Thread] = []

    def on_token(index: int, token: int, logprob: float) -> None:
        if not draining and len(asked) == 2:
            draining.append(threading.Thread(target=loaded.drain, args=(server.name,)))
            draining[0].start()

    same(loaded.generate(PROMPTS, SEEDS, LONG, on_token), expected[400])
    assert sum(asked.values()) == len(PROMPTS)  # nothing was drawn twice
    assert draining[0].is_alive() and members(group)  # what it drew must be proven first
    loaded.check("state-0")
    draining[0].join(timeout=60)
    assert not members(group) and server.phase == "closed"
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
