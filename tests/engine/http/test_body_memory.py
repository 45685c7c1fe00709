"""Small bodies that decode to large lists: the memory of all calls together stays within the server's limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from engine.http import wire
from engine.http.app import create_app
from engine.local.engine import LocalEngine
from engine.protocol import GenerateRequest, LogprobsRequest, TokenSequence
from storage.chain.records import PolicyRef
from tests.fixtures.engines import DETERMINISTIC, new_policy

ROOT = Path(__file__).resolve().parents[3]
POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=0, state="f" * 64)
ARROW = {"Content-Type": wire.MEDIA_TYPE}
LIMIT_MIB = 200
SLACK_MIB = 120
"""For the server's own work: a bound on memory, not a measurement."""


def zipped(tokens: int) -> bytes:
    """A body of a few kB. Each of its tokens needs 44 bytes: 4 in Arrow, 8 in a list, 32 as an int object."""
    body = wire.encode_generate(GenerateRequest(POLICY, [[1000] * tokens], [1]), epoch=0)
    assert len(body) < 10_000
    return body


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose calls never end, and its URL."""
    module = "tests.fixtures.servers.held_server"
    command = [sys.executable, "-m", module, f"file://{tmp_path}/store", str(LIMIT_MIB << 20)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def test_the_memory_of_all_waiting_calls_is_bounded(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    memory = psutil.Process(process.pid).memory_info
    before, body = memory().rss, zipped(2_000_000)  # 83.9 MiB when it is decoded: two of them fit
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def post() -> httpx.Response:
            headers = ARROW | {"X-Request-Id": uuid4().hex}
            return await client.post("/v1/generate", params={"wait": 0}, content=body, headers=headers)

        # Six calls at once: two are accepted.
        answers, health = await asyncio.gather(asyncio.gather(*(post() for _ in range(6))), client.get("/health"))
        assert health.status_code == 200
        taken = [answer for answer in answers if answer.status_code == 202]
        refused = [answer for answer in answers if answer.status_code != 202]
        assert len(taken) == 2
        assert {(a.status_code, a.json()["error"], a.headers["retry-after"]) for a in refused} == {
            (503, "NotAdmitted", "1")
        }
        assert "83 MiB" in refused[0].json()["message"]

        # Both accepted bodies are decoded and stay in memory.
        assert process.stdout is not None
        for _ in taken:  # both are decoded now, and stay
            assert await asyncio.to_thread(process.stdout.readline) == "generate\n"
        assert memory().rss - before < (LIMIT_MIB + SLACK_MIB) << 20
        assert (await post()).status_code == 503

        too_large = await client.post("/v1/generate", content=zipped(5_000_000), headers=ARROW)
        assert (too_large.status_code, too_large.json()["error"]) == (413, "BodyTooLarge")

        # A cancelled call makes room for another one.
        await client.delete(f"/v1/calls/{taken[0].json()['id']}")
        async with asyncio.timeout(60):  # the call that was taken back gives its room to another one
            while (again := await post()).status_code == 503:
                pass
        assert again.status_code == 202


async def test_a_sequence_that_no_context_holds_is_refused_before_the_engine_sees_it(
    tmp_path: Path, tiny_folder: Path
) -> None:
    local = LocalEngine(str(tmp_path / "data"), DETERMINISTIC)
    policy = await new_policy(local, tiny_folder)
    app = create_app(local, local.store)
    sequences = [TokenSequence([1, 2], [0.0, 1.0]), TokenSequence([1] * 50_000, [0.0] + [1.0] * 49_999)]
    bodies = {
        "generate": wire.encode_generate(GenerateRequest(policy, [[1] * 50_000], [1]), epoch=0),
        "logprobs": wire.encode_logprobs_request(LogprobsRequest(policy, sequences), epoch=0),
    }
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=ARROW) as client:
        for verb, body in bodies.items():
            answer = await client.post(f"/v1/{verb}", content=body)
            assert (answer.status_code, answer.json()["error"]) == (422, "SampleTooLong")
            assert "a sequence of 50000 tokens exceeds the model's context, 4096 tokens" in answer.json()["message"]
    await local.close()
