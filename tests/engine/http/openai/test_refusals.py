"""Requests that the OpenAI-compatible routes refuse, and options that they accept without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from storage.store.objects import open_store
from tests.fixtures.servers.openai_calls import ASK, OpenAIRun, chat, client_of, complete
from tests.fixtures.servers.openai_server import running_openai_server

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 10}),
        ("top_logprobs", 3),
        ("tools", [{"type": "function", "function": {"name": "two words"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "tool", "content": "2"}]),
        ("messages", [{"role": "user", "content": "x", "tool_call_id": "c"}]),
        ("messages", [{"role": "user", "content": "x", "tool_calls": [CALL]}]),
        ("messages", [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}]}]),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("reasoning_effort", "low"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("n", 0),
        ("n", 300),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", [""]),
        ("seed", 1 << 64),
        ("messages", []),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
        ("messages", [{"role": "user", "content": "x", "name": "ann"}]),
        ("user", "\ud800"),
        ("min_tokens", 25),
        ("stream_options", {"include_usage": True}),
        ("nonsense", 1),
    ],
)
def test_an_option_without_effect_is_refused_by_name(url: str, option: str, value: Any) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 24, option: value}
    answer = httpx.post(
        f"{url}/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert option in f"{error['param']} {error['message']}" or error["code"] == "invalid_prompt"


@pytest.mark.parametrize(
    "harmless",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "top_logprobs": 0, "store": False, "user": "me", "stop": None},
        {"temperature": None, "seed": None, "n": None, "stream": False},
    ],
)
def test_options_left_at_no_effect_are_fine(url: str, harmless: dict[str, Any]) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 2, **harmless}
    assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("option", [{"suffix": "x"}, {"best_of": 2}, {"logprobs": 5}, {"prompt": []}])
def test_text_options_without_effect_are_refused(client: openai.OpenAI, option: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **option)
    assert next(iter(option)) in f"{refused.value.param} {refused.value.message}"


@pytest.mark.parametrize("name", ["r@99", "nothing", "r/0-s/other", "r/9-s/policy", "tiny@nothing", "served/nothing"])
def test_an_unknown_name_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model=name)
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "name",
    ["../r", "r/../r", "/r", "r/", "r//policy", "a/b/c/d/e", ".", "r@", "r@../0", "r/stages", "r\x00", "ü", "r@0@1"],
)
def test_an_invalid_name_is_refused_and_touches_nothing(
    client: openai.OpenAI, openai_run: OpenAIRun, name: str
) -> None:
    before = [info.key for info in openai_run.store.list()]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, model=name)
    assert refused.value.param == "model"
    assert [info.key for info in openai_run.store.list()] == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"model": 1}'])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_body_that_is_no_request_is_refused(url: str, path: str, content: bytes) -> None:
    answer = httpx.post(f"{url}/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_token_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[5, 100_000])


def test_a_server_over_an_empty_store_has_no_models(tmp_path: Path, openai_run: OpenAIRun) -> None:
    with running_openai_server(openai_run.local, open_store(tmp_path / "empty")) as url, client_of(url) as client:
        assert list(client.models.list()) == []
        with pytest.raises(openai.NotFoundError):
            chat(client)
