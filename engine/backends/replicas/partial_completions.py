"""Completions that a pool receives chunk by chunk, and the delivery of their tokens to the caller's listener."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from engine.backends.protocol import Interrupted, OnToken
from engine.errors import CompletionDiverged, WorkerDied
from engine.protocol import Completion, StopReason, TokenIds
from storage.worklog import log_work

POOL_CLOSED = "the replicas were closed during this call; call again"
"""Message of the error that a call ends with when its pool is closed."""
SMALL_CALL = 4
"""Number of completions up to which a call gets its tokens one by one."""
CHUNK_TOKENS = 16
"""Tokens that a replica collects for one chunk in a larger call."""

INTERRUPT_SECONDS = 0.02
"""Seconds between two looks at whether a call was interrupted."""
Result = TypeVar("Result")

Chunk = tuple[int, TokenIds, list[float], StopReason | None]
"""New tokens of a completion: (position of the completion in the request, token ids, logprobs, stop reason or None)."""


def tokens_per_chunk(completions: int) -> int:
    """Number of tokens of a chunk in a call for this many completions. A small call streams single tokens, for a
    listener who waits for them. In a large call chunks cost fewer messages."""
    return CHUNK_TOKENS if completions > SMALL_CALL else 1


@dataclass(slots=True)
class PartialCompletion:
    """The tokens of one completion that have arrived so far."""

    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None
    delivered: TokenIds = field(default_factory=list)
    """Tokens that the listener got, possibly from an earlier attempt. They cannot be taken back."""

    def restart(self) -> None:
        """Discards the tokens before a replica samples the completion again from its first token."""
        if self.tokens:
            log_work("restart", tokens=len(self.tokens))
        self.tokens, self.logprobs, self.stop = [], [], None

    def add_chunk(
        self, tokens: TokenIds, logprobs: list[float], stop: StopReason | None
    ) -> Iterator[tuple[int, float]]:
        """Appends a chunk. Yields (token, logprob) of the tokens that the listener has not got yet.

        Raises:
            CompletionDiverged: the chunk contradicts a delivered token. In bfloat16, two replicas do not always sample
                the same token from the same seed. Neither replica is at fault, so this must not be a WorkerDied.
        """
        self.stop = stop
        for token, logprob in zip(tokens, logprobs, strict=True):
            position = len(self.tokens)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if position == len(self.delivered):
                self.delivered.append(token)
                yield token, logprob
            elif self.delivered[position] != token:
                raise CompletionDiverged(
                    f"a replica failed during a completion, and the replica that repeated it sampled token id {token} "
                    f"at position {position}, where {self.delivered[position]} was already delivered (rounding differs "
                    "between replicas); call again, or set engine.compute_dtype='float32' for equal tokens"
                )

    def interrupt(self) -> None:
        """Ends a completion that has not ended, because its call was interrupted."""
        self.stop = self.stop or "interrupted"

    def completion(self) -> Completion:
        """The finished completion."""
        assert self.stop is not None  # the stream of a replica ends when all its completions have ended
        return Completion(self.tokens, self.logprobs, self.stop)


def distinct_prompts(prompts: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """(the distinct prompts, the index among them of each given prompt)."""
    index_by_prompt: dict[tuple[int, ...], int] = {}
    prompt_indices: list[int] = []
    for prompt in prompts:
        next_index = len(index_by_prompt)
        prompt_indices.append(index_by_prompt.setdefault(tuple(prompt), next_index))
    return [list(prompt) for prompt in index_by_prompt], prompt_indices


TokenQueue = SimpleQueue[tuple[int, int, float] | None]
"""(index of the completion, token, logprob) in order of arrival; None at the end."""


async def receive_chunks(
    stream: AsyncGenerator[list[Chunk]],
    completions: Sequence[PartialCompletion],
    indices: Sequence[int],
    new_tokens: TokenQueue,
) -> None:
    """Adds a replica's stream to the completions, and puts the tokens that are new to the listener into the queue.

    Args:
        stream: items of chunks; a chunk's first element is a position in `indices`.
        indices: the indices in `completions` of the completions that the replica samples.
    """
    # Close the stream also after an error: the replica then stops sampling.
    async with aclosing(stream):
        async for chunks in stream:
            for position, tokens, logprobs, stop in chunks:
                index = indices[position]
                for token, logprob in completions[index].add_chunk(tokens, logprobs, stop):
                    new_tokens.put((index, token, logprob))


async def run_unless_interrupted(
    work: Coroutine[Any, Any, Result], interrupted: Interrupted | None
) -> Result | None:
    """Runs `work` and returns its result. Cancels it when `interrupted` is true, and returns None."""
    if interrupted is None:
        return await work
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            if interrupted():
                return None
            await asyncio.wait([running], timeout=INTERRUPT_SECONDS)
        return running.result()
    finally:
        # It must have ended when this returns: the caller may use the replicas for another call right away.
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


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
        # None is put last, also after an error, so this loop always ends.
        while (token := tokens.get()) is not None:
            if on_token is not None:
                on_token(*token)
    except BaseException:
        # Return only when `work` has ended: the caller may use the replicas for another call right away. The loop runs
        # the first step of `run` before this cancellation, so `finally` is always reached.
        future.cancel()
        ended.wait()
        raise
    try:
        future.result()
    except CancelledError as error:
        raise WorkerDied(POOL_CLOSED) from error
