"""The sampler lane: samples while the trainer lane takes gradient steps.

Weights get to a sampler in two parts. The trainer lane stages them, which copies them out of the trainer. The sampler
lane loads and checks them as soon as no completion of other weights is in progress. From then on the sampler lane
samples from them without the trainer, also after the chain has moved on to later policies.

A sampler that is not `independent` shares tensors or memory with its trainer. It is used in the trainer lane only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.backends.protocol import Sampler, StagedWeights, Trainer
from engine.errors import TransientEngineError
from engine.local.queue import FairQueue
from storage.chain.records import PolicyRef, RebaseMark
from storage.failpoints import failpoint
from storage.worklog import log_work


class WeightsGone(TransientEngineError):
    """Raised in the sampler lane when the sampler does not hold the weights any more. They must be staged again."""


class Weights(NamedTuple):
    """The identity of a policy's weights: equal ones have the same history and descend from the same rebase."""

    state: str
    rebase: RebaseMark | None


@dataclass(eq=False)
class LaneSampler:
    """A sampler that both lanes may use, and the weights that are staged for it. Its methods are thread-safe."""

    sampler: Sampler
    _staged: dict[Weights, StagedWeights] = field(default_factory=dict)
    _loaded: Weights | None = None
    _names: dict[PolicyRef, Weights] = field(default_factory=dict)
    """The policies that are known to have the staged and the loaded weights."""
    _uses: int = 0
    """Number of calls of the sampler lane that use it now."""
    _closed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def independent(self) -> bool:
        return self.sampler.independent

    @property
    def closed(self) -> bool:
        return self._closed

    def nbytes(self) -> int:
        return self.sampler.nbytes()

    def weights_of(self, policy: PolicyRef) -> Weights | None:
        """The weights of the policy, if the sampler lane can sample from them without the trainer."""
        with self._lock:
            weights = self._names.get(policy)
            if weights is None or self._closed:
                return None
            return weights if weights in self._staged or self._is_loaded(weights) else None

    def _is_loaded(self, weights: Weights) -> bool:
        return self._loaded == weights and self.sampler.loaded_state == weights.state

    def stage(self, trainer: Trainer, weights: Weights, policy: PolicyRef) -> None:
        """Stages the trainer's weights, those of `policy`, for the sampler lane. Call it from the trainer lane."""
        with self._lock:
            known = weights in self._staged or self._is_loaded(weights)
        staged: StagedWeights | None = None if known else self.sampler.stage(trainer, weights.state)
        with self._lock:
            self._names[policy] = weights
            if staged is not None and not self._closed:
                self._staged[weights], staged = staged, None
        failpoint("publish.staged")
        if staged is not None:
            staged.close()

    @contextmanager
    def loaded(self, weights: Weights, policy: PolicyRef) -> Iterator[Sampler]:
        """Within the block the sampler holds these weights, which it loads first if necessary. Call it from the sampler
        lane, whose running calls all use the same weights. Raises WeightsGone, and as `Sampler.load`."""
        with self._lock:
            if self._closed:
                raise WeightsGone("the sampler was closed, because its policy left the engine's memory")
            self._uses += 1
        try:
            with self._loading:
                if not self._is_loaded(weights):
                    self._load(weights, policy)
            yield self.sampler
        finally:
            with self._lock:
                self._uses -= 1
                ends_now = self._closed and not self._uses
            if ends_now:
                self.sampler.close()

    def _load(self, weights: Weights, policy: PolicyRef) -> None:
        with self._lock:
            staged = self._staged.pop(weights, None)
            if staged is None:
                raise WeightsGone(f"no sampler holds the weights of {policy.uri} any more")
            self._loaded = None
        try:
            self.sampler.load(staged)
        finally:
            staged.close()
        with self._lock:
            self._loaded = weights
            kept = {weights, *self._staged}
            self._names = {name: known for name, known in self._names.items() if known in kept}
        log_work("sync", policy=policy.uri, step=policy.step)
        failpoint("publish.loaded")

    def close(self) -> None:
        """Frees the staged weights, and closes the sampler when its last call has ended."""
        with self._lock:
            closes_now = not self._closed and not self._uses
            self._closed = True
            staged = list(self._staged.values())
            self._staged.clear()
        for weights in staged:
            weights.close()
        if closes_now:
            self.sampler.close()


class SamplerLane:
    """The queue of the calls that sample while the trainer computes, and the samplers that they use."""

    def __init__(self, concurrent_calls: int, prepare: Callable[[], None]) -> None:
        """Each thread of the lane calls `prepare` first."""
        self.queue = FairQueue(name="ostinato-sampler", threads=concurrent_calls, prepare=prepare)
        self._samplers: list[LaneSampler] = []

    def add(self, sampler: Sampler) -> LaneSampler:
        """Returns the sampler as both lanes use it. Call it from the trainer lane."""
        added = LaneSampler(sampler)
        # A new list, because other threads may read the old one.
        self._samplers = [*(known for known in self._samplers if not known.closed), added]
        return added

    def holder_of(self, policy: PolicyRef) -> tuple[LaneSampler, Weights] | None:
        """An independent sampler that holds the weights of the policy or for which they are staged, and the weights."""
        for sampler in self._samplers:
            weights = sampler.weights_of(policy) if sampler.independent else None
            if weights is not None:
                return sampler, weights
        return None
