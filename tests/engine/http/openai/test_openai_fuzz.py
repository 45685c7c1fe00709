"""Fuzz tests of the OpenAI-compatible routes: every response is a documented one and never a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.http.openai.api import openai_router
from engine.local.engine import LocalEngine
from engine.protocol import Completion, GenerateRequest, PolicySpec
from storage.chain.records import PolicyRef
from tests.fixtures.engines import DETERMINISTIC, new_policy

pytestmark = pytest.mark.slow
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", ""])
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text()}), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=8) | PARTS}, optional={"name": ANYTHING}),
    max_size=4,
)
IDS = st.lists(st.integers(-1, 300), max_size=4)
PROMPTS = st.text(max_size=8) | IDS | st.lists(st.text(max_size=4) | IDS, max_size=3)
NAMES = st.sampled_from(["r", "r@0", "r@7", "r/0-s/policy", "tiny", "tiny@x", "../r", "r/stages", "", "served/tiny"])
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 400),
    "max_tokens": st.integers(-1, 5000),
    "max_completion_tokens": st.integers(-1, 5000),
    "min_tokens": st.integers(-1, 20),
    "n": st.integers(-1, 200),
    "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=20),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "return_token_ids": st.booleans(),
    "logprobs": st.booleans() | st.integers(-1, 2),
    "top_logprobs": st.integers(-1, 1),
    "user": st.text(),
    "presence_penalty": st.floats(-1, 1),
    "tools": ANYTHING,
    "echo": st.booleans(),
}
OPTIONAL = {name: values | ANYTHING if name != "model" else values for name, values in LIKELY.items()}
CHATS = st.fixed_dictionaries({"model": NAMES | st.text(), "messages": MESSAGES | ANYTHING}, optional=OPTIONAL)
TEXTS = st.fixed_dictionaries({"model": NAMES | st.text(), "prompt": PROMPTS | ANYTHING}, optional=OPTIONAL)


class QuickEngine:
    """Answers three bytes, whatever is asked."""

    def __init__(self, chains: LocalEngine) -> None:
        self.chains = chains

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        return await self.chains.create_policy(spec)

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        return [Completion([200, 60, 2], [-1.0, float("-inf"), -3.0], "eos") for _ in request.prompts]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[TestClient]:
    local = LocalEngine(str(tmp_path_factory.mktemp("fuzz") / "data"), DETERMINISTIC)
    asyncio.run(new_policy(local, tiny_folder))
    app = FastAPI()
    app.include_router(openai_router(QuickEngine(local), local.store))  # type: ignore[arg-type]
    with TestClient(app) as client:
        yield client
    asyncio.run(local.close())


def check(client: TestClient, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    if answer.status_code == 200:
        assert answer.headers["x-ostinato-policy"].startswith("policy:")
        return
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(body=CHATS)
def test_no_chat_request_is_a_server_error(client: TestClient, body: Any) -> None:
    check(client, "/v1/chat/completions", body)


@FUZZ
@given(body=TEXTS)
def test_no_text_request_is_a_server_error(client: TestClient, body: Any) -> None:
    check(client, "/v1/completions", body)


@FUZZ
@given(name=st.text(min_size=1))
def test_no_model_name_is_a_server_error(client: TestClient, name: str) -> None:
    answer = client.get("/v1/models/" + "".join(f"%{byte:02X}" for byte in name.encode("utf-8", "replace")))
    assert answer.status_code in (200, 400, 404)


def test_the_fuzzer_reaches_answers(client: TestClient) -> None:
    body = {"model": "r", "prompt": ["ab", "c"], "n": 2, "logprobs": 0, "stream": False}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -9999.0, -3.0]  # JSON has no infinity


@pytest.mark.parametrize("chat", [True, False])
def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_encoded(client: TestClient, chat: bool) -> None:
    """The tiny model's context is 4,096 tokens. Encoding a body of the largest size took over a minute."""
    text = "a" * (256 * 4096 + 1)
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": ["a", text]}
    answer = client.post("/v1/chat/completions" if chat else "/v1/completions", json={"model": "r", **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "far more than the context of 4096 tokens" in answer.json()["error"]["message"]
