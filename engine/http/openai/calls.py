"""One call of the engine, heard token by token in the event loop of whoever asked.

The engine draws in a thread of its own; each token crosses into the loop as it is drawn. When nobody listens any more,
because the client went away or every answer has met a stop string, the next token ends the call. A call that need not
be heard is left to the engine whole; of a client that goes away then, only a call that still waits is taken back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

from starlette.requests import Request

from engine.errors import Fenced
from engine.http.openai.answers import Answer
from engine.protocol import Completion, Engine, GenerateRequest, OnToken

T = TypeVar("T")


class StreamingEngine(Protocol):
    """An engine that tells of each token as it is drawn."""

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: OnToken | None = None
    ) -> list[Completion]: ...


def streams(engine: Engine) -> TypeGuard[StreamingEngine]:
    return "on_token" in inspect.signature(engine.generate).parameters


class NobodyListens(Exception):
    """Ends the engine's call at its next token."""


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to answer `index`: `tokens` more of its tokens, and the text that they released."""

    index: int
    tokens: int
    text: str


class Call:
    """`answers[i]` is made of the completion of `request.prompts[i]`. `epoch(ask)` is the fencing epoch to read in;
    a fenced call asks anew once, since a lease may have been taken a moment ago.

    Without `listens` the tokens come all at the end, and the engine may draw them in one batch with those of others.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        answers: list[Answer],
        epoch: Callable[[bool], Awaitable[int]],
        *,
        listens: bool = True,
    ) -> None:
        self.engine, self.request, self.answers, self.epoch = engine, request, answers, epoch
        self._listens = listens
        self._over = False
        self._task: asyncio.Task[list[Completion]] | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """In the order of drawing, until every answer has ended; then what was held back. Raises as `generate`."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[int, int, float] | None] = asyncio.Queue()

        def on_token(index: int, token: int, logprob: float) -> None:
            if self._over:
                raise NobodyListens
            loop.call_soon_threadsafe(heard.put_nowait, (index, token, logprob))

        self._task = asyncio.create_task(self._generate(on_token))
        self._task.add_done_callback(lambda task: heard.put_nowait(None))
        try:
            while (drawn := await heard.get()) is not None:
                index, token, logprob = drawn
                answer = self.answers[index]
                if answer.finish is None:
                    yield Delta(index, 1, answer.feed(token, logprob))
                if all(answer.finish for answer in self.answers):
                    return
            for delta in self._rest(await self._task):
                yield delta
        finally:
            self.stop()

    def stop(self) -> None:
        """Nobody listens any more. Safe to repeat."""
        self._over = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _generate(self, on_token: OnToken) -> list[Completion]:
        try:
            return await self._once(await self.epoch(False), on_token)
        except Fenced:
            return await self._once(await self.epoch(True), on_token)

    async def _once(self, epoch: int, on_token: OnToken) -> list[Completion]:
        if self._listens and streams(self.engine):
            return await self.engine.generate(self.request, epoch=epoch, on_token=on_token)
        return await self.engine.generate(self.request, epoch=epoch)

    def _rest(self, completions: list[Completion]) -> list[Delta]:
        """The tokens not heard of (all, from an engine that does not stream) and the text still held back."""
        deltas = []
        for index, (answer, done) in enumerate(zip(self.answers, completions, strict=True)):
            before = len(answer.tokens)
            unheard = list(zip(done.token_ids, done.logprobs, strict=True))[before:]
            text = "".join(answer.feed(token, logprob) for token, logprob in unheard)
            text += answer.close(done.stop_reason)
            deltas.append(Delta(index, len(answer.tokens) - before, text))
        return deltas


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first: ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
