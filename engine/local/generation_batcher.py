"""Generations that several callers ask for at once, of one policy and with one set of parameters, drawn as one batch:
runs that share weights fill the device together. Which of them share a batch changes rounding, never the distribution;
an engine that promises equal bytes does not do it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.protocol import Sampler
from engine.errors import PermanentEngineError
from engine.local.queue import Abandoned
from engine.models.images import Images, check_images_accepted
from engine.protocol import Completion, GenerateRequest, OnToken


@dataclass(eq=False, slots=True)
class PendingGeneration:
    """One caller's request, and its answer once a batch had it."""

    request: GenerateRequest
    on_token: OnToken | None = None
    completions: list[Completion] | None = None
    abandoned: bool = False
    """Nobody waits for the answer any more."""


Draw = Callable[[GenerateRequest, OnToken], list[Completion]]


def _images_of(calls: Sequence[PendingGeneration]) -> list[Images] | None:
    """Of all their prompts, one after the other; None where no call has any."""
    if all(call.request.images is None for call in calls):
        return None
    return [own for call in calls for own in call.request.images or [()] * len(call.request.prompts)]


def draw(sampler: Sampler, request: GenerateRequest, on_token: OnToken) -> list[Completion]:
    """The sampler's completions. Raises UnsupportedFragment for images that it does not take."""
    images: dict[str, Any] = {}
    if request.images is not None and any(request.images):
        check_images_accepted(sampler, request.images, "prompts")
        images = {"images": request.images}
    return sampler.sample(request.prompts, request.seeds, request.sampling, on_token, **images)


class GenerationBatcher:
    """Calls that wait, by what they have to have in common. Used by the compute thread, but for add and remove."""

    def __init__(self, *, max_rows: int) -> None:
        self._waiting: dict[Hashable, list[PendingGeneration]] = {}
        self._max_rows = max_rows

    @staticmethod
    def _key(call: PendingGeneration) -> Hashable:
        return call.request.policy.state, call.request.sampling, call.request.tensor_parallel

    def add(self, call: PendingGeneration) -> None:
        self._waiting.setdefault(self._key(call), []).append(call)

    def remove(self, call: PendingGeneration) -> None:
        """The call is answered, or its caller is gone. Removing it twice is harmless."""
        waiting = self._waiting.get(self._key(call), [])
        if call in waiting:
            waiting.remove(call)
        if not waiting:
            self._waiting.pop(self._key(call), None)

    def answer(self, call: PendingGeneration, draw: Draw) -> list[Completion]:
        """The call's completions, drawn with those of the calls that wait for the same policy and parameters."""
        if call.completions is None:
            self._draw(self._batch_of(call), draw)
        assert call.completions is not None  # _draw answers every call of its batch, or raises
        return call.completions

    def _batch_of(self, call: PendingGeneration) -> list[PendingGeneration]:
        """The call and as many others as fill up one decoding batch; alone if it was never added."""
        batch, rows = [call], len(call.request.prompts)
        if call not in self._waiting.get(self._key(call), []):
            return batch
        for other in self._waiting.get(self._key(call), [])[:]:
            if other is not call and other.completions is None and rows + len(other.request.prompts) <= self._max_rows:
                batch.append(other)
                rows += len(other.request.prompts)
        return batch

    def _draw(self, batch: list[PendingGeneration], draw: Draw) -> None:
        own = batch[0].request
        request = GenerateRequest(
            own.policy,
            [prompt for call in batch for prompt in call.request.prompts],
            [seed for call in batch for seed in call.request.seeds],
            own.sampling,
            own.tensor_parallel,
            _images_of(batch),
        )

        def hear(index: int, token: int, logprob: float) -> None:
            if all(call.abandoned for call in batch):
                raise Abandoned("the callers of this generation are gone")
            if batch[0].on_token is not None:  # then it is alone: see LocalEngine.generate
                batch[0].on_token(index, token, logprob)

        try:
            completions = draw(request, hear)
        except PermanentEngineError:
            if len(batch) == 1:
                raise
            self._draw(batch[:1], draw)  # whose prompt it was is found out by each caller for itself
            return
        for call in batch:
            count = len(call.request.prompts)
            call.completions, completions = completions[:count], completions[count:]
