"""`create_app`: the FastAPI app of an engine server, with the engine's verbs, polling of calls, and monitoring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from engine.errors import BadSpec, EngineBusy
from engine.http.batch_routes import (
    ARROW,
    CallId,
    RequestId,
    Responses,
    Wait,
    batch_routes,
    error_responses,
    not_finished,
    v1_router,
)
from engine.http.bodies import (
    VERSION,
    Acknowledged,
    CreatePolicyBody,
    ExportModelBody,
    Health,
    ImportModelBody,
    MeasureBody,
    Ready,
    ReleaseBody,
    SaveCheckpointBody,
    ScaleSamplersBody,
    ServedEngine,
    ServerInfo,
    StagePolicyBody,
    StepBody,
    import_upload,
)
from engine.http.calls import CallResult
from engine.http.errors import EXPECTED_ERRORS, GUARD_STATUSES, STATUSES, ErrorBody, NoSuchRoute, error_body
from engine.http.guard import Guard
from engine.http.openai.api import openai_router
from engine.http.openai.models import OpenAIErrorBody
from engine.http.report_links import PREFIX, is_proof
from engine.http.service import MEDIA_TYPE as METRICS_TYPE
from engine.http.service import EngineService, ServerOptions, error_result, json_result, response_of
from engine.models.folder import registered_model
from engine.protocol import EngineInfo, Measurement, SamplerScale
from engine.validation_messages import describe_errors
from storage.chain.records import CommitRecord, PolicyRef
from storage.errors import InvalidKey, ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""Content security policy of a report. A report shows text of models, which is escaped; the policy also forbids that
anything in it runs or loads."""


def create_app(engine: ServedEngine, store: ObjectStore, options: ServerOptions | None = None) -> FastAPI:
    """Returns the app of a server over `engine`. `app.state.service` is its EngineService. It reads the store's id
    once."""
    service = EngineService(engine, store, options or ServerOptions())

    # the background tasks run as long as the app
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="Ostinato engine",
        version=str(VERSION),
        docs_url=None,  # that page would load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service

    # routes
    for routes in (_monitoring_routes, _policy_routes, _checkpoint_routes, _run_routes, batch_routes, _call_routes):
        app.include_router(routes(service), responses=error_responses(ErrorBody, STATUSES))
    app.include_router(report_routes(service))
    openai_errors = error_responses(ErrorBody | OpenAIErrorBody, GUARD_STATUSES)
    app.include_router(openai_router(engine, store), responses=openai_errors)

    # what happens before a route, and what becomes of errors after it
    app.add_middleware(Guard, service=service)
    for error_class in EXPECTED_ERRORS:
        app.add_exception_handler(error_class, _on_expected)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    return app


# -- monitoring -------------------------------------------------------------------------------------------------


def _monitoring_routes(service: EngineService) -> APIRouter:
    router = APIRouter(tags=["pages"])

    @router.get("/health")
    async def health() -> Health:
        """Answers as long as the process runs."""
        return Health()

    @router.get("/ready")
    async def ready() -> Ready:
        """Answers 200 while the engine takes calls, and 503 while it starts or drains."""
        if service.state != "ready":
            raise EngineBusy(f"the engine is {service.state}")
        return Ready(waiting=service.calls.waiting())

    @router.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        service.metrics.waiting.set(service.calls.waiting())
        return Response(service.metrics.render(), media_type=METRICS_TYPE)

    return router


# -- verbs with JSON bodies ------------------------------------------------------------------------------------


Work = Callable[[], Awaitable[BaseModel]]


class Submit(Protocol):
    """Submits the call of a request. The last part of the request's path is the verb."""

    async def __call__(self, request: Request, work: Work, *, wait: float, run: str = "-") -> Response: ...


def _json_submitter(service: EngineService) -> Submit:
    """Returns a function that submits the call of a request with a JSON body."""

    async def call(request: Request, work: Work, *, wait: float, run: str = "-") -> Response:
        async def run_call() -> CallResult:
            return json_result(await work())

        return await service.submit(request, request.url.path.rpartition("/")[2], run_call, wait=wait, run=run)

    return call


def _policy_routes(service: EngineService) -> APIRouter:
    """Routes that create policies, measure losses and take gradient steps."""
    router, call = v1_router(service), _json_submitter(service)
    engine, store = service.engine, service.store

    @router.post("/import_model", response_model=ArtifactRef, responses=not_finished())
    async def import_model(
        body: ImportModelBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Imports a registered model by its key, or a folder that was uploaded to the store."""

        # an upload is a folder of the client's machine, whose files are in the store
        async def work() -> ArtifactRef:
            if body.upload is None:
                return await asyncio.to_thread(registered_model, store, body.source)
            return await import_upload(engine, store, body.source, body.upload, provenance=body.provenance)

        return await call(request, work, wait=wait)

    @router.post("/create_policy", response_model=PolicyRef, responses=not_finished())
    async def create_policy(
        body: CreatePolicyBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Creates a chain and returns its policy 0."""
        return await call(request, lambda: engine.create_policy(body.spec), wait=wait, run=body.spec.run)

    @router.post("/measure", response_model=Measurement, responses=not_finished())
    async def measure(body: MeasureBody, request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Computes a loss of a committed batch under a policy, without a gradient."""
        work = partial(engine.measure, body.request, epoch=body.epoch)
        return await call(request, work, wait=wait, run=body.request.policy.run)

    @router.post("/take_gradient_step", response_model=CommitRecord, responses=not_finished())
    async def take_gradient_step(
        body: StepBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Takes a gradient step exactly once and returns its record."""

        async def work() -> CommitRecord:
            record = await engine.take_gradient_step(body.request, epoch=body.epoch)
            service.metrics.steps.inc()
            return record

        return await call(request, work, wait=wait, run=body.request.parent.run)

    return router


def _checkpoint_routes(service: EngineService) -> APIRouter:
    """Routes that write checkpoints and models."""
    router, call, engine = v1_router(service), _json_submitter(service), service.engine

    @router.post("/begin_checkpoint", response_model=Acknowledged, responses=not_finished())
    async def begin_checkpoint(
        body: SaveCheckpointBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Begins to save the policy's checkpoint. The response does not wait for the upload."""

        async def work() -> Acknowledged:
            await engine.begin_checkpoint(body.policy, provenance=body.provenance, name=body.name, epoch=body.epoch)
            return Acknowledged()

        return await call(request, work, wait=wait, run=body.policy.run)

    # unlike begin_checkpoint, the response waits until the checkpoint is committed
    @router.post("/save_checkpoint", response_model=ArtifactRef, responses=not_finished())
    async def save_checkpoint(
        body: SaveCheckpointBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Saves weights and optimizer of a policy in the store."""
        return await call(
            request,
            lambda: engine.save_checkpoint(body.policy, provenance=body.provenance, name=body.name, epoch=body.epoch),
            wait=wait,
            run=body.policy.run,
        )

    @router.post("/export_model", response_model=ArtifactRef, responses=not_finished())
    async def export_model(
        body: ExportModelBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Publishes the policy in the registry as a plain Hugging Face folder."""
        return await call(
            request,
            lambda: engine.export_model(
                body.policy, body.model_name, provenance=body.provenance, dtype=body.dtype, epoch=body.epoch
            ),
            wait=wait,
            run=body.policy.run,
        )

    return router


def _run_routes(service: EngineService) -> APIRouter:
    """Routes that stage a policy, release a run, scale the samplers and describe the engine."""
    router, call, engine = v1_router(service), _json_submitter(service), service.engine

    @router.post("/stage_policy", response_model=Acknowledged, responses=not_finished())
    async def stage_policy(
        body: StagePolicyBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Takes a copy of the policy's weights for the samplers."""

        async def work() -> Acknowledged:
            await engine.stage_policy(body.policy, epoch=body.epoch)
            return Acknowledged()

        return await call(request, work, wait=wait, run=body.policy.run)

    @router.post("/release", response_model=Acknowledged, responses=not_finished())
    async def release(body: ReleaseBody, request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Frees what the engine holds for a run that the client has finished with for now."""

        async def work() -> Acknowledged:
            await engine.release(body.run, epoch=body.epoch)
            return Acknowledged()

        return await call(request, work, wait=wait, run=body.run)

    @router.post("/scale_samplers", response_model=SamplerScale, responses=not_finished())
    async def scale_samplers(
        body: ScaleSamplersBody, request: Request, wait: Wait = 10, request_id: RequestId = None
    ) -> Response:
        """Changes the number of vLLM replicas while calls run. The response does not wait for them."""
        return await call(request, partial(engine.scale_samplers, body.samplers), wait=wait)

    @router.get("/info", response_model=EngineInfo, responses=not_finished())
    async def info(request: Request, wait: Wait = 10, request_id: RequestId = None) -> Response:
        """Returns the engine's numerics, memory and cluster."""
        return await call(request, engine.info, wait=wait)

    # not a call: it is answered while the engine is busy
    @router.get("/server")
    async def server() -> ServerInfo:
        """Returns what a client must know before its first call."""
        options = service.options
        return ServerInfo(
            store_id=service.store_id,
            max_body_bytes=options.max_body_bytes,
            max_calls=options.limits.waiting_of_verb,
        )

    return router


# -- calls -----------------------------------------------------------------------------------------------------


def _call_routes(service: EngineService) -> APIRouter:
    router = v1_router(service)
    results: Responses = {200: {"content": {"application/json": {}, **ARROW}, "description": "The call's result"}}

    @router.get("/calls/{id}", response_class=Response, responses=results | not_finished())
    async def poll(request: Request, id: CallId, wait: Wait = 10) -> Response:
        """Returns a call's result, or 202 after `wait` seconds. After 404 UnknownCall, submit it again with the same
        id."""
        return await service.respond(request, service.calls.find(id), wait=wait)

    @router.delete("/calls/{id}", status_code=204, response_class=Response)
    async def cancel(id: CallId) -> None:
        """Cancels a call if it has not begun, and forgets its result. An unknown id is accepted."""
        service.calls.drop(id)

    return router


# -- errors ----------------------------------------------------------------------------------------------------


async def _on_expected(request: Request, error: Exception) -> Response:
    return response_of(error_result(error_body(error, request.state.request_id)))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = {"body": error.body, "query": request.query_params, "header": request.headers, "path": request.path_params}
    message = describe_errors(error.errors(), parts)
    return response_of(error_result(error_body(BadSpec(message), request.state.request_id)))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    error_class = BadSpec if error.status_code == 400 else NoSuchRoute
    body = error_body(error_class(f"{request.method} of this path: {error.detail}"), request.state.request_id)
    response = response_of(error_result(body))
    if error.status_code in (404, 405):
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
    return response


def report_routes(service: EngineService) -> APIRouter:
    """Returns the route with one page per run. A wrong proof gives 404, as a run without a report does."""
    router = APIRouter()

    @router.get(f"{PREFIX}{{run:path}}", include_in_schema=False)
    def report(run: str, proof: str = "") -> HTMLResponse:
        # A wrong proof and a missing report give the same response, so that no one can find out which runs exist.
        if is_proof(proof, service.store_id, run):
            try:
                page = service.store.get(keys.report(run))
                return HTMLResponse(page, headers={"content-security-policy": POLICY, "referrer-policy": "no-referrer"})
            except (ObjectNotFound, InvalidKey):
                pass
        raise HTTPException(404, "there is no such report; ask for the address in the run's page")

    return router
