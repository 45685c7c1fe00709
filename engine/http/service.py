"""One engine behind HTTP: its calls, its state of life, and the boundary where errors become answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import BadSpec
from engine.http.bodies import CallStatus
from engine.http.calls import Answer, Call, CallLimits, CallTable
from engine.http.errors import EXPECTED, INTERNAL, RETRY_AFTER_SECONDS, ErrorBody, body_of, status_of
from engine.http.metrics import Metrics
from engine.http.uploads import ServedEngine
from engine.validation_messages import describe_errors
from storage.store.identity import store_id
from storage.store.objects import ObjectStore

logger = logging.getLogger("ostinato.engine.http")

TICK_SECONDS = 5.0
INLINE_BYTES = 1 << 20
"""Larger bodies are hashed in a thread, since 256 MiB would hold up the event loop for half a second."""
State = Literal["starting", "ready", "draining"]


@dataclass(frozen=True)
class ServerOptions:
    """What the operator decides."""

    token: str | None = field(default=None, repr=False)
    """Bearer token; None: loopback only."""
    max_body_bytes: int = 256 << 20
    limits: CallLimits = field(default_factory=CallLimits)


@dataclass(frozen=True)
class Note:
    """What a route tells the request log."""

    run: str = "-"


class Service:
    """The state of one server. Lives in one event loop."""

    def __init__(self, engine: ServedEngine, store: ObjectStore, options: ServerOptions) -> None:
        self.engine, self.store, self.options = engine, store, options
        self.store_id = store_id(store)
        self.calls = CallTable(options.limits)
        self.metrics = Metrics()
        self.state: State = "starting"
        self._ready = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the table small and the gauges fresh. The engine may be busy for minutes, the table must not wait."""
        ticking = [asyncio.create_task(self._sweep()), asyncio.create_task(self._probe())]
        try:
            yield
        finally:
            for task in ticking:
                task.cancel()

    async def _sweep(self) -> None:
        while True:
            self.calls.sweep()
            await asyncio.sleep(TICK_SECONDS)

    async def _probe(self) -> None:
        while True:
            try:
                info = await self.engine.info()
            except Exception:  # the boundary to the engine: a defect there must not end the probing
                logger.exception("the engine does not tell about itself")
            else:
                self.metrics.memory.set(info.memory_bytes)
                self.metrics.memory_used.set(info.memory_used_bytes)
                self.metrics.show_cluster(info.cluster)
                self.state = "ready" if self.state == "starting" else self.state
                self._ready.set()
            await asyncio.sleep(TICK_SECONDS)

    async def until_ready(self, *others: asyncio.Task[Any]) -> None:
        """Returns when the engine has answered for the first time, or when one of the others has ended."""
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, *others}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def drain(self, seconds: float) -> bool:
        """Takes no more calls and closes the engine: the running call ends, those that wait are EngineBusy. False when
        that took longer than `seconds`."""
        self.state = "draining"
        closing = asyncio.create_task(self.engine.close())
        await asyncio.wait({closing}, timeout=seconds)
        if not closing.done():
            return False
        closing.result()
        tasks = {call.task for call in self.calls.calls.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        return True

    # -- calls -------------------------------------------------------------------------------------------------

    async def call(
        self,
        request: Request,
        verb: str,
        work: Callable[[], Awaitable[Answer]],
        *,
        wait: float,
        run: str = "-",
        decoded_bytes: int = 0,
    ) -> Response:
        """Submits or joins the call of this request, and answers 200, 202 or the call's error. `decoded_bytes` is what
        the decoded body needs in memory, besides the body itself."""
        body = await request.body()
        id = request.state.request_id
        with self.calls.held(len(body)):
            sha256 = await _sha256(body)
        call = self.calls.submit(
            id,
            lambda: self._guarded(verb, id, work),
            verb=verb,
            digest=sha256,
            run=run,
            size=len(body) + decoded_bytes,
        )
        return await self.answer(request, call, wait=wait)

    async def answer(self, request: Request, call: Call, *, wait: float) -> Response:
        """The state of a call after at most `wait` seconds."""
        answer = await self.calls.wait(call, wait)
        request.state.note = Note(run=call.run)
        if answer is None:
            status = CallStatus(id=call.id).model_dump_json()
            headers = {"Location": f"/v1/calls/{call.id}"}
            return Response(status, 202, headers, "application/json")
        return response_of(answer)

    async def _guarded(self, verb: str, id: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The boundary: whatever a call ends with becomes an answer."""
        started = time.monotonic()
        try:
            answer = await work()
        except EXPECTED as error:
            answer = error_answer(body_of(error, id))
        except ValidationError as error:
            answer = error_answer(body_of(BadSpec(describe_errors(error.errors())), id))
        except Exception:  # the boundary to the engine: a defect there must not end the server
            logger.exception("%s %s failed", verb, id)
            answer = error_answer(internal_error(id))
        self.metrics.finished(verb, answer.status, time.monotonic() - started)
        return answer


async def _sha256(data: bytes) -> str:
    if len(data) <= INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()


def json_answer(result: BaseModel) -> Answer:
    return Answer(200, result.model_dump_json().encode())


def error_answer(body: ErrorBody) -> Answer:
    return Answer(status_of(body.error), body.model_dump_json().encode())


def internal_error(request_id: str) -> ErrorBody:
    message = f"a defect of the engine server; its log has the traceback under request id {request_id}"
    return ErrorBody(error=INTERNAL, message=message, request_id=request_id)


def response_of(answer: Answer) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if answer.status == 503 else None
    return Response(answer.body, answer.status, headers, answer.media_type)
