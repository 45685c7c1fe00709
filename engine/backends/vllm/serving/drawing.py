"""Completions of one call to a pool, as their chunks come in from its replicas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from engine.backends.protocol import OnToken
from engine.errors import WorkerDied
from engine.protocol import Completion, StopReason, TokenIds


@dataclass(slots=True)
class Drawing:
    """One completion in the making."""

    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None
    told: TokenIds = field(default_factory=list)
    """What the listener has heard, perhaps of an earlier start: it cannot be taken back."""

    def begin(self) -> None:
        """It is drawn from its first token, for the first time or again."""
        self.tokens, self.logprobs, self.stop = [], [], None

    def take(
        self, tokens: TokenIds, logprobs: list[float], stop: StopReason | None
    ) -> Iterator[tuple[int, float]]:
        """Adds a chunk; yields what of it the listener has not heard.

        Raises:
            WorkerDied: it contradicts what was told: in bfloat16 the same seed does not always draw the same token.
        """
        self.stop = stop
        for token, logprob in zip(tokens, logprobs, strict=True):
            place = len(self.tokens)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if place == len(self.told):
                self.told.append(token)
                yield token, logprob
            elif self.told[place] != token:
                raise WorkerDied(
                    "a replica ended after its first tokens were told, and another drew other ones; call again"
                )

    def completion(self) -> Completion:
        assert self.stop is not None  # a replica's answer ends when all its completions have
        return Completion(self.tokens, self.logprobs, self.stop)


def distinct_prompts(prompts: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """(each distinct prompt once, for each completion the index of the prompt that it continues)."""
    places: dict[tuple[int, ...], int] = {}
    prompt_of = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    return [list(prompt) for prompt in places], prompt_of


Heard = SimpleQueue[tuple[int, int, float] | None]
"""(completion, token, logprob) as they come in; None at the end."""


def tell(
    drawing: Coroutine[Any, Any, None], heard: Heard, on_token: OnToken | None, loop: asyncio.AbstractEventLoop
) -> None:
    """Runs `drawing` in the loop of another thread, tells of tokens in this one; what the listener raises ends it."""
    ended = threading.Event()

    async def draw() -> None:
        try:
            await drawing
        finally:
            heard.put(None)
            ended.set()

    future = asyncio.run_coroutine_threadsafe(draw(), loop)
    try:
        while (token := heard.get()) is not None:
            if on_token is not None:
                on_token(*token)
    except BaseException:
        future.cancel()
        ended.wait()
        raise
    future.result()
