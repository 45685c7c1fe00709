"""The FastAPI app over one engine: verbs, calls, and the pages that watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from engine.errors import BadSpec, EngineBusy
from engine.http import wire
from engine.http.bodies import (
    MAX_WAIT_SECONDS,
    REQUEST_HEADER,
    STORE_HEADER,
    VERSION,
    VERSION_HEADER,
    Acknowledged,
    CallStatus,
    CreatePolicyBody,
    ExportModelBody,
    Health,
    ImportModelBody,
    Ready,
    ReleaseBody,
    SaveCheckpointBody,
    ServerInfo,
    StepBody,
)
from engine.http.calls import Answer
from engine.http.decoding import BodyDecoder
from engine.http.errors import DOOR, EXPECTED, STATUSES, ErrorBody, NoSuchRoute, body_of
from engine.http.guard import Guard
from engine.http.metrics import MEDIA_TYPE as METRICS_TYPE
from engine.http.openai.api import openai_router
from engine.http.openai.models import OpenAIErrorBody
from engine.http.reports import report_routes
from engine.http.service import ServerOptions, Service, error_answer, json_answer, response_of
from engine.http.uploads import ServedEngine, import_upload
from engine.models.folder import registered_model
from engine.protocol import EngineInfo
from engine.validation_messages import describe_errors
from storage.chain.records import CommitRecord, PolicyRef
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

R = TypeVar("R")
_ARROW = {wire.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
Responses = dict[int | str, dict[str, Any]]
_WAIT = Query(ge=0, le=MAX_WAIT_SECONDS, description="Longest wait for the result, seconds; then 202.")
Wait = Annotated[float, _WAIT]
RequestId = Annotated[
    str | None,
    Header(alias=REQUEST_HEADER, pattern="^[0-9a-f]{32}$", description="Made once per call, kept over its retries."),
]
CallId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


def create_app(engine: ServedEngine, store: ObjectStore, options: ServerOptions | None = None) -> FastAPI:
    """The app; `app.state.service` is its Service. Contacts the store once, for its id."""
    service = Service(engine, store, options or ServerOptions())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="Ostinato engine",
        version=str(VERSION),
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    for routes in (_pages, _policies, _writing, _about, _batches, _calls):
        app.include_router(routes(service), responses=_errors(ErrorBody, STATUSES))
    app.include_router(report_routes(service))
    app.include_router(openai_router(engine, store), responses=_errors(ErrorBody | OpenAIErrorBody, DOOR))
    app.add_middleware(Guard, service=service)
    for kind in EXPECTED:
        app.add_exception_handler(kind, _on_expected)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    return app


# -- pages -----------------------------------------------------------------------------------------------------


def _pages(service: Service) -> APIRouter:
    router = APIRouter(tags=["pages"])

    @router.get("/health")
    async def health() -> Health:
        """The process answers."""
        return Health()

    @router.get("/ready")
    async def ready() -> Ready:
        """The engine takes calls; 503 while it starts or drains."""
        if service.state != "ready":
            raise EngineBusy(f"the engine is {service.state}")
        return Ready(waiting=service.calls.waiting())

    @router.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        service.metrics.waiting.set(service.calls.waiting())
        return Response(service.metrics.render(), media_type=METRICS_TYPE)

    return router


def _v1(service: Service) -> APIRouter:
    """A router whose callers say which interface and which store they mean."""

    def same_interface(
        version: Annotated[str | None, Header(alias=VERSION_HEADER)] = None,
        store: Annotated[str | None, Header(alias=STORE_HEADER)] = None,
    ) -> None:
        if version is not None and version != str(VERSION):
            raise BadSpec(f"the caller speaks version {version[:20]!r} of the interface, the server {VERSION}: upgrade")
        if store is not None and store != service.store_id:
            raise BadSpec(
                f"the caller works on store {store[:40]!r}, this engine on {service.store_id} ({service.store.url}); "
                "give both the same storage url"
            )

    return APIRouter(
        prefix="/v1", tags=["engine"], dependencies=[Depends(same_interface), Depends(HTTPBearer(auto_error=False))]
    )


# -- verbs with JSON bodies ------------------------------------------------------------------------------------


Work = Callable[[], Awaitable[BaseModel]]


class Submit(Protocol):
    """Submits the call of a request, whose verb is the last part of its path."""

    async def __call__(self, request: Request, work: Work, *, wait: float, run: str = "-") -> Response: ...


def _submitting(service: Service) -> Submit:
    async def call(request: Request, work: Work, *, wait: float, run: str = "-") -> Response:
        async def answer() -> Answer:
            return json_answer(await work())

        return await service.call(request, request.url.path.rpartition("/")[2], answer, wait=wait, run=run)

    return call


def _policies(service: Service) -> APIRouter:
    router, call = _v1(service), _submitting(service)
    engine, store = service.engine, service.store

    @router.post("/import_model", response_model=ArtifactRef, responses=_waiting())
    async def import_model(
        body: ImportModelBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """A registered model by key, or a folder that was uploaded to the store."""

        async def work() -> ArtifactRef:
            if body.upload is None:
                return await asyncio.to_thread(registered_model, store, body.source)
            return await import_upload(engine, store, body.source, body.upload, provenance=body.provenance)

        return await call(request, work, wait=wait)

    @router.post("/create_policy", response_model=PolicyRef, responses=_waiting())
    async def create_policy(
        body: CreatePolicyBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """The root of a chain; its policy 0."""
        return await call(request, lambda: engine.create_policy(body.spec), wait=wait, run=body.spec.run)

    @router.post("/take_gradient_step", response_model=CommitRecord, responses=_waiting())
    async def take_gradient_step(
        body: StepBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """The step, exactly once; its record."""

        async def work() -> CommitRecord:
            record = await engine.take_gradient_step(body.request, epoch=body.epoch)
            service.metrics.steps.inc()
            return record

        return await call(request, work, wait=wait, run=body.request.parent.run)

    return router


def _writing(service: Service) -> APIRouter:
    router, call, engine = _v1(service), _submitting(service), service.engine

    @router.post("/begin_checkpoint", response_model=Acknowledged, responses=_waiting())
    async def begin_checkpoint(
        body: SaveCheckpointBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Takes the policy's checkpoint; answered while it is on its way to the store."""

        async def work() -> Acknowledged:
            await engine.begin_checkpoint(body.policy, provenance=body.provenance, name=body.name, epoch=body.epoch)
            return Acknowledged()

        return await call(request, work, wait=wait, run=body.policy.run)

    @router.post("/save_checkpoint", response_model=ArtifactRef, responses=_waiting())
    async def save_checkpoint(
        body: SaveCheckpointBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Weights and optimizer of a policy, in the store."""
        return await call(
            request,
            lambda: engine.save_checkpoint(
                body.policy, provenance=body.provenance, name=body.name, epoch=body.epoch
            ),
            wait=wait,
            run=body.policy.run,
        )

    @router.post("/export_model", response_model=ArtifactRef, responses=_waiting())
    async def export_model(
        body: ExportModelBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """The policy as a plain Hugging Face folder in the registry."""
        return await call(
            request,
            lambda: engine.export_model(
                body.policy, body.model_name, provenance=body.provenance, epoch=body.epoch
            ),
            wait=wait,
            run=body.policy.run,
        )

    return router


def _about(service: Service) -> APIRouter:
    router, call, engine = _v1(service), _submitting(service), service.engine

    @router.post("/release", response_model=Acknowledged, responses=_waiting())
    async def release(
        body: ReleaseBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """The caller is done with the run for now."""

        async def work() -> Acknowledged:
            await engine.release(body.run, epoch=body.epoch)
            return Acknowledged()

        return await call(request, work, wait=wait, run=body.run)

    @router.get("/info", response_model=EngineInfo, responses=_waiting())
    async def info(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """What the engine is and what it has room for."""
        return await call(request, engine.info, wait=wait)

    @router.get("/server")
    async def server() -> ServerInfo:
        """What a client must know before its first call."""
        return ServerInfo(store_id=service.store_id, max_body_bytes=service.options.max_body_bytes)

    return router


# -- verbs with batches ----------------------------------------------------------------------------------------


def _submitting_batches(service: Service, decoder: BodyDecoder) -> Callable[..., Awaitable[Response]]:
    async def call(
        request: Request,
        verb: str,
        announce: Callable[[bytes], wire.Announced],
        work: Callable[[bytes, wire.Announced], Awaitable[bytes]],
        wait: float,
    ) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != wire.MEDIA_TYPE:
            raise BadSpec(f"the content type is {kind[:60]!r}; send an Arrow IPC stream as {wire.MEDIA_TYPE}")
        body = await request.body()
        with service.calls.held(len(body)):
            announced = await decoder.announced(announce, body)

        async def answer() -> Answer:
            return Answer(200, await work(body, announced), wire.MEDIA_TYPE)

        return await service.call(
            request, verb, answer, wait=wait, run=announced.policy.run, decoded_bytes=announced.decoded_bytes
        )

    return call


def _batches(service: Service) -> APIRouter:
    router = _v1(service)
    streams: Responses = {200: {"content": _ARROW, "description": "An Arrow IPC stream"}}
    documented: dict[str, Any] = {
        "response_class": Response,
        "responses": streams | _waiting(),
        "openapi_extra": {"requestBody": {"content": _ARROW, "required": True}},
    }
    decoder = BodyDecoder(service.store)
    call = _submitting_batches(service, decoder)

    @router.post("/generate", **documented)
    async def generate(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Completions in the order of the prompts. Columns: engine.http.wire.GENERATE, COMPLETIONS."""

        async def work(body: bytes, announced: wire.Announced) -> bytes:
            decoded, epoch = await decoder.decoded(wire.decode_generate, body, announced)
            completions = await service.engine.generate(decoded, epoch=epoch)
            service.metrics.generated(completions)
            return await asyncio.to_thread(wire.encode_completions, completions)

        return await call(request, "generate", wire.announced_generate, work, wait)

    async def read(
        request: Request, verb: str, ask: Callable[..., Awaitable[R]], encode: Callable[[R], bytes], wait: float
    ) -> Response:
        async def work(body: bytes, announced: wire.Announced) -> bytes:
            decoded, epoch = await decoder.decoded(wire.decode_logprobs_request, body, announced)
            return await asyncio.to_thread(encode, await ask(decoded, epoch=epoch))

        return await call(request, verb, wire.announced_logprobs_request, work, wait)

    @router.post("/logprobs", **documented)
    async def logprobs(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Nats of each trained token. Columns: engine.http.wire.SEQUENCES, LOGPROBS."""
        return await read(request, "logprobs", service.engine.logprobs, wire.encode_logprobs, wait)

    @router.post("/values", **documented)
    async def values(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """What a scalar head gives before each trained token. Columns: engine.http.wire.SEQUENCES, VALUES."""
        return await read(request, "values", service.engine.values, wire.encode_values, wait)

    return router


# -- calls -----------------------------------------------------------------------------------------------------


def _calls(service: Service) -> APIRouter:
    router = _v1(service)
    results: Responses = {200: {"content": {"application/json": {}, **_ARROW}, "description": "The call's result"}}

    @router.get("/calls/{id}", response_class=Response, responses=results | _waiting())
    async def poll(request: Request, id: CallId, wait: Wait = 10) -> Response:
        """The result of a call, or 202 after `wait` seconds. 404 UnknownCall: submit it again under the same id."""
        return await service.answer(request, service.calls.find(id), wait=wait)

    @router.delete("/calls/{id}", status_code=204, response_class=Response)
    async def take_back(id: CallId) -> None:
        """The caller wants no answer: a call that has not begun is dropped. Unknown ones are fine."""
        service.calls.drop(id)

    return router


# -- errors ----------------------------------------------------------------------------------------------------


def _errors(model: Any, statuses: Iterable[int]) -> Responses:
    return {status: {"model": model, "description": STATUSES[status]} for status in statuses}


def _waiting() -> Responses:
    return {202: {"model": CallStatus, "description": "Not finished: ask at Location"}}


async def _on_expected(request: Request, error: Exception) -> Response:
    return response_of(error_answer(body_of(error, request.state.request_id)))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = {"body": error.body, "query": request.query_params, "header": request.headers, "path": request.path_params}
    message = describe_errors(error.errors(), parts)
    return response_of(error_answer(body_of(BadSpec(message), request.state.request_id)))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = BadSpec if error.status_code == 400 else NoSuchRoute
    body = body_of(known(f"{request.method} of this path: {error.detail}"), request.state.request_id)
    response = response_of(error_answer(body))
    if error.status_code in (404, 405):
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
    return response
