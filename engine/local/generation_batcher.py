"""Combines concurrent generation calls for the same policy and the same sampling parameters into one batch.

Runs that share weights thus fill the device together. Which calls share a batch changes only the rounding, never the
distribution. An engine with `deterministic=true` does not use it, since it promises equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.protocol import Sampler
from engine.errors import PermanentEngineError
from engine.local.queue import Abandoned
from engine.models.images import Images, check_images_accepted
from engine.protocol import Completion, GenerateRequest, OnToken, TokenIds


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """The generation request of one caller, and its completions once a batch contained it."""

    request: GenerateRequest
    on_token: OnToken | None = None
    completions: list[Completion] | None = None
    abandoned: bool = False
    """Whether its caller was cancelled."""


RunSampler = Callable[[GenerateRequest, OnToken], list[Completion]]


def _images_of_prompts(batch: Sequence[PendingGeneration]) -> list[Images] | None:
    """The images of all prompts of the batch, in order. None when no call has images."""
    if all(call.request.images is None for call in batch):
        return None
    images: list[Images] = []
    for call in batch:
        images += call.request.images or [()] * len(call.request.prompts)
    return images


def sample_completions(sampler: Sampler, request: GenerateRequest, on_token: OnToken) -> list[Completion]:
    """The sampler's completions of the request. Raises UnsupportedFragment if it does not accept the images."""
    images: dict[str, Any] = {}
    if request.images is not None and any(request.images):
        check_images_accepted(sampler, request.images, "prompts")
        images = {"images": request.images}
    return sampler.sample(request.prompts, request.seeds, request.sampling, on_token, **images)


class GenerationBatcher:
    """The waiting generation calls of an engine, grouped by policy state and sampling parameters.

    The event loop calls `add` and `remove`. The compute thread calls `complete`.
    """

    def __init__(self, *, max_rows: int) -> None:
        self._waiting: dict[Hashable, list[PendingGeneration]] = {}
        self._max_rows = max_rows

    @staticmethod
    def _key(call: PendingGeneration) -> Hashable:
        return call.request.policy.state, call.request.sampling, call.request.tensor_parallel

    def add(self, call: PendingGeneration) -> None:
        self._waiting.setdefault(self._key(call), []).append(call)

    def remove(self, call: PendingGeneration) -> None:
        """Forgets a call that has its completions or whose caller was cancelled. Idempotent."""
        waiting = self._waiting.get(self._key(call), [])
        if call in waiting:
            waiting.remove(call)
        if not waiting:
            self._waiting.pop(self._key(call), None)

    def complete(self, call: PendingGeneration, run_sampler: RunSampler) -> list[Completion]:
        """The call's completions, sampled together with those of compatible waiting calls."""
        if call.completions is None:
            self._sample_batch(self._batch_with(call), run_sampler)
        assert call.completions is not None  # _sample_batch sets them for every call of its batch, or raises
        return call.completions

    def _batch_with(self, call: PendingGeneration) -> list[PendingGeneration]:
        """The call and the waiting calls that fit into one decoding batch with it.

        A call that was never added is alone in its batch."""
        batch, rows = [call], len(call.request.prompts)
        waiting = self._waiting.get(self._key(call), [])
        if call not in waiting:
            return batch
        for other in waiting[:]:  # a copy, because the event loop may add and remove calls meanwhile
            fits = rows + len(other.request.prompts) <= self._max_rows
            if other is not call and other.completions is None and fits:
                batch.append(other)
                rows += len(other.request.prompts)
        return batch

    def _sample_batch(self, batch: list[PendingGeneration], run_sampler: RunSampler) -> None:
        """Samples one batch and gives each of its calls its completions."""
        # Join the requests into one. Each prompt has its own seed, so its completion does not depend on the others.
        first = batch[0].request
        prompts: list[TokenIds] = []
        seeds: list[int] = []
        for call in batch:
            prompts += call.request.prompts
            seeds += call.request.seeds
        images = _images_of_prompts(batch)
        request = GenerateRequest(first.policy, prompts, seeds, first.sampling, first.tensor_parallel, images)

        def on_token(index: int, token: int, logprob: float) -> None:
            if all(call.abandoned for call in batch):
                raise Abandoned("the callers of this generation are gone")
            if batch[0].on_token is not None:  # such a call is alone in its batch: see LocalEngine.generate
                batch[0].on_token(index, token, logprob)

        try:
            completions = run_sampler(request, on_token)
        except PermanentEngineError:
            if len(batch) == 1:
                raise
            # A prompt of one call is at fault. Each call is now sampled alone, so that only that call fails.
            self._sample_batch(batch[:1], run_sampler)
            return

        # Split the completions by call.
        for call in batch:
            count = len(call.request.prompts)
            call.completions, completions = completions[:count], completions[count:]
