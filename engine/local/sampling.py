"""The sampler lane: samples while the trainer lane takes gradient steps.

Weights get to a sampler in two parts. The trainer lane stages them, which copies them out of the trainer. The sampler
lane loads and checks them as soon as no completion of other weights is in progress. From then on the sampler lane
samples from them without the trainer, also after the chain has moved on to later policies.

A sampler that is not `independent` shares tensors or memory with its trainer. It is used in the trainer lane only.

A sampler holds the weights of one policy, which take the place of those before. Adapters on one base in vLLM are the
exception: each has a sampler of its own, and they sample at the same time. The last adapters of a chain stay loaded.

When weights are staged, the interruptible calls for earlier policies of the same chain end at their next token. Their
callers go on from the tokens so far, under the policy that was staged.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.backends.protocol import BaseGone, Sampler, StagedWeights, Trainer
from engine.errors import TransientEngineError
from engine.local.queue import FairQueue, Interruption, PendingGeneration
from storage.chain.records import PolicyRef, RebaseMark
from storage.failpoints import failpoint
from storage.worklog import log_work


class WeightsGone(TransientEngineError):
    """Raised in the sampler lane when the sampler does not hold the weights any more. They must be staged again."""


class Weights(NamedTuple):
    """The identity of a policy's weights: equal ones have the same history and descend from the same rebase."""

    state: str
    rebase: RebaseMark | None


OVERTAKEN_KEPT = 4
"""Weights that stay staged, and adapters that stay loaded, when later ones are loaded. With `max_staleness`, rollouts
may still come from them."""


class Holding(NamedTuple):
    """Weights that a sampler holds, or that are staged for it."""

    sampler: LaneSampler
    weights: Weights
    staging: int
    """Number of the staging, from 1. Weights that were lost and are staged again are another holding, so that they are
    not loaded while a call still samples from the first ones."""

    @property
    def group(self) -> Hashable:
        """Calls of the sampler lane with an equal group run at the same time."""
        return self.sampler.sampler.base_group or self


@dataclass(eq=False)
class LaneSampler:
    """A sampler that both lanes may use, and the weights that are staged for it. Its methods are thread-safe."""

    sampler: Sampler
    """Stages all weights. It also loads and samples, unless each adapter has a sampler of its own."""
    tensor_parallel: int | None = None
    """Number of devices that it was created for. None: the setting of the engine's config."""
    on_staged: Callable[[PolicyRef], None] = lambda policy: None
    """Called in the trainer lane after the weights of a policy were staged."""
    _staged: dict[Weights, StagedWeights] = field(default_factory=dict)
    _stagings: dict[Weights, int] = field(default_factory=dict)
    """The number of the staging of the staged and the loaded weights."""
    _names: dict[PolicyRef, Weights] = field(default_factory=dict)
    """The policies that are known to have the staged and the loaded weights."""
    _loaded: dict[Weights, Sampler] = field(default_factory=dict)
    """The loaded weights and the samplers that hold them, in the order of the loads."""
    _count: int = 0
    _uses: Counter[Weights] = field(default_factory=Counter)
    """Number of calls of the sampler lane that use these weights now."""
    _closed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def independent(self) -> bool:
        return self.sampler.independent

    def nbytes(self) -> int:
        return self.sampler.nbytes()

    def holding_of(self, policy: PolicyRef) -> Holding | None:
        """The weights of the policy, if the sampler lane can sample from them without the trainer."""
        with self._lock:
            weights = self._names.get(policy)
            if weights is None or self._closed or not (weights in self._staged or self._is_loaded(weights)):
                return None
            return Holding(self, weights, self._stagings[weights])

    def _is_loaded(self, weights: Weights) -> bool:
        sampler = self._loaded.get(weights)
        return sampler is not None and sampler.loaded_state == weights.state

    def stage(self, trainer: Trainer, weights: Weights, policy: PolicyRef) -> Holding:
        """Stages the trainer's weights, those of `policy`, for the sampler lane. Call it from the trainer lane."""
        with self._lock:
            known = weights in self._staged or self._is_loaded(weights)
        staged: StagedWeights | None = None if known else self.sampler.stage(trainer, weights.state)
        with self._lock:
            if staged is not None and not self._closed:
                self._count += 1
                self._staged[weights], self._stagings[weights] = staged, self._count
                staged = None
            self._names[policy] = weights
            holding = Holding(self, weights, self._stagings.get(weights, 0))
        failpoint("publish.staged")
        if staged is not None:
            staged.close()
        self.on_staged(policy)
        return holding

    @contextmanager
    def holding(self, weights: Weights, policy: PolicyRef) -> Iterator[Sampler]:
        """Within the block the sampler holds these weights, which are loaded first if necessary. Call it from the
        sampler lane, whose running calls are all of the same group. Raises WeightsGone, and as `Sampler.load`."""
        with self._lock:
            if self._closed:
                raise WeightsGone("the sampler was closed, because its policy left the engine's memory")
            self._uses[weights] += 1
        try:
            with self._loading:
                if not self._is_loaded(weights):
                    self._load(weights, policy)
                sampler = self._loaded[weights]
            yield sampler
        finally:
            with self._lock:
                self._uses -= Counter([weights])
                closing = self._take_unused()
            for sampler in closing:
                sampler.close()

    def _load(self, weights: Weights, policy: PolicyRef) -> None:
        with self._lock:
            staged = self._staged.pop(weights, None)
            if staged is None:
                raise WeightsGone(f"no sampler holds the weights of {policy.uri} any more")
            if self.sampler.base_group is None:
                sampler = self.sampler
                self._loaded.clear()
            else:
                sampler = self.sampler.in_same_group()
            lost = self._loaded.pop(weights, None)
        try:
            if lost is not None:  # a proof has failed
                lost.close()
            sampler.load(staged)
        except BaseException as error:
            if sampler is not self.sampler:
                sampler.close()
            if isinstance(error, BaseGone):
                raise WeightsGone(str(error)) from error
            raise
        finally:
            staged.close()
        with self._lock:
            self._loaded[weights] = sampler
            # Most weights that were staged before these are never loaded. If they are, they are staged again.
            number = self._stagings[weights]
            earlier = [known for known in self._staged if self._stagings[known] < number]
            earlier.sort(key=self._stagings.__getitem__)
            freed = [self._staged.pop(known) for known in earlier[:-OVERTAKEN_KEPT]]
            kept = {*self._loaded, *self._staged}
            self._names = {name: known for name, known in self._names.items() if known in kept}
            self._stagings = {known: number for known, number in self._stagings.items() if known in kept}
        for entry in freed:
            entry.close()
        log_work("sync", policy=policy.uri, step=policy.step)
        failpoint("publish.loaded")

    def _take_unused(self) -> list[Sampler]:
        """Takes out the samplers that no call uses and that are not needed any more: overtaken adapters, and once this
        one is closed, all of them. The caller closes them."""
        unused = [weights for weights in self._loaded if weights not in self._uses]
        if not self._closed:
            unused = unused[: max(len(self._loaded) - 1 - OVERTAKEN_KEPT, 0)]
        taken = [self._loaded.pop(weights) for weights in unused]
        if self._closed and not self._uses and self.sampler not in taken:
            taken.append(self.sampler)
        return taken

    def close(self) -> None:
        """Frees the staged weights, and closes the samplers when their last calls have ended."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            staged = list(self._staged.values())
            self._staged.clear()
            closing = [] if was_closed else self._take_unused()
        for weights in staged:
            weights.close()
        for sampler in closing:
            sampler.close()


class SamplerLane:
    """The queue of the calls that sample while the trainer computes, and the samplers that they use."""

    def __init__(self, concurrent_calls: int, prepare: Callable[[], None]) -> None:
        """Each thread of the lane calls `prepare` first."""
        self.queue = FairQueue(name="ostinato-sampler", threads=concurrent_calls, prepare=prepare)
        # Weak references: a sampler may share its trainer's weights, which must be freed with their policy.
        self._samplers: list[weakref.ref[LaneSampler]] = []
        self._interruptible: dict[int, tuple[PolicyRef, Interruption]] = {}
        """The interruptible calls that wait or run, with the policies that they sample from."""
        self._lock = threading.Lock()

    def add(self, sampler: Sampler, tensor_parallel: int | None) -> LaneSampler:
        """Returns the sampler as both lanes use it. Call it from the trainer lane."""
        added = LaneSampler(sampler, tensor_parallel, self.interrupt_before)
        # A new list, because other threads may read the old one.
        self._samplers = [*(known for known in self._samplers if known() is not None), weakref.ref(added)]
        return added

    def holding_of(self, policy: PolicyRef, tensor_parallel: int | None) -> Holding | None:
        """The weights of the policy in an independent sampler that holds them, or for which they are staged."""
        for reference in self._samplers:
            sampler = reference()
            if sampler is None or not sampler.independent or sampler.tensor_parallel != tensor_parallel:
                continue
            holding = sampler.holding_of(policy)
            if holding is not None:
                return holding
        return None

    @contextmanager
    def interruptible(self, call: PendingGeneration) -> Iterator[None]:
        """Within the block, an interruptible call is interrupted when a later policy of its chain is staged."""
        interruption = call.interruption
        if interruption is None:
            yield
            return
        with self._lock:
            self._interruptible[id(interruption)] = (call.request.policy, interruption)
        try:
            yield
        finally:
            with self._lock:
                del self._interruptible[id(interruption)]

    def interrupt_before(self, policy: PolicyRef) -> None:
        """Interrupts the calls for the policies before `policy` in its chain."""
        with self._lock:
            calls = list(self._interruptible.values())
        for of_call, interruption in calls:
            same_chain = (of_call.run, of_call.stage, of_call.model) == (policy.run, policy.stage, policy.model)
            if same_chain and of_call.step < policy.step:
                interruption.set()

    def close(self) -> None:
        """Ends the calls, and frees what is staged."""
        self.queue.close()
        for reference in self._samplers:
            sampler = reference()
            if sampler is not None:
                sampler.close()
