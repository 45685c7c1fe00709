"""A pool of two real vLLM servers: equal draws whoever draws, faults of processes and weights, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.backends.tiny import build_tiny_model
from engine.backends.vllm.launching import Plan
from engine.backends.vllm.manifest import manifest_of_files
from engine.backends.vllm.opening import open_pool, pool_of
from engine.backends.vllm.pool import VllmPool
from engine.backends.vllm.runtime import EngineOptions, Manifest
from engine.backends.vllm.server import Launch, Server
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams
from engine.sampler_spec import VllmSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HERE = Path(__file__).parent
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
class _PlantedPlan(Plan):
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


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Two models of one architecture."""
    made = []
    for seed in (0, 1):
        folder = build_tiny_model(tmp_path_factory.mktemp("weights") / f"tiny-{seed}", seed=seed)
        files = sorted(folder.glob("*.safetensors"))
        made.append(Weights(files, manifest_of_files(files), f"state-{seed}"))
    return made


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, weights: list[Weights], faults: Path) -> Iterator[VllmPool]:
    spec = VllmSpec(servers=2, answer_seconds=15, start_seconds=300)
    config, folder = weights[0].files[0].parent, tmp_path_factory.mktemp("pool")
    opened = pool_of(_PlantedPlan(spec, OPTIONS, config, folder, "a" * 32, faults))
    groups = [server.process.group for server in opened.servers if server.process]
    yield opened
    groups += [server.process.group for server in opened.servers if server.process]
    opened.close()
    assert not [group for group in groups if _alive(group)]


@pytest.fixture
def loaded(pool: VllmPool, weights: list[Weights]) -> VllmPool:
    """Both servers up, with weights 0."""
    _until(lambda: all(server.phase == "up" for server in pool.servers))
    _load(pool, weights[0])
    assert [server.held for server in pool.servers] == ["state-0", "state-0"]
    return pool


@pytest.fixture(scope="module")
def expected(pool: VllmPool, weights: list[Weights]) -> dict[int, list[Completion]]:
    """What one server alone draws, by max_new_tokens."""
    _load(pool, weights[0])
    two = pool.servers[1]
    two.held = None
    found = {params.max_new_tokens: pool.generate(PROMPTS, SEEDS, params) for params in (SHORT, LONG)}
    pool.check("state-0")
    return found


def _load(pool: VllmPool, weights: Weights, **more: Any) -> None:
    pool.load(weights.files, weights.manifest, weights.state, **more)


def _until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _web(server: Server) -> psutil.Process:
    """The process that answers HTTP: the one child of the leash."""
    assert server.process is not None
    (web,) = psutil.Process(server.process.group).children()
    return web


def _given(pool: VllmPool, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Completions that each server is asked for from now on."""
    counts: dict[str, int] = {}
    for server in pool.servers:
        chunks = server.remote.chunks

        def counting(body: dict[str, Any], server: Server = server, chunks: Any = chunks) -> Any:
            counts[server.name] = counts.get(server.name, 0) + len(body["seeds"])
            return chunks(body)

        monkeypatch.setattr(server.remote, "chunks", counting)
    return counts


def _same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in found] == [c.stop_reason for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# -- draws --------------------------------------------------------------------------------------------------------


def test_two_servers_share_a_call_and_draw_what_one_draws(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _given(loaded, monkeypatch)
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert sorted(given) == ["server-0", "server-1"] and sum(given.values()) == len(PROMPTS)
    assert max(given.values()) <= 10  # 16 pieces of 15 tokens, at most a quarter above the mean of 8
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
    _load(loaded, weights[0])  # resets the prefix cache, which completions that still ran would keep busy


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
            _load(loaded, weights[1])
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
    _load(loaded, weights[1])
    other = loaded.generate(PROMPTS, SEEDS, SHORT)
    assert [c.token_ids for c in other] != [c.token_ids for c in expected[12]]
    _load(loaded, weights[0], full=True)
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


# -- processes ----------------------------------------------------------------------------------------------------


def test_kill_of_a_server_in_the_middle_of_a_call_loses_nothing(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _given(loaded, monkeypatch)
    victim = _web(loaded.servers[0])
    heard: dict[int, list[int]] = {}

    def on_token(index: int, token: int, logprob: float) -> None:
        if not heard:
            victim.kill()
        heard.setdefault(index, []).append(token)

    drawn = loaded.generate(PROMPTS, SEEDS, LONG, on_token)
    _same(drawn, expected[400])
    assert [heard[index] for index in range(len(PROMPTS))] == [c.token_ids for c in drawn]  # each told once
    assert given["server-0"] and sum(given.values()) > len(PROMPTS)  # it had work, which another did again
    loaded.check("state-0")


def test_a_server_that_died_between_calls_comes_back_with_proven_weights_or_none(
    loaded: VllmPool, weights: list[Weights], expected: dict[int, list[Completion]], tmp_path: Path
) -> None:
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
    server = loaded.servers[1]
    before = server.starts
    core = [p for p in _web(server).children(recursive=True) if "EngineCore" in p.name() or "EngineCore" in _title(p)]
    core[0].kill()  # vLLM's engine, not the process that answers
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    _until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0"  # the files are still there
    loaded.check("state-0")

    gone = Weights([tmp_path / weights[0].files[0].name], weights[0].manifest, "state-0b")
    gone.files[0].write_bytes(weights[0].files[0].read_bytes())
    _load(loaded, gone)
    gone.files[0].unlink()
    before = server.starts
    _web(server).kill()
    _until(lambda: server.starts > before and server.phase == "up")
    assert server.held is None  # up, with random weights: it must not draw
    answer = asyncio.run_coroutine_threadsafe(_ask(server), loaded._loop).result()
    assert "holds None" in answer
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


async def _ask(server: Server) -> str:
    body = {"state": "state-0b", "prompts": [[5]], "of": [0], "seeds": [0], "params": {}, "every": 1, "adapter": None}
    with pytest.raises(SamplerOutOfSync) as refused:
        async for _ in server.remote.chunks(body):
            pass
    return str(refused.value)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def test_a_hung_server_is_killed_and_its_requests_go_elsewhere(
    loaded: VllmPool, expected: dict[int, list[Completion]]
) -> None:
    server = loaded.servers[0]
    before, victim = server.starts, _web(server)
    victim.send_signal(signal.SIGSTOP)
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    _until(lambda: server.starts > before and server.phase == "up")


def test_a_server_that_drew_and_ended_before_the_check_is_not_trusted(loaded: VllmPool) -> None:
    loaded.generate(PROMPTS, SEEDS, SHORT)
    server = loaded.servers[1]
    victim = _web(server)
    victim.kill()
    _until(lambda: server.phase != "up" or not server.held)
    with pytest.raises(SamplerOutOfSync, match="server-1"):
        loaded.check("state-0")


def test_every_route_but_health_wants_the_token(pool: VllmPool) -> None:
    import httpx

    _until(lambda: all(server.phase == "up" for server in pool.servers))
    url = pool.servers[0].remote.url
    assert httpx.get(f"{url}/health").status_code == 200
    for route in ("/metrics", "/v1/models", "/collective_rpc", "/ostinato/hello", "/ostinato/rpc", "/docs", "/sleep"):
        for headers in ({}, {"authorization": "Bearer " + "b" * 32}):
            assert httpx.get(url + route, headers=headers).status_code == 401, route
            assert httpx.post(url + route, headers=headers).status_code == 401, route


def test_a_draining_server_finishes_what_it_has_and_ends(
    loaded: VllmPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _given(loaded, monkeypatch)
    server = loaded.servers[1]
    assert server.process is not None
    group = server.process.group
    draining: list[threading.Thread] = []

    def on_token(index: int, token: int, logprob: float) -> None:
        if not draining and len(given) == 2:
            draining.append(threading.Thread(target=loaded.drain, args=(server.name,)))
            draining[0].start()

    _same(loaded.generate(PROMPTS, SEEDS, LONG, on_token), expected[400])
    assert sum(given.values()) == len(PROMPTS)  # nothing was drawn twice
    assert draining[0].is_alive() and _alive(group)  # what it drew must be proven first
    loaded.check("state-0")
    draining[0].join(timeout=60)
    assert not _alive(group) and server.phase == "closed"
    _same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


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
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    group = json.loads(parent.stdout.readline())
    assert len(_alive(group)) >= 3  # the leash, the web process, the engine
    parent.kill()
    parent.communicate()
    _until(lambda: not _alive(group), seconds=30)


def test_a_server_that_the_command_runs_elsewhere_serves_a_pool_by_its_url(
    tmp_path: Path, weights: list[Weights], expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights[0].files[0].parent
    monkeypatch.setenv("OSTINATO_SAMPLER_TOKEN", "c" * 32)
    sets = ["sampler.kind=vllm", "sampler.max_context=512", "sampler.kv_cache_gib=0.125", "compute_dtype=float32"]
    command = ["-m", "flows.cli.main", "engine", "sampler", f"--model={model}", "--port=0"]
    command += [f"--set={entry}" for entry in sets]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "TMPDIR": str(tmp_path)}
    node = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert node.stdout is not None
        url = node.stdout.readline().split()[-1]
        spec = VllmSpec(urls=(url,), transport="checkpoint", sync_folder=str(tmp_path), start_seconds=60)
        options = replace(OPTIONS, extension="engine.backends.vllm.extension.Extension")
        with pytest.raises(WorkerDied, match="dtype"):
            open_pool(spec, model, replace(options, dtype="bfloat16"))
        pool = open_pool(spec, model, options)
        _load(pool, weights[0])
        _same(pool.generate(PROMPTS, SEEDS, SHORT), expected[12])
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
