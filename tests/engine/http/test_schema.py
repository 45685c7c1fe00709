"""Tests of the server against its own OpenAPI schema with schemathesis: every response is documented and never a 5xx.

Half of the bodies get names of a real run put in, so that they pass the door and reach the engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from engine.http import wire
from engine.http.app import create_app
from engine.http.service import ServerOptions
from engine.local.engine import LocalEngine
from engine.protocol import GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import PolicyRef
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
TOKEN = "a-token-for-the-fuzzer"
EXAMPLES, SLOW_EXAMPLES = 200, 5000
OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/v1/import_model"),
    ("POST", "/v1/create_policy"),
    ("POST", "/v1/measure"),
    ("POST", "/v1/take_gradient_step"),
    ("POST", "/v1/begin_checkpoint"),
    ("POST", "/v1/stage_policy"),
    ("POST", "/v1/save_checkpoint"),
    ("POST", "/v1/export_model"),
    ("POST", "/v1/release"),
    ("POST", "/v1/scale_samplers"),
    ("GET", "/v1/info"),
    ("GET", "/v1/server"),
    ("POST", "/v1/generate"),
    ("POST", "/v1/logprobs"),
    ("POST", "/v1/logprobs_of_rows"),
    ("POST", "/v1/top_logprobs_of_rows"),
    ("POST", "/v1/values"),
    ("POST", "/v1/values_of_rows"),
    ("GET", "/v1/calls/{id}"),
    ("DELETE", "/v1/calls/{id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
]
"""All but /ready, which is 503 until the engine was probed."""


@schemathesis.serializer(wire.MEDIA_TYPE)
def arrow(ctx: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


class World:
    """One server over one real engine with one run of a tiny model."""

    def __init__(self, engine: LocalEngine, policy: PolicyRef) -> None:
        app = create_app(engine, engine.store, ServerOptions(token=TOKEN))
        self.schema = schemathesis.openapi.from_asgi(
            "/openapi.json", app, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        self.policy, self.batch = policy, commit_batch(engine.store, policy)
        self.statuses: Counter[int] = Counter()

    def real(self, path: str, body: Any) -> Any:
        """The body with the names of the real run in it, where it has names."""
        policy = self.policy.model_dump(mode="json")
        match path:
            case "/v1/generate":
                request = GenerateRequest(self.policy, [[10, 11]], [1], SamplingParams(max_new_tokens=1))
                return wire.encode_generate(request, epoch=0)
            case "/v1/logprobs" | "/v1/values":
                request = LogprobsRequest(self.policy, [TokenSequence([10, 11], [0.0, 1.0])])
                return wire.encode_logprobs_request(request, epoch=0)
        if not isinstance(body, dict):
            return body
        if path == "/v1/take_gradient_step" and isinstance(body.get("request"), dict):
            batch = self.batch.model_dump(mode="json")
            step = body["request"] | {"parent": policy, "reference": None, "batch": batch}
            return body | {"request": step}
        names = {"policy": policy, "run": "r", "model_name": "m", "source": "tiny", "model": "r"}
        names |= {"max_tokens": 1}
        return body | {name: value for name, value in names.items() if name in body}

    def check(self, method: str, path: str, examples: int) -> None:
        operation = self.schema[path][method]

        @settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )  # fmt: skip
        @given(data=st.data(), real=st.booleans(), cut=st.integers(0, 4000))
        def run(data: st.DataObject, real: bool, cut: int) -> None:
            mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
            case = data.draw(operation.as_strategy(generation_mode=mode))
            if real:
                body = self.real(path, case.body)
                case.body = body[:cut] + body[cut + 1 :] if isinstance(body, bytes) and cut % 2 else body
            if isinstance(case.query, dict) and "wait" in case.query:
                case.query["wait"] = 1 if real else case.query["wait"]
            response = case.call(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120)
            self.statuses[response.status_code] += 1
            streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
            # a stream has no schema but its lines': tests of the OpenAI routes read them
            case.validate_response(response, checks=CHECKS[:3] if streamed else CHECKS)

        run()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[World]:
    engine = LocalEngine(f"file://{tmp_path_factory.mktemp('schema')}/store", DETERMINISTIC)
    yield World(engine, asyncio.run(new_policy(engine, tiny_folder)))
    asyncio.run(engine.close())


def test_every_route_is_in_the_list(world: World) -> None:
    paths = world.schema.raw_schema["paths"]
    assert {(m.upper(), p) for p, methods in paths.items() for m in methods} == {*OPERATIONS, ("GET", "/ready")}


def test_every_answer_and_every_error_is_documented_and_typed(world: World) -> None:
    for path, methods in world.schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            openai = "completions" in path or path.startswith("/v1/models")
            assert {"401", "403", "413", "503"} <= set(responses), (method, path)
            assert openai or {"404", "409", "422"} <= set(responses), (method, path)
            if method != "delete":
                assert responses["200"]["content"], (method, path)
            if not openai:
                error = responses["422"]["content"]["application/json"]["schema"]
                assert error == {"$ref": "#/components/schemas/ErrorBody"}, (method, path)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_a_server_error(world: World, method: str, path: str) -> None:
    world.check(method, path, EXAMPLES // len(OPERATIONS))


@pytest.mark.slow
def test_no_request_of_five_thousand_is_a_server_error(world: World) -> None:
    world.statuses.clear()
    for method, path in OPERATIONS:
        world.check(method, path, SLOW_EXAMPLES // len(OPERATIONS) + 100)
    print(dict(world.statuses))
    assert world.statuses.total() >= SLOW_EXAMPLES
    assert world.statuses[200] > 500  # the fuzzer gets past the door
