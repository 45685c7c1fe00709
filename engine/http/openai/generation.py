"""`Generation`: one generate call of the engine, whose tokens arrive one by one in the event loop of the request.

The engine samples in a thread of its own and passes each token to the event loop. When the client has disconnected, or
every answer has met a stop string, the next token ends the call. A call that need not be streamed runs in the engine
as a whole; if its client disconnects, it is cancelled only while it waits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

from starlette.requests import Request

from engine.errors import Fenced
from engine.protocol import Completion, Engine, GenerateRequest, OnToken
from engine.text.answer_builder import AnswerBuilder

T = TypeVar("T")


class StreamingEngine(Protocol):
    """An engine that calls `on_token` with each token as it is sampled."""

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: OnToken | None = None
    ) -> list[Completion]: ...


def is_streaming(engine: Engine) -> TypeGuard[StreamingEngine]:
    return "on_token" in inspect.signature(engine.generate).parameters


class GenerationAbandoned(Exception):
    """Raised in the engine's thread to end a call whose tokens are not needed any more."""


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to the answer `index`."""

    index: int
    token_count: int
    """Number of added tokens."""
    text: str
    """Text that they released."""


class Generation:
    """Runs one request and feeds its tokens to `answers`; `answers[i]` belongs to `request.prompts[i]`.

    `epoch(refresh)` returns the fencing epoch to read in. A fenced call is tried once more with a refreshed epoch,
    since a lease may have been acquired a moment ago.

    Without `stream_tokens` all tokens come at the end, and the engine may sample them in one batch with other requests.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        answers: list[AnswerBuilder],
        epoch: Callable[[bool], Awaitable[int]],
        *,
        stream_tokens: bool = True,
    ) -> None:
        self.engine, self.request, self.answers, self.epoch = engine, request, answers, epoch
        self._stream_tokens = stream_tokens
        self._abandoned = False
        self._task: asyncio.Task[list[Completion]] | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields additions in the order of sampling until every answer has ended, then the text that was held back.

        Raises the errors of `generate`.
        """
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[tuple[int, int, float] | None] = asyncio.Queue()

        # The engine calls this in its own thread, so the token is passed to the event loop of the request.
        def on_token(index: int, token: int, logprob: float) -> None:
            if self._abandoned:
                raise GenerationAbandoned
            loop.call_soon_threadsafe(tokens.put_nowait, (index, token, logprob))

        self._task = asyncio.create_task(self._generate(on_token))
        self._task.add_done_callback(lambda task: tokens.put_nowait(None))
        try:
            # Yield the tokens until the call ends (None) or no answer needs more of them.
            while (sampled := await tokens.get()) is not None:
                index, token, logprob = sampled
                answer = self.answers[index]
                if answer.finish is None:
                    yield Delta(index, 1, answer.feed(token, logprob))
                if all(answer.finish for answer in self.answers):
                    return
            # Yield the tokens of an engine that does not stream, and the text that was held back.
            for delta in self._finish(await self._task):
                yield delta
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the call, since its tokens are not needed any more. It may be called several times."""
        self._abandoned = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _generate(self, on_token: OnToken) -> list[Completion]:
        try:
            return await self._generate_in(await self.epoch(False), on_token)
        except Fenced:
            # The known epoch may be up to a second old. Read it again before the client sees an error.
            return await self._generate_in(await self.epoch(True), on_token)

    async def _generate_in(self, epoch: int, on_token: OnToken) -> list[Completion]:
        if self._stream_tokens and is_streaming(self.engine):
            return await self.engine.generate(self.request, epoch=epoch, on_token=on_token)
        return await self.engine.generate(self.request, epoch=epoch)

    def _finish(self, completions: list[Completion]) -> list[Delta]:
        """Returns the tokens that did not arrive one by one (all, if the engine does not stream) and the text that is
        still held back."""
        deltas = []
        for index, (answer, completion) in enumerate(zip(self.answers, completions, strict=True)):
            # The answer already has the tokens that arrived one by one.
            before = len(answer.tokens)
            new_ids, new_logprobs = completion.token_ids[before:], completion.logprobs[before:]
            text = ""
            for token, logprob in zip(new_ids, new_logprobs, strict=True):
                text += answer.feed(token, logprob)
            text += answer.close(completion.stop_reason)
            deltas.append(Delta(index, len(answer.tokens) - before, text))
        return deltas


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client disconnects first, it cancels `work` and raises
    ClientDisconnected."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        # Cancelling a finished task has no effect, so this also covers a caller that is cancelled itself.
        disconnected.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
