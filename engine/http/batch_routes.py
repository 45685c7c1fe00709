"""Routes of the verbs that carry batches: generate, logprobs and values, and those of committed rows. Their bodies are
Arrow IPC streams.

Bodies are decoded without blocking the server, large ones in a thread, one at a time. The size of the decoded lists is
read from the headers before anything is decompressed, so that the table of calls can reserve the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.security import HTTPBearer

from engine.errors import BadSpec
from engine.http import wire
from engine.http.bodies import (
    MAX_WAIT_SECONDS,
    REQUEST_HEADER,
    STORE_HEADER,
    VERSION,
    VERSION_HEADER,
    CallStatus,
    check_batch_policy,
)
from engine.http.calls import CallResult
from engine.http.errors import STATUSES
from engine.http.service import EngineService
from engine.http.wire import BodySummary
from engine.text.stored_models import context_length_of
from storage.chain.records import PolicyRef, base_model_of
from storage.errors import PermanentStorageError
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

R = TypeVar("R")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

INLINE_BYTES = 1 << 20
"""Bodies up to this size are read in the event loop, and bodies that need at most this memory are decoded there. Larger
ones are handled in the decoder's thread."""
REMEMBERED_CHAINS = 256
"""Number of chains whose base model stays in memory."""

ARROW = {  # documentation of a body or response that is an Arrow stream
    wire.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}
}
Responses = dict[int | str, dict[str, Any]]
_WAIT = Query(ge=0, le=MAX_WAIT_SECONDS, description="Longest wait for the result in seconds; then 202.")
Wait = Annotated[float, _WAIT]
RequestId = Annotated[
    str | None,
    Header(alias=REQUEST_HEADER, pattern="^[0-9a-f]{32}$", description="Id of the call; the same on retries."),
]
CallId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


SEQUENCES = wire.summarize_logprobs_request, wire.decode_logprobs_request
ROWS = wire.summarize_rows_request, wire.decode_rows_request
TOP_ROWS = wire.summarize_rows_request, wire.decode_top_request
"""What summarizes and what decodes the body of a scoring call."""


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
    documented = _documentation()
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

    async def score(
        request: Request, verb: str, form: Any, read: Callable[..., Awaitable[R]], encode: Callable[[R], bytes],
        wait: float,
    ) -> Response:  # fmt: skip
        summarize, decode = form

        async def work(body: bytes, summary: wire.BodySummary) -> bytes:
            decoded, epoch = await decoder.decode(decode, body, summary)
            return await asyncio.to_thread(encode, await read(decoded, epoch=epoch))

        return await call(request, verb, summarize, work, wait)

    @router.post("/logprobs", **documented)
    async def logprobs(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the logprob of each trained token, in nats. Columns: engine.http.wire.SEQUENCES, LOGPROBS."""
        return await score(request, "logprobs", SEQUENCES, service.engine.logprobs, wire.encode_logprobs, wait)

    @router.post("/values", **documented)
    async def values(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the scalar head's value before each trained token. Columns: engine.http.wire.SEQUENCES, VALUES."""
        return await score(request, "values", SEQUENCES, service.engine.values, wire.encode_values, wait)

    @router.post("/logprobs_of_rows", **documented)
    async def logprobs_of_rows(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the logprob of each trained token of committed rows. Columns: engine.http.wire.TABLES, SCORES."""
        read = service.engine.logprobs_of_rows
        return await score(request, "logprobs_of_rows", ROWS, read, wire.encode_scores, wait)

    @router.post("/top_logprobs_of_rows", **documented)
    async def top_logprobs_of_rows(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the most probable tokens before each trained token of committed rows, with their logprobs in nats.
        Columns: engine.http.wire.TABLES, TOP."""
        read = service.engine.top_logprobs_of_rows
        return await score(request, "top_logprobs_of_rows", TOP_ROWS, read, wire.encode_top_logprobs, wait)

    @router.post("/values_of_rows", **documented)
    async def values_of_rows(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the value before each trained token of committed rows. Columns: engine.http.wire.TABLES, SCORES."""
        return await score(request, "values_of_rows", ROWS, service.engine.values_of_rows, wire.encode_scores, wait)

    return router


def _documentation() -> dict[str, Any]:
    """Returns the documentation of the routes whose bodies are Arrow streams, which FastAPI does not parse."""
    streams: Responses = {200: {"content": ARROW, "description": "An Arrow IPC stream"}}
    return {
        "response_class": Response,
        "responses": streams | not_finished(),
        "openapi_extra": {"requestBody": {"content": ARROW, "required": True}},
    }


class Decode(Protocol[T_co]):
    """engine.http.wire.decode_generate, decode_logprobs_request or decode_rows_request."""

    def __call__(self, data: bytes, *, context: int | None) -> T_co: ...


class BodyDecoder:
    """Decodes the bodies of one server. Used in one event loop."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._bases: dict[tuple[str, str, str], ArtifactRef] = {}

    async def summarize(self, summarize: Callable[[bytes], BodySummary], body: bytes) -> BodySummary:
        """Returns the policy of a request and the memory that decoding needs, from the headers. It decodes no list.

        Raises BadSpec.
        """
        summary = await self._run(partial(summarize, body), len(body))
        check_batch_policy(summary.policy)
        return summary

    async def decode(self, decode: Decode[T], body: bytes, summary: BodySummary) -> T:
        """Returns the decoded request. Raises BadSpec, SampleTooLong."""
        # The engine also checks the context length, so only a large body is worth reading it from the store.
        context = None
        if summary.decoded_bytes > INLINE_BYTES:
            context = await asyncio.to_thread(self._context_length, summary.policy)
        return await self._run(partial(decode, body, context=context), summary.decoded_bytes)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        if size <= INLINE_BYTES:
            return work()
        job = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # The memory of the call is released when it ends, so the thread that uses the memory must end first.
            await asyncio.wait({job})
            raise

    def _context_length(self, policy: PolicyRef) -> int | None:
        """Returns the context length of the policy's model in tokens, or None if the store does not have it. Then only
        the engine checks the length."""
        chain = (policy.run, policy.stage, policy.model)
        try:
            if chain not in self._bases:
                base = base_model_of(self.store, policy)
                # Forget the oldest chains: a server sees very many runs.
                while len(self._bases) >= REMEMBERED_CHAINS:
                    del self._bases[next(iter(self._bases))]
                self._bases[chain] = base
            return context_length_of(self.store, self._bases[chain])
        except (PermanentStorageError, ValueError):  # the chain or the config.json is missing or damaged
            return None


def v1_router(service: EngineService) -> APIRouter:
    """Returns a router under /v1, which checks the interface version and the store that the client names."""

    def check_headers(
        version: Annotated[str | None, Header(alias=VERSION_HEADER)] = None,
        store: Annotated[str | None, Header(alias=STORE_HEADER)] = None,
    ) -> None:
        if version is not None and version != str(VERSION):
            raise BadSpec(f"the client has version {version[:20]!r} of the interface, the server {VERSION}: upgrade")
        if store is not None and store != service.store_id:
            raise BadSpec(
                f"the client works on store {store[:40]!r}, this engine on {service.store_id} ({service.store.url}); "
                "give both the same storage url"
            )

    return APIRouter(
        prefix="/v1", tags=["engine"], dependencies=[Depends(check_headers), Depends(HTTPBearer(auto_error=False))]
    )


def error_responses(model: Any, statuses: Iterable[int]) -> Responses:
    """Returns the documentation of error responses with these statuses."""
    return {status: {"model": model, "description": STATUSES[status]} for status in statuses}


def not_finished() -> Responses:
    """Returns the documentation of the response to a call that is not finished."""
    return {202: {"model": CallStatus, "description": "The call is not finished: poll the address in Location."}}
