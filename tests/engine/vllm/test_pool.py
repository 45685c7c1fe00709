"""A pool of two real vLLM servers: equal draws whoever draws, weights that are proven, its routes, and servers that
another command runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from engine.backends.vllm.opening import open_pool
from engine.backends.vllm.pool import VllmPool
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.protocol import Completion
from engine.sampler_spec import VllmSpec
from tests.engine.vllm.pools import LONG, OPTIONS, PROMPTS, ROOT, SEEDS, SHORT, Weights, given, load, same, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# -- draws --------------------------------------------------------------------------------------------------------


def test_two_servers_share_a_call_and_draw_what_one_draws(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = given(loaded, monkeypatch)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert sorted(asked) == ["server-0", "server-1"] and sum(asked.values()) == len(PROMPTS)
    assert max(asked.values()) <= 10  # 16 pieces of 15 tokens, at most a quarter above the mean of 8
    loaded.check("state-0")


def test_tokens_are_told_in_the_callers_thread_and_are_those_returned(loaded: VllmPool) -> None:
    heard: dict[int, list[tuple[int, float]]] = {}
    threads = set()

    def on_token(index: int, token: int, logprob: float) -> None:
        heard.setdefault(index, []).append((token, logprob))
        threads.add(threading.current_thread())

    drawn = loaded.generate(PROMPTS, SEEDS, SHORT, on_token)
    assert threads == {threading.current_thread()}
    assert heard == {
        index: list(zip(completion.token_ids, completion.logprobs, strict=True))
        for index, completion in enumerate(drawn)
    }


def test_what_a_listener_raises_ends_the_call_on_the_servers(loaded: VllmPool, weights: list[Weights]) -> None:
    class Enough(Exception):
        pass

    def on_token(index: int, token: int, logprob: float) -> None:
        raise Enough

    with pytest.raises(Enough):
        loaded.generate(PROMPTS, SEEDS, LONG, on_token)
    assert [server.outstanding for server in loaded.servers] == [0, 0]
    load(loaded, weights[0])  # resets the prefix cache, which completions that still ran would keep busy


def test_scores_are_the_logprobs_of_the_draw(loaded: VllmPool) -> None:
    drawn = loaded.generate(PROMPTS[:3], SEEDS[:3], SHORT)
    scored = loaded.score([p + c.token_ids for p, c in zip(PROMPTS[:3], drawn, strict=True)])
    for prompt, completion, logprobs in zip(PROMPTS[:3], drawn, scored, strict=True):
        # min_new_tokens holds the end back: its probability, e^-5.6 at most, is missing from what was scored
        assert logprobs[len(prompt) - 1 :] == pytest.approx(completion.logprobs, abs=0.01)


# -- weights ------------------------------------------------------------------------------------------------------


def test_an_update_that_one_of_two_servers_only_acknowledges_is_refused(
    loaded: VllmPool, weights: list[Weights], faults: Path
) -> None:
    (faults / "server-1").touch()
    try:
        with pytest.raises(SamplerOutOfSync, match="server-1"):
            load(loaded, weights[1])
    finally:
        (faults / "server-1").unlink()
    with pytest.raises(SamplerOutOfSync):
        loaded.generate(PROMPTS, SEEDS, SHORT)


def test_a_server_whose_weights_change_later_is_named_by_the_check(loaded: VllmPool, weights: list[Weights]) -> None:
    loaded.check("state-0")
    asyncio.run_coroutine_threadsafe(loaded.servers[1].remote.rpc("ostinato_check_and_spoil"), loaded._loop).result()
    with pytest.raises(SamplerOutOfSync, match="server-1"):
        loaded.check("state-0")
    with pytest.raises(SamplerOutOfSync):
        loaded.check("state-1")


def test_other_weights_draw_other_tokens_and_the_first_ones_come_back(
    loaded: VllmPool, weights: list[Weights], expected: dict[int, list[Completion]]
) -> None:
    load(loaded, weights[1])
    other = loaded.generate(PROMPTS, SEEDS, SHORT)
    assert [c.token_ids for c in other] != [c.token_ids for c in expected[12]]
    load(loaded, weights[0], full=True)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


# -- routes and nodes ------------------------------------------------------------------------------------------------


def test_every_route_but_health_wants_the_token(pool: VllmPool) -> None:
    until(lambda: all(server.phase == "up" for server in pool.servers))
    url = pool.servers[0].remote.url
    assert httpx.get(f"{url}/health").status_code == 200
    for route in ("/metrics", "/v1/models", "/collective_rpc", "/ostinato/hello", "/ostinato/rpc", "/docs", "/sleep"):
        for headers in ({}, {"authorization": "Bearer " + "b" * 32}):
            assert httpx.get(url + route, headers=headers).status_code == 401, route
            assert httpx.post(url + route, headers=headers).status_code == 401, route


def test_a_server_that_the_command_runs_elsewhere_serves_a_pool_by_its_url(
    tmp_path: Path, weights: list[Weights], expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights[0].files[0].parent
    monkeypatch.setenv("OSTINATO_SAMPLER_TOKEN", "c" * 32)
    sets = ["sampler.kind=vllm", "sampler.max_context=512", "sampler.kv_cache_gib=0.125", "compute_dtype=float32"]
    command = ["-m", "flows.cli.main", "engine", "sampler", f"--model={model}", "--port=0"]
    command += [f"--set={entry}" for entry in sets]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    node = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert node.stdout is not None
        url = node.stdout.readline().split()[-1]
        spec = VllmSpec(urls=(url,), transport="checkpoint", sync_folder=str(tmp_path), start_seconds=60)
        options = replace(OPTIONS, extension="engine.backends.vllm.extension.Extension")
        with pytest.raises(WorkerDied, match="dtype"):
            open_pool(spec, model, replace(options, dtype="bfloat16"))
        pool = open_pool(spec, model, options)
        load(pool, weights[0])
        same(pool.generate(PROMPTS, SEEDS, SHORT), expected[12])
        pool.check("state-0")
        pool.close()
        group = _children(node.pid)
    finally:
        node.send_signal(signal.SIGTERM)
        node.communicate(timeout=120)
    assert node.returncode == 0
    assert not [process for process in group if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
