"""`EngineService`: the state of an engine server. It holds the engine, its table of calls and its metrics, and turns
every error of a call into an HTTP response."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import BadSpec
from engine.http.bodies import CallStatus, ServedEngine
from engine.http.calls import CallLimits, CallResult, CallTable, SubmittedCall
from engine.http.errors import EXPECTED_ERRORS, INTERNAL, RETRY_AFTER_SECONDS, ErrorBody, error_body, http_status
from engine.protocol import ClusterInfo, Completion
from engine.validation_messages import describe_errors
from storage.store.objects import ObjectStore, store_id

logger = logging.getLogger("ostinato.engine.http")

TICK_SECONDS = 5.0
"""Pause between two sweeps of the table of calls, and between two updates of the gauges."""
INLINE_BYTES = 1 << 20
"""Larger bodies are hashed in a thread, since hashing 256 MiB would block the event loop for half a second."""
State = Literal["starting", "ready", "draining"]

SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Buckets of the histogram of call times."""
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server."""

    token: str | None = field(default=None, repr=False)
    """Bearer token that clients must send. None: only clients on this machine may call."""
    max_body_bytes: int = 256 << 20
    """Largest body of a request."""
    limits: CallLimits = field(default_factory=CallLimits)


@dataclass(frozen=True)
class LogContext:
    """What a route adds to the log line of its request."""

    run: str = "-"
    """Run that the request belongs to."""


class EngineService:
    """The state of one server. Used in one event loop."""

    def __init__(self, engine: ServedEngine, store: ObjectStore, options: ServerOptions) -> None:
        self.engine, self.store, self.options = engine, store, options
        self.store_id = store_id(store)
        self.calls = CallTable(options.limits)
        self.metrics = Metrics()
        self.state: State = "starting"
        self._ready = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweeps the table of calls and updates the gauges while the server runs.

        They are two tasks, since the engine may take minutes to give its gauges.
        """
        tasks = [asyncio.create_task(self._sweep_calls()), asyncio.create_task(self._update_gauges())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def _sweep_calls(self) -> None:
        while True:
            self.calls.sweep()
            await asyncio.sleep(TICK_SECONDS)

    async def _update_gauges(self) -> None:
        while True:
            try:
                info = await self.engine.info()
            except Exception:  # boundary to the engine: a defect there must not end this task
                logger.exception("the engine did not answer a request for its state")
            else:
                self.metrics.memory.set(info.memory_bytes)
                self.metrics.memory_used.set(info.memory_used_bytes)
                self.metrics.show_cluster(info.cluster)
                # The first reply shows that the device works. A server that drains already stays in that state.
                if self.state == "starting":
                    self.state = "ready"
                self._ready.set()
            await asyncio.sleep(TICK_SECONDS)

    async def until_ready(self, *others: asyncio.Task[Any]) -> None:
        """Waits until the engine has answered for the first time, or one of `others` has ended."""
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, *others}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def drain(self, seconds: float) -> bool:
        """Stops taking calls and closes the engine. The running call ends, and waiting calls fail with EngineBusy.

        Returns False if the engine did not close within `seconds`.
        """
        self.state = "draining"
        closing = asyncio.create_task(self.engine.close())
        await asyncio.wait({closing}, timeout=seconds)
        if not closing.done():
            return False
        closing.result()

        # The engine is closed, so the tasks of its last calls end in a moment. Let them set their results.
        tasks = {call.task for call in self.calls.calls.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        return True

    # -- calls -------------------------------------------------------------------------------------------------

    async def submit(
        self,
        request: Request,
        verb: str,
        work: Callable[[], Awaitable[CallResult]],
        *,
        wait: float,
        run: str = "-",
        decoded_bytes: int = 0,
    ) -> Response:
        """Submits the call of this request, or joins the call with its id. Responds with 200, 202 or the call's error.

        `decoded_bytes` is the memory that the decoded body needs in addition to the body.
        """
        # The digest tells a retry of the call from another call with the same id.
        body = await request.body()
        id = request.state.request_id
        with self.calls.reserved(len(body)):
            sha256 = await _sha256(body)
        call = self.calls.submit(
            id,
            lambda: self._run_guarded(verb, id, work),
            verb=verb,
            digest=sha256,
            run=run,
            size=len(body) + decoded_bytes,
        )
        return await self.respond(request, call, wait=wait)

    async def respond(self, request: Request, call: SubmittedCall, *, wait: float) -> Response:
        """Responds with the result of a call, or with 202 if there is none after `wait` seconds."""
        result = await self.calls.wait(call, wait)
        request.state.log_context = LogContext(run=call.run)
        if result is None:
            status = CallStatus(id=call.id).model_dump_json()
            headers = {"Location": f"/v1/calls/{call.id}"}
            return Response(status, 202, headers, "application/json")
        return response_of(result)

    async def _run_guarded(self, verb: str, id: str, work: Callable[[], Awaitable[CallResult]]) -> CallResult:
        """Runs a call and turns its result or its error into a CallResult. It is the boundary to the engine."""
        started = time.monotonic()
        try:
            result = await work()
        except EXPECTED_ERRORS as error:
            result = error_result(error_body(error, id))
        except ValidationError as error:
            result = error_result(error_body(BadSpec(describe_errors(error.errors())), id))
        except Exception:  # a defect of the engine must not end the server
            logger.exception("%s %s failed", verb, id)
            result = error_result(internal_error(id))
        self.metrics.count_call(verb, result.status, time.monotonic() - started)
        return result


async def _sha256(data: bytes) -> str:
    if len(data) <= INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()


def json_result(value: BaseModel) -> CallResult:
    return CallResult(200, value.model_dump_json().encode())


def error_result(body: ErrorBody) -> CallResult:
    return CallResult(http_status(body.error), body.model_dump_json().encode())


def internal_error(request_id: str) -> ErrorBody:
    message = f"a defect of the engine server; its log has the traceback under request id {request_id}"
    return ErrorBody(error=INTERNAL, message=message, request_id=request_id)


def response_of(result: CallResult) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if result.status == 503 else None
    return Response(result.body, result.status, headers, result.media_type)


class Metrics:
    """The metrics of /metrics. Labels are verbs, methods and statuses, but not runs, whose number is unbounded."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter("ostinato_calls", "Finished calls.", ["verb", "status"], registry=registry)
        self.seconds = Histogram(
            "ostinato_call_seconds", "From acceptance to result.", ["verb"], buckets=SECONDS, registry=registry
        )
        self.requests = Counter("ostinato_http_requests", "HTTP answers.", ["method", "status"], registry=registry)
        self.waiting = Gauge("ostinato_calls_waiting", "Calls that are not finished.", registry=registry)
        self.tokens = Counter("ostinato_generated_tokens", "Tokens sampled.", registry=registry)
        self.steps = Counter(
            "ostinato_gradient_steps", "Calls of take_gradient_step that ended with a record.", registry=registry
        )
        self.memory_used = Gauge(
            "ostinato_memory_used_bytes", "Weights, moments and gradients held by the engine.", registry=registry
        )
        self.memory = Gauge("ostinato_memory_bytes", "What the engine may fill with them.", registry=registry)
        self.cluster: dict[str, Gauge] = {}

    def show_cluster(self, cluster: ClusterInfo | None) -> None:
        """Sets the gauges of the Ray cluster. They exist from the first connection to a cluster on."""
        if cluster is None:
            for gauge in self.cluster.values():
                gauge.set(0)
            return
        self._gauge("ostinato_cluster_nodes", "Machines of the Ray cluster.").set(cluster.nodes)
        self._gauge("ostinato_cluster_gpus", "GPUs of the Ray cluster.").set(cluster.gpus)
        self._gauge("ostinato_cluster_gpus_free", "GPUs that nothing holds.").set(cluster.free_gpus)
        for name, description, actors in (
            ("ranks", "Trainer ranks", cluster.ranks),
            ("replicas", "Replicas of vLLM", cluster.replicas),
        ):
            self._gauge(f"ostinato_{name}", f"{description} that the engine wants.").set(actors.wanted)
            self._gauge(f"ostinato_{name}_alive", f"{description} that are up.").set(actors.alive)
            self._gauge(f"ostinato_{name}_restarts", f"{description}: starts after the first.").set(actors.restarts)

    def _gauge(self, name: str, description: str) -> Gauge:
        if name not in self.cluster:
            self.cluster[name] = Gauge(name, description, registry=self.registry)
        return self.cluster[name]

    def count_call(self, verb: str, status: int, seconds: float) -> None:
        self.calls.labels(verb, str(status)).inc()
        self.seconds.labels(verb).observe(seconds)

    def count_tokens(self, completions: list[Completion]) -> None:
        self.tokens.inc(sum(len(completion.token_ids) for completion in completions))

    def render(self) -> bytes:
        return generate_latest(self.registry)
