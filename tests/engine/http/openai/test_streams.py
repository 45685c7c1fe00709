"""Streams of the OpenAI-compatible routes, and clients that disconnect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.http.openai.api import POLICY_HEADER
from tests.fixtures.servers.openai_calls import ASK, IDS, OpenAIRun, chat, client_of, complete, text_of
from tests.fixtures.servers.openai_server import SamplerEngine, running_openai_server


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    """The parts of the choice `index`, in order."""
    parts = []
    for chunk in chunks:
        parts += [part for part in chunk.choices if part.index == index]
    return parts


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, seed: int) -> None:
    options = {"n": 3, "seed": seed, "max_tokens": 80, "logprobs": True, "extra_body": IDS}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    assert text_of(chunks) == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in chunks} == {whole.model}
    for choice in whole.choices:
        parts = parts_of(chunks, choice.index)
        assert parts[0].delta.role == "assistant"
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        ids, logprobs = [], []
        for part in parts:
            ids += getattr(part, "token_ids", None) or []
            logprobs += part.logprobs.content if part.logprobs else []
        assert (ids, logprobs) == (choice.token_ids, choice.logprobs.content)


def test_a_text_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    options = {"prompt": ["a", "b"], "n": 2, "logprobs": 0}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, **options))
    assert text_of(chunks) == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        parts = parts_of(chunks, choice.index)
        offsets = []
        for part in parts:
            offsets += part.logprobs.text_offset if part.logprobs else []
        assert offsets == choice.logprobs.text_offset


def test_tokens_arrive_while_others_are_still_drawn(openai_run: OpenAIRun, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, openai_run.local)
    options = {"max_tokens": 2000, "extra_body": {"min_tokens": 2000}}
    with (
        running_openai_server(engine, openai_run.store) as url,
        client_of(url) as client,
        chat(client, stream=True, **options) as stream,
    ):
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert engine.drawn == []  # the call is under way


def test_only_calls_that_need_it_are_streamed_and_the_rest_can_share_a_batch(
    openai_run: OpenAIRun, tiny_folder: Path
) -> None:
    engine = SamplerEngine(tiny_folder, openai_run.local)
    with running_openai_server(engine, openai_run.store) as url, client_of(url) as client:
        for options in ({}, {"stop": ["a", "b"]}, {"stop": ["a", "bc"]}, {"stream": True}):
            list(chat(client, max_tokens=2, **options))
    assert engine.streamed == [False, False, False, True]


def test_a_stream_begins_with_its_headers_and_ends_as_clients_expect(url: str, openai_run: OpenAIRun) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{url}/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers[POLICY_HEADER] == openai_run.policy.uri
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])


def test_a_refused_stream_is_refused_by_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stream=True, max_tokens=100_000)
    assert refused.value.code == "context_length_exceeded"


# -- clients that disconnect ------------------------------------------------------------------------------------


def test_a_client_that_disconnects_ends_the_sampling(openai_run: OpenAIRun, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, openai_run.local)
    body = {"model": "r", "messages": ASK, "max_tokens": 4000, "min_tokens": 4000, "stream": True}

    async def leave(url: str) -> None:
        async with httpx.AsyncClient() as http:
            call = asyncio.create_task(http.post(f"{url}/chat/completions", json=body, timeout=60))
            assert await asyncio.to_thread(engine.began.wait, 30)
            call.cancel()
            await asyncio.wait([call])

    with running_openai_server(engine, openai_run.store) as url:
        asyncio.run(leave(url))
        assert engine.abandoned.wait(30)
    assert engine.drawn[0] < 4000
