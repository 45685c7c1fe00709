"""`BodyDecoder`: decodes Arrow bodies without blocking the server. Large bodies are decoded in a thread, one at a time.

The size of the decoded lists is read from the headers before anything is decompressed, so that the table of calls can
reserve the memory. Sequences are compared with the model's context before lists are made of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from engine.http.bodies import check_batch_policy
from engine.http.wire import BodySummary
from engine.text.stored_models import context_length_of
from storage.chain.records import PolicyRef, base_model_of
from storage.errors import PermanentStorageError
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

INLINE_BYTES = 1 << 20
"""Bodies up to this size are read in the event loop, and bodies that need at most this memory are decoded there. Larger
ones are handled in the decoder's thread."""
REMEMBERED_CHAINS = 256
"""Number of chains whose base model stays in memory."""


class Decode(Protocol[T_co]):
    """engine.http.wire.decode_generate or decode_logprobs_request."""

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
