"""The process of an agent: its variables, its reward, and its group, which ends with the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.http.openai.sessions import serving_sessions
from tasks.child_process import GUARDED_COMMAND
from tasks.environments.agents import AgentAttempt, AgentEnding, AgentFailed
from tasks.environments.spec import AgentSpec
from tests.fixtures.waiting import alive, wait_for_text, wait_until

WORKER = """
import os, subprocess, sys
pipe, write_end = os.pipe()
words = [sys.executable, "-c", sys.argv[1], str(pipe), "0", "sh", "-c", "sleep 600 & echo $! $$ >$0; wait", sys.argv[2]]
subprocess.run(words, pass_fds=(pipe,), start_new_session=True)
"""
"""Runs a shell with a child that sleeps, and notes their ids."""


def test_all_processes_of_an_agent_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "ids"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, GUARDED_COMMAND, str(note)])
    pids = [int(word) for word in wait_for_text(note).split()]
    assert len(pids) == 2 and all(map(alive, pids))
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not any(map(alive, pids)))


def run_guarded(*words: str, memory: int = 0) -> subprocess.CompletedProcess[str]:
    pipe, write_end = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-c", GUARDED_COMMAND, str(pipe), str(memory), *words], pass_fds=(pipe,),
            start_new_session=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(pipe)
        os.close(write_end)


def test_a_command_has_no_child_that_it_did_not_start() -> None:
    """Else a program that waits for all its children would never end."""
    program = "import os\ntry: os.wait()\nexcept ChildProcessError: print('no child')"
    assert run_guarded(sys.executable, "-c", program).stdout == "no child\n"


def test_the_memory_of_a_command_is_limited() -> None:
    done = run_guarded(sys.executable, "-c", "print(len(bytearray(1 << 30)))", memory=512 << 20)
    assert done.returncode == 1 and "MemoryError" in done.stderr


def test_a_program_that_is_not_there_is_named() -> None:
    done = run_guarded("no-such-program")
    assert done.returncode == 1 and "no-such-program cannot be run: " in done.stderr


# -- rewards and variables ---------------------------------------------------------------------------------------


async def run_agent(url: str = "http://x", *, posted: Any = None, **agent: Any) -> tuple[AgentEnding, float | None]:
    """Runs an agent that calls no model."""
    session: Any = SimpleNamespace(
        id="s", served=SimpleNamespace(model_id="m"), reward=posted, failure=None, seconds_waited=0, limit_reached=None
    )
    return await AgentAttempt(AgentSpec(**agent), session, url, seconds=60, memory_mib=None).run({})


async def numpy_reward(task: dict[str, Any], client: Any) -> Any:
    return np.float32(0.5)


async def test_a_reward_may_be_a_number_of_numpy() -> None:
    assert await run_agent(path=f"{__name__}:numpy_reward") == ("agent", 0.5)


@pytest.mark.parametrize("where", ["posted", "printed"])
@pytest.mark.parametrize("reward", [10**400, float("nan"), 1e300], ids=["huge", "nan", "large"])
async def test_a_reward_beyond_the_range_fails_the_attempt(reward: float, where: str) -> None:
    program, posted = "", reward
    if where == "printed":
        program, posted = f"print('{json.dumps(reward)}')", None
    with pytest.raises(AgentFailed, match="the agent's reward cannot be used: "):
        await run_agent(command=(sys.executable, "-c", program), posted=posted)


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
async def test_the_calls_of_an_agent_go_through_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an agent behind a proxy, here of a port at which nothing listens, would reach no model."""
    for variable in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv(name, "internal.example")
    program = """
import os, urllib.request, httpx
assert httpx.get(os.environ["OPENAI_BASE_URL"] + "/models").status_code == 404
print(urllib.request.proxy_bypass("internal.example") - urllib.request.proxy_bypass("other.example"))
"""
    async with serving_sessions() as server:
        url = f"{server.address}/v1/sessions/s"
        assert await run_agent(url, command=(sys.executable, "-c", program)) == ("agent", 1.0)
