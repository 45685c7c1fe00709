"""Tests of `ostinato engine serve` as a process: refused options, its end, and that a kill loses nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from engine.errors import UnknownPolicy
from engine.http.client import EngineClient
from engine.http.lifecycle import Binding
from engine.local.engine import LocalEngine
from engine.protocol import Engine, GenerateRequest, SamplingParams
from engine.specs.engine import HttpEngineSpec
from flows.cli.main import app
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy, request_after

ROOT = Path(__file__).resolve().parents[3]


# -- what does not start ---------------------------------------------------------------------------------------


def refusal(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, ["engine", "serve", "--storage", "memory://never", *arguments], env=environment)
    assert result.exit_code == 2, result.output
    return result.output


def test_an_address_that_others_reach_wants_a_token() -> None:
    message = refusal("--host", "0.0.0.0", OSTINATO_ENGINE_TOKEN="")
    assert "'0.0.0.0' is reachable from others; set OSTINATO_ENGINE_TOKEN or --token-file" in message


def test_a_token_that_is_guessed_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("tooshort\n")
    message = refusal("--token-file", str(tmp_path / "token"))
    assert "has 8 characters; give 16 or more" in message
    assert "tooshort" not in message
    assert "ASCII, without spaces" in refusal(OSTINATO_ENGINE_TOKEN="sixteen letters with spaces")


def test_an_engine_key_that_does_not_exist_is_refused_with_the_nearest() -> None:
    assert "did you mean 'device'" in refusal("--set", "devise=cpu")


def test_a_taken_port_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in refusal("--port", str(taken.getsockname()[1]), OSTINATO_ENGINE_TOKEN="")


async def test_answers_are_sent_without_waiting_for_the_clients_acknowledgement() -> None:
    """Nagle's algorithm would hold the second packet of each answer for 40 ms."""
    delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        delay.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = Binding(port=0).open()
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await delay  # 1: sent at once
        writer.close()


# -- a process -------------------------------------------------------------------------------------------------


class Served:
    """A server process; its first line says where it listens."""

    def __init__(
        self,
        store_url: str,
        log: Path,
        *,
        port: int = 0,
        failpoint: str = "",
        token: str = "",
        grace: int = 20,
        keys: Sequence[str] = ("deterministic=true", "threads=1"),
    ) -> None:
        # The command line, without secrets. The token is in the environment.
        command = [sys.executable, "-m", "flows.cli.main", "engine", "serve", "--storage", store_url]
        options = ["--port", str(port), "--grace-seconds", str(grace)]
        sets = [f"--set={key}" for key in keys]
        environment = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OSTINATO_FAILPOINT": failpoint,
            "OSTINATO_ENGINE_TOKEN": token,
        }
        self.log = log
        with log.open("a") as stderr:
            self.process = subprocess.Popen(
                [*command, *options, *sets],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        # The first line of the output names the port that the server has chosen.
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), log.read_text()
        self.url = line.split()[-1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, store_url: str) -> EngineClient:
        return EngineClient(store_url, HttpEngineSpec(url=self.url, timeout_seconds=5, patience_seconds=120))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def serve(**options: object) -> Served:
        started.append(Served(f"file://{tmp_path}/store", tmp_path / "log", **options))  # type: ignore[arg-type]
        return started[-1]

    yield serve
    for served in started:
        served.process.kill()
        served.process.wait()


async def step_from(engine: Engine, store: ObjectStore, policy: PolicyRef) -> CommitRecord:
    return await engine.take_gradient_step(request_after(policy, commit_batch(store, policy)))


def wait_for_end(served: Served) -> int:
    return served.process.wait(60)


@pytest.mark.slow
async def test_sigterm_ends_step_and_process_and_the_chain_continues(
    serve: Callable[..., Served], store: ObjectStore, tiny_folder: Path
) -> None:
    served = serve()
    client = served.client(store.url)
    start = await new_policy(client, tiny_folder)
    stepping = asyncio.create_task(step_from(client, store, start))
    while await waiting(served) == 0 and Chain.of(store, start).record(1) is None:
        pass
    served.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(wait_for_end, served) == 0
    serve(port=served.port)
    record = await stepping
    assert list(Chain.of(store, start).steps()) == [1]
    assert (await step_from(client, store, record.policy)).policy.step == 2
    await client.close()


async def waiting(served: Served) -> int:
    """Calls that the server has taken and not finished; -1 once it drains."""
    async with httpx.AsyncClient() as caller:
        return int((await caller.get(f"{served.url}/ready")).json().get("waiting", -1))


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", ["step.mid_gradient:2", "step.before_commit:2", "step.after_commit:2"])
async def test_a_server_killed_within_a_step_takes_it_once_all_the_same(
    serve: Callable[..., Served], store: ObjectStore, tiny_folder: Path, tmp_path: Path, failpoint: str
) -> None:
    served = serve(failpoint=failpoint)
    client = served.client(store.url)
    start = await new_policy(client, tiny_folder)
    # The server is killed within the second step and started again on the same port.
    first = await step_from(client, store, start)
    stepping = asyncio.create_task(step_from(client, store, first.policy))
    assert await asyncio.to_thread(wait_for_end, served) == -signal.SIGKILL
    serve(port=served.port)
    second = await stepping  # the call that was under way goes on with the new server
    third = await step_from(client, store, second.policy)
    await client.close()

    # The reference: three steps of an engine in this process.
    elsewhere = open_store(f"file://{tmp_path}/plain")
    plain = LocalEngine(elsewhere.url, DETERMINISTIC)
    policy = await new_policy(plain, tiny_folder)
    digests = []
    for _ in range(3):
        record = await step_from(plain, elsewhere, policy)
        policy = record.policy
        digests.append(record.weights_digest)
    await plain.close()
    assert [first.weights_digest, second.weights_digest, third.weights_digest] == digests
    assert third.state == record.state
    assert list(Chain.of(store, start).steps()) == [1, 2, 3]


@pytest.mark.slow
async def test_a_kill_within_a_call_is_logged_once_and_so_is_the_return(
    serve: Callable[..., Served], store: ObjectStore, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(failpoint="step.before_commit:1")
    client = served.client(store.url)
    start = await new_policy(client, tiny_folder)
    stepping = [asyncio.create_task(step_from(client, store, start)) for _ in range(3)]
    assert await asyncio.to_thread(wait_for_end, served) == -signal.SIGKILL
    began = time.monotonic()
    await asyncio.sleep(3.0)
    serve(port=served.port)
    records = await asyncio.gather(*stepping)
    away_at_most = time.monotonic() - began + 1
    assert {record.policy.step for record in records} == {1}
    await client.close()

    away, back = (record.getMessage() for record in caplog.records if record.name == "engine.http.transport")
    assert away == f"the engine at {served.url} does not answer; trying again for up to 120 s"
    seconds = re.fullmatch(f"the engine at {served.url} answers again, after ([0-9]+) s", back)
    assert seconds is not None
    assert 3 <= int(seconds[1]) <= away_at_most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "signals", "status"),
    [(0, [signal.SIGTERM], 0), (600, [signal.SIGTERM, signal.SIGINT], 128 + signal.SIGINT)],
)
async def test_a_long_call_holds_the_end_for_the_grace_and_a_second_signal_not_even_that(
    serve: Callable[..., Served], store: ObjectStore, tiny_folder: Path, grace: int, signals: list[int], status: int
) -> None:
    served = serve(grace=grace)
    client = served.client(store.url)
    start = await new_policy(client, tiny_folder)
    endless = SamplingParams(max_new_tokens=4000, min_new_tokens=3999)
    generating = asyncio.create_task(client.generate(GenerateRequest(start, [[10]] * 256, [1] * 256, endless)))
    while await waiting(served) == 0:
        pass
    served.process.send_signal(signals[0])
    if len(signals) > 1:
        while await waiting(served) >= 0:
            pass
        served.process.send_signal(signals[1])
    assert await asyncio.to_thread(wait_for_end, served) == status
    assert not generating.done()
    generating.cancel()
    await client.close()


@pytest.mark.slow
async def test_health_is_answered_while_the_server_loads_generates_decodes_and_refuses(
    serve: Callable[..., Served], store: ObjectStore, tiny_folder: Path
) -> None:
    """How soon is measured by bench/health_latency.py."""
    served = serve()
    client = served.client(store.url)

    async def work() -> None:
        start = await new_policy(client, tiny_folder)
        long = SamplingParams(max_new_tokens=64, min_new_tokens=64)
        await client.generate(GenerateRequest(start, [[10]] * 256, [1] * 256, long))
        unknown = start.model_copy(update={"run": "unknown"})
        with pytest.raises(UnknownPolicy):
            await client.generate(GenerateRequest(unknown, [[10] * 1000] * 4000, [1] * 4000))
        async with httpx.AsyncClient(timeout=60) as caller:
            wrong = {"model": "r", "messages": [0] * 100_000}
            assert (await caller.post(f"{served.url}/v1/chat/completions", json=wrong)).status_code == 400

    working = asyncio.create_task(work())
    async with httpx.AsyncClient(timeout=60) as caller:
        while not working.done():
            assert (await caller.get(f"{served.url}/health")).json() == {"status": "ok"}
    await working
    await client.close()


@pytest.mark.slow
def test_neither_the_log_nor_the_first_line_shows_the_token(serve: Callable[..., Served], tmp_path: Path) -> None:
    token = "a-token-of-the-operator"
    served = serve(token=token)
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{served.url}/v1/info", headers=headers).status_code == 200
    assert httpx.get(f"{served.url}/v1/info").status_code == 401
    served.process.send_signal(signal.SIGINT)
    assert wait_for_end(served) == 0
    assert token not in served.log.read_text()
    assert "GET /v1/info 401" in served.log.read_text()
