"""Completions that a pool receives chunk by chunk, and their tokens on the way to the caller's listener."""

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
class PartialCompletion:
    """The tokens of one completion that have arrived so far."""

    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None
    reported: TokenIds = field(default_factory=list)
    """Tokens that the listener got, possibly from an earlier attempt. They cannot be taken back."""

    def restart(self) -> None:
        """Discards the tokens: a replica samples the completion from its first token."""
        self.tokens, self.logprobs, self.stop = [], [], None

    def add_chunk(
        self, tokens: TokenIds, logprobs: list[float], stop: StopReason | None
    ) -> Iterator[tuple[int, float]]:
        """Appends a chunk. Yields (token, logprob) of the tokens that the listener has not got yet.

        Raises:
            WorkerDied: the chunk contradicts a reported token. In bfloat16 the same seed does not always sample the
                same token.
        """
        self.stop = stop
        for token, logprob in zip(tokens, logprobs, strict=True):
            position = len(self.tokens)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if position == len(self.reported):
                self.reported.append(token)
                yield token, logprob
            elif self.reported[position] != token:
                raise WorkerDied(
                    "a replica ended after its first tokens were reported, and another replica sampled different ones; "
                    "call again"
                )

    def completion(self) -> Completion:
        """The finished completion."""
        assert self.stop is not None  # the stream of a replica ends when all its completions have ended
        return Completion(self.tokens, self.logprobs, self.stop)


def distinct_prompts(prompts: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """(the distinct prompts, for each given prompt its index among them)."""
    index_by_prompt: dict[tuple[int, ...], int] = {}
    prompt_of = [index_by_prompt.setdefault(tuple(prompt), len(index_by_prompt)) for prompt in prompts]
    return [list(prompt) for prompt in index_by_prompt], prompt_of


TokenQueue = SimpleQueue[tuple[int, int, float] | None]
"""(index of the completion, token, logprob) in order of arrival; None at the end."""


def run_with_listener(
    work: Coroutine[Any, Any, None], tokens: TokenQueue, on_token: OnToken | None, loop: asyncio.AbstractEventLoop
) -> None:
    """Runs `work` in an event loop of another thread, and calls `on_token` in this thread for the tokens that `work`
    puts into the queue. An exception of `on_token` cancels `work`."""
    ended = threading.Event()

    async def run() -> None:
        try:
            await work
        finally:
            tokens.put(None)
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        while (token := tokens.get()) is not None:
            if on_token is not None:
                on_token(*token)
    except BaseException:
        future.cancel()
        ended.wait()
        raise
    future.result()
