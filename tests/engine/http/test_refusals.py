"""Tests of invalid requests to the server of a real engine: the response is a 4xx that names the wrong field."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from engine import errors
from engine.http import wire
from engine.http.app import create_app
from engine.http.openai.api import openai_router
from engine.local.engine import LocalEngine
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage import errors as storage_errors
from storage.chain.records import Chain, PolicyRef
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy, request_after
from tests.fixtures.servers.unchecked import unchecked

INTERNALS = re.compile(
    r"validation error|pydantic|Value error|function-|constrained|\[_|list\[|tagged-union|Spec\b|Ref\b"
)
"""Names that only a reader of the source knows."""


class World:
    """A run on an engine, and its server."""

    def __init__(self, engine: LocalEngine, policy: PolicyRef) -> None:
        self.engine, self.policy = engine, policy
        self.client = client_of(create_app(engine, engine.store))

    async def refused(self, verb: str, **request: Any) -> str:
        """The message of a 422."""
        answer = await self.client.post(f"/v1/{verb}", **request)
        assert answer.status_code == 422, answer.text
        message = answer.json()["message"]
        assert not INTERNALS.search(message), message
        return message


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60)


@pytest.fixture
async def world(tmp_path: Path, tiny_folder: Path) -> AsyncIterator[World]:
    engine = LocalEngine(str(tmp_path / "data"), DETERMINISTIC)
    world = World(engine, await new_policy(engine, tiny_folder))
    yield world
    await world.client.aclose()
    await engine.close()


async def test_arrow_bodies_that_no_client_of_ours_sends_are_refused(world: World) -> None:
    def body(ids: list[int], mask: list[bool], temperature: float = 1.0) -> dict[str, Any]:
        arrays = {"token_ids": np.array(ids, np.int32), "loss_mask": np.array(mask, bool)}
        sequence = unchecked(TokenSequence, **arrays)
        request = unchecked(LogprobsRequest, policy=world.policy, sequences=[sequence], temperature=temperature)
        data = wire.encode_logprobs_request(request, epoch=0)
        return {"content": data, "headers": {"Content-Type": wire.MEDIA_TYPE}}

    ids, mask = [10, 11, 12], [False, True, True]
    for temperature in (0.0, 1e-320, -1.0, 1e308):
        assert "temperature" in await world.refused("logprobs", **body(ids, mask, temperature))
    for wrong in (mask[:2], [*mask, True], [True, True, True]):
        assert "weight" in await world.refused("logprobs", **body(ids, wrong))
        await world.refused("values", **body(ids, wrong))
    assert "no tokens" in await world.refused("logprobs", **body([], []))
    sampling = SamplingParams(stop_token_ids=(10**9,), min_new_tokens=1, max_new_tokens=2)
    data = wire.encode_generate(GenerateRequest(world.policy, [ids], [1], sampling), epoch=0)
    headers = {"Content-Type": wire.MEDIA_TYPE}
    assert "stop token id 1000000000" in await world.refused("generate", content=data, headers=headers)


async def test_json_bodies_of_nonsense_are_refused_by_the_name_of_the_field(world: World) -> None:
    batch = commit_batch(world.engine.store, world.policy)
    step = request_after(world.policy, batch).model_dump(mode="json")
    for change, field in (
        ({"loss": {"kind": "grpo", "clip_high": 1e308}}, "clip_high=1e+308: should be less than"),
        ({"loss": {"kind": "grpo", "importance_cap": 1e308}}, "importance_cap=1e+308: should be less than"),
        ({"loss": {"kind": "none"}}, "'kind' is 'none'; expected one of 'cross_entropy'"),
        ({"minibatches": {"epochs": 10**15}}, "body.request.minibatches.epochs=1000000000000000: should be less than"),
        ({"temperature": 1e-320}, "body.request.temperature=1e-320: should be greater than"),
        ({"optimizer": {"lr": -1}}, "body.request.optimizer.lr=-1: should be greater than"),
        ({"batch": 5}, "body.request.batch=5: should be an object"),
        ({"stray": 1}, "body.request.stray=1: is not a known field"),
    ):
        assert field in await world.refused("take_gradient_step", json={"request": step | change})
    root = {"base": batch.model_dump(mode="json"), "base_digest": batch.sha256, "trainable": {"kind": "x"}}
    spec = {"run": "fresh", "stage": "0-s", "model": "policy", "root": root}
    assert "'kind' is 'x'" in await world.refused("create_policy", json={"spec": spec})
    assert "no model runs/" in await world.refused(
        "create_policy", json={"spec": spec | {"root": root | {"trainable": {"kind": "full"}}}}
    )
    assert Chain(world.engine.store, "fresh", "0-s", "policy").root() is None


class Failing:
    """An engine whose generations end with `error`."""

    def __init__(self, chains: LocalEngine, error: Exception) -> None:
        self.chains, self.error = chains, error

    async def create_policy(self, spec: Any) -> PolicyRef:
        return await self.chains.create_policy(spec)

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        raise self.error


async def test_openai_clients_are_told_which_errors_are_for_good(world: World) -> None:
    for kind, status in (
        (errors.ReplayDiverged, 409),
        (errors.StepConflict, 409),
        (errors.Fenced, 409),
        (errors.NonFiniteGradient, 400),
        (errors.PermanentEngineError, 400),
        (errors.BadSpec, 400),
        (errors.UnknownPolicy, 404),
        (errors.EngineBusy, 503),
        (storage_errors.CorruptArtifact, 409),
        (storage_errors.AccessDenied, 403),
        (storage_errors.StorageUnavailable, 503),
    ):
        app = FastAPI()
        app.include_router(openai_router(Failing(world.engine, kind("why")), world.engine.store))  # type: ignore[arg-type]
        async with client_of(app) as client:
            answer = await client.post("/v1/completions", json={"model": "r", "prompt": "a", "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, "why"), kind


OPENAI_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature=3: should be less than or equal to 2"),
    ({"temperature": 1e-320}, "1e-320 is too small; give at least 0.01, or 0 for greedy decoding"),
    ({"messages": 5}, "messages=5: should be a valid list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content=5: give text, or a list of parts"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content: character 0 is half a surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: is required"),
    ({"messages": [{"content": "a"}]}, "messages.0.role: is required"),
    ({"stop": 5}, "stop=5: give a string, or a list of strings"),
    ({"stop": ["a", ""]}, "stop.1: an empty stop string would end every completion"),
    ({"prompt": 5}, "prompt=5: give text, a list of token ids, or a list of either"),
    ({"prompt": [1, -1]}, "prompt.1=-1: should be greater than or equal to 0"),
    ({"prompt": [[1], []]}, "prompt.1: List should have at least 1 item"),
    ({"prompt": ["a", 5]}, "prompt.1=5: should be a valid string"),
    ({"stream_options": {"include_usage": True}}, "stream_options are for stream=true"),
]


async def test_openai_messages_name_fields_and_what_to_give(world: World) -> None:
    for change, message in OPENAI_MESSAGES:
        path = "/v1/completions" if "prompt" in change else "/v1/chat/completions"
        messages = {} if "prompt" in change else {"messages": [{"role": "user", "content": "a"}]}
        body = {"model": "r"} | messages | change
        headers = {"Content-Type": "application/json"}
        answer = await world.client.post(path, content=json.dumps(body), headers=headers)  # of lone surrogates too
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert message in error["message"]
        assert not INTERNALS.search(error["message"] + str(error["param"])), error
