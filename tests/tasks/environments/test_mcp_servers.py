"""Tests of environments with the tools of an MCP server, over stdio and HTTP: what the model is shown, what it is told
about a refused call, and an episode whose server fails."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import JsonValue

from engine.text.threads import StringThread
from tasks.environments.base import Environment, EnvironmentFactory, Grades
from tasks.environments.episodes import Episode, EpisodeLimits, EpisodePlayer
from tasks.environments.mcp_servers import MCPEnvironment, StdioServer, _all_tools, _Connection
from tasks.environments.runner import EnvironmentRunner
from tasks.environments.tools import ToolFailed
from tests.fixtures import servers
from tests.fixtures.tool_models import MODELS, ToolModel
from tests.tasks.environments.test_tools import ScriptedAnswers

MCPError = pytest.importorskip("mcp").MCPError

PROGRAM = str(Path(servers.__path__[0]) / "mcp_server.py")
# the mcp package passes on few variables of the environment
FOUND_HERE = {"PYTHONPATH": os.pathsep.join(sys.path)}
STDIO = StdioServer(command=sys.executable, args=(PROGRAM,), env=FOUND_HERE)
MODEL: ToolModel = MODELS["qwen2.5"]


class Desk(MCPEnvironment):
    def __init__(self, server: StdioServer | str) -> None:
        self.server = server

    async def finish(self, thread: StringThread) -> Grades | None:
        return float("7" in thread.last_content())


class DeskFactory(EnvironmentFactory):
    def __init__(self, server: StdioServer | str) -> None:
        self.server = server
        self.created: list[Desk] = []

    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        self.created.append(Desk(self.server))
        return self.created[-1]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def play(server: StdioServer | str, *answers: str) -> tuple[Episode, list[str], DeskFactory]:
    row = {"id": "p", "index": 0, "thread": StringThread([("user", "1+1?")]).to_json()}
    factory, renderer = DeskFactory(server), MODEL.renderer()
    episode = Episode(row, 0, environment=EnvironmentRunner(factory, seed=0, seconds=60))
    script = ScriptedAnswers(renderer, *answers)
    limits = EpisodeLimits(turns=4, tokens=None, seconds=None, new_tokens=3)
    player = EpisodePlayer(renderer, limits, concurrency=1, name_row=lambda index: f"row {index}")
    asyncio.run(player.play([episode], script))
    return episode, script.prompts, factory


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, PROGRAM, str(port)])
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_servers_tools_are_called(transport: str, request: pytest.FixtureRequest) -> None:
    server = STDIO if transport == "stdio" else request.getfixturevalue("http_server")
    answers = [call("add", a=2), call("refuse", word="seven"), call("add", a="two"), "It is 7.<|im_end|>"]
    episode, prompts, factory = play(server, *answers)
    assert (episode.ending, episode.reason, episode.current_segment.grades) == ("environment", None, {3: 1.0})
    assert '"function": {"name": "add", "description": "Adds two numbers.", "parameters": {' in prompts[0]
    results = [prompt.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0] for prompt in prompts[1:]]
    assert results[0] == "3"
    assert results[1].startswith("error: ") and "seven is not allowed" in results[1]
    assert results[2].startswith("error: ") and "valid integer" in results[2]
    assert len(factory.created) == 1


def test_a_server_that_crashes_twice_masks_the_episode() -> None:
    episode, _, factory = play(STDIO, call("crash"), "It is 7.<|im_end|>")
    assert episode.ending == "masked" and len(factory.created) == 2
    assert episode.reason is not None and "failed in a call of crash" in episode.reason


@pytest.mark.parametrize("code", [-32602, -32603])
async def test_an_internal_error_is_a_failure_of_the_server(code: int) -> None:
    """JSON-RPC 2.0, section 5.1: -32602 is "Invalid params", which the assistant gave, and -32603 "Internal error"."""

    async def call_tool(name: str, arguments: dict[str, Any]) -> None:
        raise MCPError(code, "broken")

    connection = _Connection(STDIO)
    connection._client = SimpleNamespace(call_tool=call_tool)
    expected = RuntimeError if code == -32602 else ToolFailed
    with pytest.raises(expected, match="broken") as caught:
        await connection.call("add", {})
    assert caught.type is expected


@pytest.mark.parametrize("pages", [100, 101])
async def test_a_list_of_tools_is_read_to_its_end_or_refused(pages: int) -> None:
    async def list_tools(cursor: int | None) -> SimpleNamespace:
        page = cursor or 0
        return SimpleNamespace(tools=[page], next_cursor=page + 1 if page + 1 < pages else None)

    client = SimpleNamespace(list_tools=list_tools)
    if pages == 100:
        assert await _all_tools(client) == list(range(100))
    else:
        with pytest.raises(ToolFailed, match=r"does not end after 100 pages \(100 tools\); serve fewer tools"):
            await _all_tools(client)


def test_a_server_that_cannot_be_started_masks_the_episode() -> None:
    episode, _, factory = play(StdioServer(command="/no/such/program"), "never sampled")
    assert episode.ending == "masked" and len(factory.created) == 2
    assert episode.reason is not None and "the MCP server '/no/such/program' cannot be used" in episode.reason


def test_the_process_of_a_server_ends_with_its_episode(tmp_path: Path) -> None:
    # the server writes the number of its process before it serves
    program = tmp_path / "server.py"
    pid_file = tmp_path / "pid"
    lines = [
        "import os, runpy",
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))",
        f"runpy.run_path({PROGRAM!r}, run_name='__main__')",
    ]
    program.write_text("\n".join(lines))
    server = StdioServer(command=sys.executable, args=(str(program),), env=FOUND_HERE)
    episode, _, _ = play(server, "It is 7.<|im_end|>")
    assert episode.ending == "environment"
    pid = int(pid_file.read_text())
    assert not Path(f"/proc/{pid}").exists()
