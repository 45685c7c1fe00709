"""Routes of the verbs that carry batches: generate, logprobs and values. Their bodies are Arrow IPC streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from engine.errors import BadSpec
from engine.http import wire
from engine.http.calls import CallResult
from engine.http.decoding import BodyDecoder
from engine.http.routing import ARROW, RequestId, Responses, Wait, not_finished, v1_router
from engine.http.service import EngineService

R = TypeVar("R")


def _batch_submitter(service: EngineService, decoder: BodyDecoder) -> Callable[..., Awaitable[Response]]:
    """Returns a function that submits the call of a request with an Arrow body."""

    async def call(
        request: Request,
        verb: str,
        summarize: Callable[[bytes], wire.BodySummary],
        work: Callable[[bytes, wire.BodySummary], Awaitable[bytes]],
        wait: float,
    ) -> Response:
        # The headers of the body give the policy and the memory that decoding needs. The body is decoded in the call.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != wire.MEDIA_TYPE:
            raise BadSpec(f"the content type is {media_type[:60]!r}; send an Arrow IPC stream as {wire.MEDIA_TYPE}")
        body = await request.body()
        with service.calls.reserved(len(body)):
            summary = await decoder.summarize(summarize, body)

        async def run_call() -> CallResult:
            return CallResult(200, await work(body, summary), wire.MEDIA_TYPE)

        return await service.submit(
            request, verb, run_call, wait=wait, run=summary.policy.run, decoded_bytes=summary.decoded_bytes
        )

    return call


def batch_routes(service: EngineService) -> APIRouter:
    """Returns the routes of the verbs whose bodies are Arrow streams."""
    router = v1_router(service)
    # the documentation of these routes, whose bodies FastAPI does not parse
    streams: Responses = {200: {"content": ARROW, "description": "An Arrow IPC stream"}}
    documented: dict[str, Any] = {
        "response_class": Response,
        "responses": streams | not_finished(),
        "openapi_extra": {"requestBody": {"content": ARROW, "required": True}},
    }

    decoder = BodyDecoder(service.store)
    call = _batch_submitter(service, decoder)

    @router.post("/generate", **documented)
    async def generate(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Generates completions, in the order of the prompts. Columns: engine.http.wire.GENERATE, COMPLETIONS."""

        async def work(body: bytes, summary: wire.BodySummary) -> bytes:
            decoded, epoch = await decoder.decode(wire.decode_generate, body, summary)
            completions = await service.engine.generate(decoded, epoch=epoch)
            service.metrics.count_tokens(completions)
            return await asyncio.to_thread(wire.encode_completions, completions)

        return await call(request, "generate", wire.summarize_generate, work, wait)

    async def read_sequences(
        request: Request, verb: str, read: Callable[..., Awaitable[R]], encode: Callable[[R], bytes], wait: float
    ) -> Response:
        async def work(body: bytes, summary: wire.BodySummary) -> bytes:
            decoded, epoch = await decoder.decode(wire.decode_logprobs_request, body, summary)
            return await asyncio.to_thread(encode, await read(decoded, epoch=epoch))

        return await call(request, verb, wire.summarize_logprobs_request, work, wait)

    @router.post("/logprobs", **documented)
    async def logprobs(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the logprob of each trained token, in nats. Columns: engine.http.wire.SEQUENCES, LOGPROBS."""
        return await read_sequences(request, "logprobs", service.engine.logprobs, wire.encode_logprobs, wait)

    @router.post("/values", **documented)
    async def values(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the scalar head's value before each trained token. Columns: engine.http.wire.SEQUENCES, VALUES."""
        return await read_sequences(request, "values", service.engine.values, wire.encode_values, wait)

    return router
