"""Decodes the bodies of batches without holding up the server: large ones in a thread of their own, one at a time.

The size of the decoded lists is known from the headers before anything is decompressed, so that the table of calls can
reserve it, and sequences are compared with the model's context before lists are made of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from engine.http.bodies import check_head
from engine.http.wire import Announced
from engine.text.stored_models import context_length_of
from storage.chain.records import PolicyRef, base_model_of
from storage.errors import PermanentStorageError
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

INLINE_BYTES = 1 << 20
"""A body that is larger than this is read in the decoder's thread, and one that needs more memory than this to decode
is decoded there. Smaller ones are handled in the event loop."""
REMEMBERED_CHAINS = 256
"""Most chains whose base model is remembered."""


class Decode(Protocol[T_co]):
    """engine.http.wire.decode_generate or decode_logprobs_request."""

    def __call__(self, data: bytes, *, context: int | None) -> T_co: ...


class BodyDecoder:
    """Decodes for one server. Used in one event loop."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._bases: dict[tuple[str, str, str], ArtifactRef] = {}

    async def announced(self, announce: Callable[[bytes], Announced], body: bytes) -> Announced:
        """The policy of a request and the memory that decoding it needs, as its headers say; it decodes no list.

        Raises BadSpec."""
        announced = await self._run(partial(announce, body), len(body))
        check_head(announced.policy)
        return announced

    async def decoded(self, decode: Decode[T], body: bytes, announced: Announced) -> T:
        """The request. Raises BadSpec, SampleTooLong."""
        # the engine checks the context length, too, so only large bodies are worth a read of the store
        context = None
        if announced.decoded_bytes > INLINE_BYTES:
            context = await asyncio.to_thread(self._context_length, announced.policy)
        return await self._run(partial(decode, body, context=context), announced.decoded_bytes)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        if size <= INLINE_BYTES:
            return work()
        job = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # when the call ends, others may take the memory that it reserved, so the thread has to end first
            await asyncio.wait({job})
            raise

    def _context_length(self, policy: PolicyRef) -> int | None:
        """The most tokens of a sequence that the policy's model was made for. None if the store does not say it: then
        only the engine checks the length."""
        chain = (policy.run, policy.stage, policy.model)
        try:
            if chain not in self._bases:
                base = base_model_of(self.store, policy)
                while len(self._bases) >= REMEMBERED_CHAINS:
                    del self._bases[next(iter(self._bases))]
                self._bases[chain] = base
            return context_length_of(self.store, self._bases[chain])
        except (PermanentStorageError, ValueError):  # a chain or a config.json that is missing or damaged
            return None
