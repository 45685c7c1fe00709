"""Tests of the replies of judges behind endpoints and of reward servers that are large, compressed or no JSON."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.errors import BadSpec, EngineUnreachable
from engine.models import openai_model
from engine.models.openai_model import OpenAIModel
from engine.protocol import SamplingParams
from engine.text.answers import MalformedAnswer
from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.reward_server import RewardServerGrader

THREAD = StringThread().user("1+1").assistant("2")


@contextlib.contextmanager
def server(body: bytes, repeats: int = 1, **headers: str) -> Iterator[tuple[str, list[int]]]:
    """(address, bytes that each reply could send before the client closed the connection)."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Prints nothing."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            sent.append(0)
            with contextlib.suppress(OSError):
                for _ in range(repeats):
                    self.wfile.write(body)
                    sent[-1] += len(body)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", sent
    finally:
        running.shutdown()
        running.server_close()


def judge(url: str) -> OpenAIModel:
    return OpenAIModel("judge", "judge", url, SamplingParams(max_new_tokens=8), first_wait_seconds=0.0)


async def test_an_answer_of_any_size_is_not_read_and_not_asked_for_again() -> None:
    with server(b" " * (1 << 20), 1500) as (url, sent):
        with pytest.raises(MalformedAnswer, match="answered with more than 8 MiB; expected a short answer"):
            await judge(url).generate(THREAD)
        assert len(sent) == 1 and sent[0] < 10 * openai_model.MAX_REPLY_BYTES
    with server(b" " * (1 << 20), 1500) as (url, sent):
        with pytest.raises(GraderError, match="answered with more than 8 MiB"):
            await RewardServerGrader("r", url).grade(THREAD)
        assert len(sent) == 1


async def test_a_compressed_answer_is_not_unpacked() -> None:
    with server(gzip.compress(b"{}"), Content_Encoding="gzip") as (url, _):
        with pytest.raises(MalformedAnswer, match="in the encoding 'gzip', which was not asked for"):
            await judge(url).generate(THREAD)
        with pytest.raises(GraderError, match="in the encoding 'gzip'"):
            await RewardServerGrader("r", url).grade(THREAD)


@pytest.mark.parametrize("body", [b"[" * 200_000, b"\xff\xfe", b"<html>"])
async def test_a_reply_that_is_no_json_is_a_sentence(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(openai_model, "TRIES", 1)
    # the charset names a codec that does not decode text
    with server(body, Content_Type="text/plain; charset=zlib") as (url, _):
        with pytest.raises(EngineUnreachable, match="did not answer with JSON"):
            await judge(url).generate(THREAD)
        with pytest.raises(GraderError, match="did not answer with JSON"):
            await RewardServerGrader("r", url).grade(THREAD)


async def test_an_answer_that_is_no_text_is_refused() -> None:
    body = b'{"choices": [{"message": {"content": {"a": 1}}}]}'
    with server(body) as (url, _), pytest.raises(BadSpec, match="a dict as content; expected text"):
        await judge(url).generate(THREAD)
