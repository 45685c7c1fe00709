"""Replies of judges behind an OpenAI-compatible endpoint and of reward servers, for the fuzz campaign.

A case is a JSON object: status, headers, body (latin-1), how often the body is repeated, and whether it is compressed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.models import openai_model
from engine.models.openai_model import OpenAIModel
from engine.protocol import SamplingParams
from engine.text.answers import MalformedAnswer
from engine.text.threads import StringThread
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.judges import BinaryJudgeGrader
from tasks.graders.range_judge import RangeJudgeGrader
from tasks.graders.reward_server import RewardServerGrader, RewardServerUnavailable
from tests.fuzz.inputs import Input

THREAD = StringThread().user("1+1").assistant("2")
TEXTS = ("", "PASS", "```json\n{}\n```", '{"reasoning": "x", "result": "PASS"}', '{"score": 5, "reasoning": "y"}',
    "{" * 3000,
         '{"a": ' * 2000, "9" * 5000, '{"score": ' + "9" * 5000 + "}", '{"score": NaN}', '{"score": 1e999}', "null",
         "[]",
         '{"result": ["PASS"]}', "\ud83d\ude00", "\0", '{"x": "\\ud800"}', "a" * 100_000, "{}" * 30_000,
         '{"reasoning": "' + '\\"' * 5000 + '"}', '{"result": "pass"} {"result": "FAIL"}', "\u202e",
         '{"reasoning": "' + "x" * 100_000 + '", "result": "FAIL"}')  # fmt: skip
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    2**70,
    "",
    [],
    {},
    [[]],
    {"score": 1},
    *TEXTS,
)
HEADERS = (("Retry-After", "0"), ("Retry-After", "nan"), ("Retry-After", "9" * 400), ("Retry-After", "\u00b2"),
           ("Content-Type", "text/html; charset=nope"), ("Content-Type", "application/json; charset=utf-7"),
           ("Content-Type", "text/plain; charset=zlib"), ("Content-Encoding", "gzip"), ("Content-Encoding", "deflate"),
           ("Content-Encoding", "gzip, gzip"), ("Content-Encoding", "br"), ("Location", "http://127.0.0.1:9/"),
           ("Location", "file:///etc/passwd"), ("Content-Length", "5"), ("Content-Length", "-1"),
           ("Transfer-Encoding", "chunked"),
           ("Set-Cookie", "a=b"), ("X", "y" * 60_000))  # fmt: skip
STATUSES = (200, 200, 200, 200, 200, 200, 204, 206, 301, 302, 307, 400, 401, 403, 404, 408, 422, 429, 500, 503, 999)


def case(kind: str, seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed}/{kind}/{number}")
    if kind == "judge":
        body: Any = {"choices": [{"message": {"role": "assistant", "content": draw.choice(TEXTS)}}]}
    else:
        body = {"score": 0.5, "reasoning": draw.choice(TEXTS)}
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        body = _changed(body, draw)
    text = json.dumps(body)
    if draw.random() < 0.15:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(("", "\xff", "\0", "]", "{" * 2000)) + text[place + draw.randint(0, 5) :]
    reply = {"status": draw.choice(STATUSES), "body": text, "repeat": 1, "compress": "", "headers": []}
    if draw.random() < 0.05:
        # up to 2 GB of blanks, or of one text
        reply |= {
            "repeat": draw.choice((1_000, 30_000, 2_000_000)),
            "body": draw.choice((text[:1000], " " * 1000, "[" * 1000)),
        }
    if draw.random() < 0.1:
        reply["compress"] = draw.choice(("gzip", "deflate"))
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        reply["headers"].append(draw.choice(HEADERS))
    return json.dumps(reply).encode()


def _changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        return [_changed(value[0], draw), *value[1:]] if draw.random() < 0.8 else []
    return draw.choice(VALUES)


class _Handler(BaseHTTPRequestHandler):
    reply: dict[str, Any] = {}

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing."""

    def do_POST(self) -> None:
        with contextlib.suppress(OSError):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(self.reply)

    def _answer(self, reply: dict[str, Any]) -> None:
        body, repeat = reply["body"].encode("utf-8", "replace"), reply["repeat"]
        self.send_response(reply["status"])
        headers = dict(reply["headers"])
        if reply["compress"]:
            pack = zlib.compressobj(6, wbits=31 if reply["compress"] == "gzip" else 15)
            body = b"".join(pack.compress(body) for _ in range(min(repeat, 300_000))) + pack.flush()
            repeat, headers["Content-Encoding"] = 1, reply["compress"]
        for name, value in headers.items():
            self.send_header(name, value.encode("latin-1", "replace").decode("latin-1"))
        self.end_headers()
        block = body * min(repeat, 1_000)
        for _ in range(0, repeat, 1_000):
            self.wfile.write(block)


@functools.cache
def _server() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    openai_model.TIMEOUT_SECONDS = 20.0
    openai_model.LONGEST_WAIT_SECONDS = 0.01
    os.environ["OPENAI_API_KEY"] = "sk-of-the-fuzz"
    return server


def _start(data: bytes) -> str:
    url = f"http://127.0.0.1:{_server().server_port}"
    _Handler.reply = json.loads(data)
    return url


def use_judge(data: bytes, folder: Path) -> None:
    model = OpenAIModel.of(f"openai://judge@{_start(data)}", "judge", SamplingParams(max_new_tokens=10))
    object.__setattr__(model, "first_wait_seconds", 0.0)
    if len(data) % 3 == 0:
        asyncio.run(model.generate(StringThread().user("1+1")))
        return
    grader: Any
    if len(data) % 3 == 1:
        grader = BinaryJudgeGrader("judge", model, "is right")
    else:
        grader = RangeJudgeGrader("judge", model, "is right")
    asyncio.run(grader.grade(THREAD))


def use_reward_server(data: bytes, folder: Path) -> None:
    async def grade() -> None:
        grader = RewardServerGrader("reward", _start(data), retries=1, retry_delay_seconds=0.0, timeout_seconds=20.0)
        await grader.setup()
        try:
            await grader.grade(THREAD)
        finally:
            await grader.teardown()

    asyncio.run(grade())


REFUSALS = (EngineError, MalformedAnswer, GraderError, IgnoreGradeException, RewardServerUnavailable)
INPUTS = {
    "judge": Input(functools.partial(case, "judge"), use_judge, REFUSALS, cases_per_child=400),
    "reward server": Input(functools.partial(case, "reward server"), use_reward_server, REFUSALS, cases_per_child=400),
}
