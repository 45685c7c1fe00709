"""Processes of a pool of two real vLLM replicas: killed, hung, drained, orphaned. Nothing is lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.errors import SamplerOutOfSync
from engine.protocol import Completion
from tests.engine.vllm.pools import (
    LONG,
    PROMPTS,
    ROOT,
    SEEDS,
    SHORT,
    WeightFiles,
    alive,
    call,
    core_of,
    count_requests,
    is_alive,
    load,
    process_of,
    processes_of,
    same,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_kill_of_a_replica_in_the_middle_of_a_call_loses_nothing(
    loaded: ReplicaPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request_counts = count_requests(monkeypatch)
    victim = process_of(loaded.replicas[0])
    heard: dict[int, list[int]] = {}

    def on_token(index: int, token: int, logprob: float) -> None:
        if not heard:
            victim.kill()
        heard.setdefault(index, []).append(token)

    drawn = loaded.generate(PROMPTS, SEEDS, LONG, on_token)
    same(drawn, expected[400])
    assert [heard[index] for index in range(len(PROMPTS))] == [c.token_ids for c in drawn]  # each told once
    assert request_counts["replica-0"] and sum(request_counts.values()) > len(PROMPTS)  # another repeated its work
    loaded.check("state-0")


def test_a_replica_that_died_between_calls_comes_back_with_proven_weights_or_none(
    loaded: ReplicaPool, weights: list[WeightFiles], expected: dict[int, list[Completion]], tmp_path: Path
) -> None:
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
    replica = loaded.replicas[1]
    before = replica.starts
    core_of(replica).kill()  # vLLM's engine, not the process that answers
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == "state-0"  # the files are still there
    loaded.check("state-0")

    gone = WeightFiles([tmp_path / weights[0].files[0].name], weights[0].manifest, "state-0b")
    gone.files[0].write_bytes(weights[0].files[0].read_bytes())
    load(loaded, gone)
    gone.files[0].unlink()
    before = replica.starts
    process_of(replica).kill()
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state is None  # up, with random weights: it must not draw
    with pytest.raises(SamplerOutOfSync, match="holds None"):
        call(loaded, replica, "score", "state-0b", [[5, 6]], None)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])


def test_a_hung_replica_is_killed_and_its_requests_go_elsewhere(
    loaded: ReplicaPool, expected: dict[int, list[Completion]]
) -> None:
    replica = loaded.replicas[0]
    before, victim = replica.starts, process_of(replica)
    victim.send_signal(signal.SIGSTOP)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert not is_alive(victim)
    until(lambda: replica.starts > before and replica.phase == "up")


def test_a_replica_that_drew_and_ended_before_the_check_is_not_trusted(loaded: ReplicaPool) -> None:
    loaded.generate(PROMPTS, SEEDS, SHORT)
    replica = loaded.replicas[1]
    victim = process_of(replica)
    victim.kill()
    until(lambda: replica.phase != "up" or not replica.loaded_state)
    with pytest.raises(SamplerOutOfSync, match="replica-1"):
        loaded.check("state-0")


def test_no_replica_outlives_a_parent_that_is_killed(tmp_path: Path, weights: list[WeightFiles]) -> None:
    program = f"""
import time
from pathlib import Path
from engine.backends.vllm.backend import open_pool
from engine.backends.vllm.architecture import EngineOptions
from engine.specs.engine import VllmSpec
options = EngineOptions(dtype="float32", max_context=512, vocab_size=259, kv_cache_bytes=128 << 20)
pool = open_pool(VllmSpec(replicas=1), Path({str(weights[0].files[0].parent)!r}), options)
print(pool.replicas[0].actor.process.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    actor = psutil.Process(int(parent.stdout.readline()))
    processes = [actor, *actor.children(recursive=True)]
    assert len(processes) >= 2  # the actor, vLLM's engine
    parent.kill()
    parent.communicate()
    until(lambda: not alive(processes), seconds=60)


def test_kill_of_the_engine_in_the_middle_of_a_call_loses_nothing(
    loaded: ReplicaPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that answers lives on for a while: what it says of its dead engine must not be believed."""
    request_counts = count_requests(monkeypatch)
    replica = loaded.replicas[0]
    before, victim, heard = replica.starts, core_of(replica), list[int]()

    def on_token(index: int, token: int, logprob: float) -> None:
        if not heard:
            victim.kill()
        heard.append(token)

    same(loaded.generate(PROMPTS, SEEDS, LONG, on_token), expected[400])
    assert sum(request_counts.values()) > len(PROMPTS)
    loaded.check("state-0")
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == "state-0"
    loaded.check("state-0")


def test_an_engine_killed_between_calls_is_replaced(loaded: ReplicaPool) -> None:
    replica = loaded.replicas[1]
    before, processes = replica.starts, processes_of(replica)
    core_of(replica).kill()
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == "state-0" and not alive(processes)
    loaded.check("state-0")


def test_a_load_survives_the_death_of_one_engine(loaded: ReplicaPool, weights: list[WeightFiles]) -> None:
    first, second = loaded.replicas
    before, victim = second.starts, core_of(second)
    victim.send_signal(signal.SIGSTOP)
    loading = threading.Thread(target=load, args=(loaded, weights[1]))
    loading.start()
    until(lambda: first.loaded_state == "state-1")
    victim.kill()
    loading.join(timeout=60)
    assert not loading.is_alive() and first.loaded_state == "state-1"
    until(lambda: second.starts > before and second.phase == "up")
    assert second.loaded_state == "state-1"
    loaded.check("state-1", full=True)


def test_a_replica_that_says_it_is_broken_is_another_process_before_it_draws_again(
    loaded: ReplicaPool, weights: list[WeightFiles], expected: dict[int, list[Completion]], faults: Path
) -> None:
    replica = loaded.replicas[1]
    before, processes = replica.starts, processes_of(replica)
    (faults / "replica-1.broken").touch()
    with pytest.raises(SamplerOutOfSync, match="replica-1"):
        load(loaded, weights[1])
    assert replica.loaded_state is None and not alive(processes)
    (faults / "replica-1.broken").unlink()
    load(loaded, weights[0])
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == "state-0"
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0", full=True)


def test_a_replica_that_breaks_while_it_comes_back_is_not_up(loaded: ReplicaPool, faults: Path) -> None:
    replica = loaded.replicas[0]
    (faults / "replica-0.broken").touch()
    process_of(replica).kill()
    until(lambda: replica.failures > 0)
    assert "broke while it loaded weights" in replica.error and replica.phase != "up"
    (faults / "replica-0.broken").unlink()
    until(lambda: replica.phase == "up")
    assert replica.loaded_state == "state-0"
    loaded.check("state-0")


def test_a_leaving_replica_finishes_a_call_that_cannot_be_interrupted_and_ends(
    loaded: ReplicaPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request_counts = count_requests(monkeypatch)
    replica = loaded.replicas[1]
    processes = processes_of(replica)

    def on_token(index: int, token: int, logprob: float) -> None:
        if not replica.leaving and len(request_counts) == 2:
            loaded.scale(1)

    same(loaded.generate(PROMPTS, SEEDS, LONG, on_token), expected[400])
    assert sum(request_counts.values()) == len(PROMPTS)  # nothing was drawn twice
    loaded.check("state-0")
    until(lambda: replica not in loaded.replicas)
    assert not alive(processes) and replica.phase == "closed"
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    loaded.check("state-0")
