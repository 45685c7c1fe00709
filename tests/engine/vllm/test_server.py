"""Supervision of server processes, spreading of work, and the front, with stand-ins for vLLM: quick, on any machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.backends.vllm.drawing import Drawing
from engine.backends.vllm.launching import flags, free_port
from engine.backends.vllm.remote import Remote
from engine.backends.vllm.routing import Work, affinity
from engine.backends.vllm.server import Launch, Server
from engine.backends.vllm.spreading import FAILURES, spread
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM starts its engine
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"boot": "x"}')
    def log_message(self, *args): pass
print("started", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def launch_of(folder: Path, program: str = STAND_IN) -> Launch:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return Launch("server-0", [sys.executable, "-c", program, str(port)], port, environment, folder)


async def nothing(server: Server) -> None:
    return None


@contextlib.asynccontextmanager
async def kept(
    launch: Launch, on_up: Callable[[Server], Awaitable[None]] = nothing, seconds: float = 60
) -> AsyncIterator[Server]:
    async with httpx.AsyncClient(trust_env=False) as client:
        server = Server(Remote("server-0", launch.url, client, silence=10), launch, on_up, seconds)
        keeping = asyncio.create_task(server.keep())
        try:
            yield server
        finally:
            await server.close()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def members(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_arguments_are_spelled_as_vllms_command_line_reads_them() -> None:
    given = {"max_num_seqs": 4, "enforce_eager": True, "enable_lora": False, "kv_cache_memory_bytes": None}
    lists = {"lora_target_modules": ["q_proj", "o_proj"], "devices": []}
    assert flags(given | {"config": {"a": 1}} | lists) == [
        "--max-num-seqs", "4", "--enforce-eager", "--no-enable-lora", "--config", '{"a": 1}',
        "--lora-target-modules", "q_proj", "o_proj",
    ]  # fmt: skip


# -- processes ----------------------------------------------------------------------------------------------------


def test_a_server_that_ends_is_started_again_and_told_each_time(tmp_path: Path) -> None:
    ups: list[int] = []

    async def on_up(server: Server) -> None:
        assert server.phase == "starting" and server.process is not None
        ups.append(server.process.group)

    async def main() -> None:
        async with kept(launch_of(tmp_path), on_up) as server:
            await until(lambda: server.phase == "up")
            assert server.process is not None
            first = server.process.group
            assert len(members(first)) == 3  # leash, server, what the server started
            psutil.Process(first).children()[0].kill()
            await until(lambda: len(ups) == 2 and server.phase == "up")
            assert not members(first)  # what the killed server had started is gone too
            last = server.process.group
        assert ups == [first, last] and not members(last)

    run(main())


def test_a_failed_start_shows_the_end_of_the_log_and_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(launch_of(tmp_path, "print('no such device'); raise SystemExit(3)")) as server:
            await until(lambda: server.failures >= 2)
            assert "no such device" in server.error and "status 3" in server.error
            assert server.phase in ("down", "starting")

    run(main())


def test_a_server_that_never_gets_healthy_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(launch_of(tmp_path, "import time; time.sleep(600)"), seconds=0.3) as server:
            await until(lambda: server.failures == 1 and server.phase == "down")
            assert "start_seconds" in server.error and server.process is not None
            assert not members(server.process.group)

    run(main())


@pytest.mark.slow
def test_a_hung_server_dies_by_fail_even_when_it_is_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        async with kept(launch_of(tmp_path)) as server:
            await until(lambda: server.phase == "up")
            hung = server.process
            assert hung is not None
            psutil.Process(hung.group).children()[0].send_signal(signal.SIGSTOP)
            server.held = "state"
            await server.fail(hung)
            assert not members(hung.group) and server.held is None
            await until(lambda: server.phase == "up" and server.process is not hung)
            await server.fail(hung)  # a late call that failed with the first start does not end the second
            assert server.phase == "up"

    run(main())


@pytest.mark.parametrize("stopped", [False, True])
def test_the_leash_kills_all_when_its_parent_is_killed(tmp_path: Path, stopped: bool) -> None:
    program = f"""
import subprocess, sys, time
leash = subprocess.Popen([sys.executable, "-m", "engine.backends.vllm.leash", sys.executable, "-c", {STAND_IN!r},
                          {str(free_port())!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
leash.stdout.readline()
print(leash.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert len(members(group)) == 3
    if stopped:
        psutil.Process(group).children()[0].send_signal(signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    run(until(lambda: not members(group)))


# -- spreading ----------------------------------------------------------------------------------------------------


def servers_of(count: int) -> list[Server]:
    client = httpx.AsyncClient()
    made = [Server(Remote(f"server-{n}", "", client, silence=1), None, nothing, 1, phase="up") for n in range(count)]
    for server in made:
        server.held, server.boot = "state", "first"
    return made


WORKS = [Work(affinity([n]), 10) for n in range(24)]


def test_work_of_a_server_that_dies_is_done_again_by_others() -> None:
    servers, did = servers_of(3), dict[int, str]()

    async def send(server: Server, numbers: list[int]) -> None:
        await asyncio.sleep(0)
        if server is servers[0]:
            raise WorkerDied("gone")
        did.update(dict.fromkeys(numbers, server.name))

    async def ready() -> list[Server]:
        return [server for server in servers if server.phase == "up"]

    async def main() -> None:
        who = await spread(WORKS, send, ready)
        assert who == {("server-1", "first"), ("server-2", "first")}

    run(main())
    assert sorted(did) == list(range(24)) and servers[0].phase == "down"
    assert [(server.outstanding, server.needed) for server in servers] == [(0, 0)] * 3


def test_work_of_a_server_that_ends_after_it_was_done_is_done_again() -> None:
    servers, first = servers_of(2), asyncio.Event()
    did: list[tuple[str, list[int]]] = []

    async def send(server: Server, numbers: list[int]) -> None:
        did.append((server.name, numbers))
        if server is servers[0]:
            first.set()
            return
        await first.wait()
        await asyncio.sleep(0.01)  # the first is done by now
        servers[0].boot, servers[0].phase = "", "down"

    async def ready() -> list[Server]:
        return [server for server in servers if server.phase == "up"]

    async def main() -> None:
        assert await spread(WORKS, send, ready) == {("server-1", "first")}

    run(main())
    assert [name for name, _ in did] == ["server-0", "server-1", "server-1"] and did[2][1] == did[0][1]
    assert [(server.outstanding, server.needed) for server in servers] == [(0, 0)] * 2


def test_a_request_that_kills_every_server_fails_the_call() -> None:
    servers, sent = servers_of(2), list[str]()

    async def send(server: Server, numbers: list[int]) -> None:
        sent.append(server.name)
        raise WorkerDied("gone")

    async def ready() -> list[Server]:
        return servers

    with pytest.raises(WorkerDied, match="gone"):
        run(spread(WORKS[:1], send, ready))  # type: ignore[arg-type]
    assert len(sent) == FAILURES + 1


def test_a_refused_request_ends_the_call_and_cancels_the_rest() -> None:
    servers, cancelled = servers_of(2), list[str]()

    async def send(server: Server, numbers: list[int]) -> None:
        if server is servers[0]:
            raise BadSpec("no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(server.name)
            raise

    async def ready() -> list[Server]:
        return servers

    with pytest.raises(BadSpec):
        run(spread(WORKS, send, ready))  # type: ignore[arg-type]
    assert cancelled == ["server-1"]
    assert [(server.outstanding, server.needed) for server in servers] == [(0, 0)] * 2


def test_a_server_with_other_weights_gets_nothing_more() -> None:
    servers = servers_of(2)

    async def send(server: Server, numbers: list[int]) -> None:
        if server is servers[1]:
            raise SamplerOutOfSync("it holds None")

    async def ready() -> list[Server]:
        return [server for server in servers if server.held]

    run(spread(WORKS, send, ready))  # type: ignore[arg-type]
    assert servers[1].held is None and servers[1].phase == "up"


# -- completions --------------------------------------------------------------------------------------------------


def test_a_redrawn_completion_is_told_once() -> None:
    drawing, told = Drawing(), list[int]()
    told += [token for token, _ in drawing.take([1, 2, 3], [-1.0, -1.0, -1.0], None)]
    drawing.begin()
    told += [token for token, _ in drawing.take([1, 2], [-1.0, -1.0], None)]
    told += [token for token, _ in drawing.take([3, 4], [-1.0, -2.0], "eos")]
    assert told == [1, 2, 3, 4]
    assert (drawing.completion().token_ids, drawing.completion().logprobs) == ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -2.0])


def test_a_redraw_that_contradicts_what_was_told_is_refused() -> None:
    drawing = Drawing()
    list(drawing.take([1, 2], [-1.0, -1.0], None))
    drawing.begin()
    with pytest.raises(WorkerDied, match="told"):
        list(drawing.take([1, 3], [-1.0, -1.0], "length"))
