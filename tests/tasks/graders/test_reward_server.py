"""Tests of the reward server grader against a real server on 127.0.0.1 that fails on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders import reward_server
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.reward_server import RewardServerGrader, RewardServerUnavailable
from tasks.graders.running.grade_threads import grade_threads

THREAD = StringThread(turns=[("user", "q"), ("assistant", "abcd")], metadata={"row": 3})


class Server:
    """Answers each request with the next of `script` (the last for ever): (status, body, headers), "drop" or "hang"."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.inside = self.most_inside = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:"))
            self.requests.append(json.loads(await reader.readexactly(length)))
            self.headers.append(head)
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            await self.gate.wait()
            self.inside -= 1
            if answer == "hang":
                await reader.read()
            elif answer != "drop":
                status, body, *headers = answer
                text = body if isinstance(body, str) else json.dumps(body)
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text)}", "Connection: close", *headers]
                writer.write(("\r\n".join(lines) + "\r\n\r\n" + text).encode())
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def served(*script: Any, **options: Any) -> AsyncIterator[tuple[RewardServerGrader, Server]]:
    server = Server(*script)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/grade"
    grader = RewardServerGrader("served", url, **({"retry_delay_seconds": 0.0, "timeout_seconds": 5.0} | options))
    await grader.setup()
    try:
        yield grader, server
    finally:
        await grader.teardown()
        listening.close()


async def test_a_score() -> None:
    async with served((200, {"score": 0.25, "reasoning": "so so"})) as (grader, server):
        grade = await grader.grade(THREAD)
        assert (grade.value, grade.grader_key, grade.reasoning) == (0.25, "served", "so so")
        assert server.requests == [
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abcd"}],
                "completion": "abcd",
                "metadata": {"row": 3},
            }
        ]


async def test_no_opinion() -> None:
    async with served((200, {"ignore": True, "reasoning": "not my field"})) as (grader, _):
        with pytest.raises(IgnoreGradeException, match="not my field"):
            await grader.grade(THREAD)


@pytest.mark.parametrize("trouble", [(503, ""), (500, ""), (429, "", "Retry-After: 0"), "drop"])
async def test_what_may_pass_is_tried_again(trouble: Any) -> None:
    async with served(trouble, trouble, (200, {"score": 1}), timeout_seconds=60.0) as (grader, server):
        assert (await grader.grade(THREAD)).value == 1.0
        assert len(server.requests) == 3 and grader.get_logs()["retries/count"] == 2.0


async def test_a_server_that_hangs_is_tried_again() -> None:
    async with served("hang", (200, {"score": 1}), timeout_seconds=1.0, retries=20) as (grader, server):
        assert (await grader.grade(THREAD)).value == 1.0
        assert len(server.requests) >= 2


@pytest.mark.parametrize("trouble", [(503, ""), "drop"])
async def test_what_does_not_pass_masks_the_grade(trouble: Any) -> None:
    async with served(trouble, retries=2) as (grader, server):
        with pytest.raises(RewardServerUnavailable, match="3 attempts"):
            await grader.grade(THREAD)
        assert len(server.requests) == 3
        (outcome,) = await grade_threads(grader, [THREAD], retries=0)
        assert (outcome.status, outcome.reward) == ("masked", None)


@pytest.mark.parametrize(
    ("answer", "says_so"),
    [
        ((400, "what?"), "HTTP 400: what?"),
        ((404, ""), "HTTP 404"),
        ((302, "", "Location: http://127.0.0.1:9/"), "HTTP 302"),
        ((200, "fine"), "not answer with JSON"),
        ((200, [0.5]), "expected an object"),
        ((200, {"score": "0.5"}), "finite number"),
        ((200, {"score": True}), "finite number"),
        ((200, {"reasoning": "?"}), "finite number"),
        ((200, '{"score": NaN}'), "finite number"),
    ],
)
async def test_what_never_will_is_not_tried_again(answer: Any, says_so: str) -> None:
    async with served(answer) as (grader, server):
        with pytest.raises(GraderError, match=says_so):
            await grader.grade(THREAD)
        assert len(server.requests) == 1


async def test_concurrency_is_bounded() -> None:
    async with served((200, {"score": 1}), concurrency=3) as (grader, server):
        server.gate.clear()
        grading = asyncio.ensure_future(grade_threads(grader, [THREAD] * 12, concurrency=12, retries=0))
        while server.inside < 3:
            await asyncio.sleep(0.005)
        server.gate.set()
        assert [outcome.reward for outcome in await grading] == [1.0] * 12
        assert server.most_inside == 3


async def test_pauses_double_up_to_half_jittered_and_heed_the_server() -> None:
    grader = RewardServerGrader("g", "http://127.0.0.1:9/", retry_delay_seconds=4.0)
    for attempt, longest in ((1, 4.0), (2, 8.0), (3, 16.0), (9, reward_server.MAX_DELAY_SECONDS)):
        assert all(longest / 2 <= grader._delay(attempt, None) <= longest for _ in range(50))
    assert grader._delay(1, "7") == 7.0 and grader._delay(1, "86400") == reward_server.MAX_DELAY_SECONDS
    assert grader._delay(1, "Sat, 21 Nov 2026 18:00:00 GMT") <= 4.0


async def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    async with served((200, {"score": 1}), token_variable="REWARD_TOKEN") as (grader, server):
        await grader.grade(THREAD)
        assert "authorization: bearer s3cret" in server.headers[0].lower()
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(GraderError, match="REWARD_TOKEN"):
        await RewardServerGrader("g", "http://127.0.0.1:9/", token_variable="REWARD_TOKEN").setup()


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "ftp://host/x"},
        {"url": "file:///etc/passwd"},
        {"url": "host/x"},
        {"url": "http://h/", "timeout_seconds": 0},
        {"url": "http://h/", "retries": -1},
        {"url": "http://h/", "concurrency": 0},
    ],
)
def test_what_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        RewardServerGrader("g", **arguments)
