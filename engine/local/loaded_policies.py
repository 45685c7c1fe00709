"""The policies whose weights an engine holds in memory, within a budget of bytes.

A `LoadedPolicy` holds the weights of one policy. Each chain has at most one training policy, which moves forward with
the chain. Frozen policies serve as references or are past policies of a chain. Adapters of one base model share its
weights. When memory is needed, the first unprotected policy in eviction order is evicted. A training policy is
checkpointed first, so that no step must be repeated when it is loaded again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.backends.protocol import FrozenBase, Trainer
from engine.backends.weight_files.sketches import Sketch
from engine.errors import OutOfMemory, TransientEngineError
from engine.local.sampling import LaneSampler, Weights
from storage.chain.records import Numerics, PolicyRef, RebaseMark

ChainName = tuple[str, str, str]
GIB = 1 << 30


class NoRoomYet(TransientEngineError):
    """Raised when policies that hold the memory may not be evicted before `seconds` have passed."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(slots=True)
class LoadedPolicy:
    """A policy, the trainer that holds its weights, and the sampler that was created for it."""

    policy: PolicyRef
    trainer: Trainer
    training: bool = True
    """Whether it moves along its chain. It then has gradients and moments, too."""
    committed_numerics: Numerics | None = None
    """The numerics in the policy's commit record. None for policy 0, which has no record."""
    rebase: RebaseMark | None = None
    """The last rebase of the chain that these weights descend from."""
    saved_step: int = 0
    """Step of the last known checkpoint of the chain. 0 if there is no checkpoint."""
    sampler: LaneSampler | None = None
    tensor_parallel: int | None = None
    """Number of devices that the sampler was created for. None: the setting of the engine's config."""
    loaded_at: float = 0.0
    """Time at which it was loaded, in seconds of the engine's clock."""
    released: bool = False
    """Whether its run is done with it for now."""
    _sketch: Sketch | None = None
    """Sketch of the weights, once it was computed."""

    @property
    def chain(self) -> ChainName:
        return chain_key(self.policy)

    def nbytes(self) -> int:
        """Bytes that this policy counts against the budget: the peak of an update, if it is training.

        A shared base model is not counted."""
        sampler_bytes = self.sampler.nbytes() if self.sampler else 0
        return self.trainer.nbytes(training=self.training) + sampler_bytes

    def sketch_before_update(self) -> Sketch:
        """The sketch of the weights, before the trainer changes them."""
        before = self.trainer.weights_sketch() if self._sketch is None else self._sketch
        self._sketch = None
        return before

    def update_since(self, before: Sketch) -> Sketch:
        """The sketch of the update that the trainer made since `before`, the result of `sketch_before_update`."""
        self._sketch = self.trainer.weights_sketch()
        return self._sketch - before

    @property
    def weights(self) -> Weights:
        """The identity of the weights."""
        return Weights(self.policy.state, self.rebase)

    def drop_sampler(self) -> None:
        """Closes the sampler. The next generation creates a new one."""
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            sampler.close()  # a sampler that shares vLLM with others must unregister


def chain_key(policy: PolicyRef) -> ChainName:
    return policy.run, policy.stage, policy.model


class LoadedPolicies:
    """All policies that one engine holds in memory, within a budget of bytes.

    `save` checkpoints a training policy before it is evicted. `clock` returns seconds. Only `used_bytes` is
    thread-safe: the engine makes all other calls from its trainer lane.
    """

    def __init__(
        self,
        *,
        budget: int,
        protection_seconds: float,
        max_frozen: int,
        save: Callable[[LoadedPolicy], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.protection_seconds, self._max_frozen = budget, protection_seconds, max_frozen
        self._save, self._clock = save, clock
        # All three are ordered by last use, the least recently used first.
        self._training: OrderedDict[ChainName, LoadedPolicy] = OrderedDict()
        self._frozen: OrderedDict[str, LoadedPolicy] = OrderedDict()
        self._bases: OrderedDict[str, FrozenBase] = OrderedDict()

    # -- lookup ------------------------------------------------------------------------------------------------

    def training_policy_of(self, policy: PolicyRef) -> LoadedPolicy | None:
        """The training policy of the chain that `policy` belongs to. It may be at another step of the chain."""
        self._drop_dead_policies()
        return self._training.get(chain_key(policy))

    def find_by_state(self, state: str) -> LoadedPolicy | None:
        """A loaded policy with this state, of any run: policies with equal states have equal histories."""
        self._drop_dead_policies()
        if state in self._frozen:
            return self._frozen[state]
        for loaded in self._training.values():
            if loaded.policy.state == state:
                return loaded
        return None

    def _drop_dead_policies(self) -> None:
        """Forgets the policies and bases whose weights were lost with the process that held them."""
        dead_chains = [chain for chain, loaded in self._training.items() if not loaded.trainer.alive]
        for chain in dead_chains:
            self._training.pop(chain).drop_sampler()
        dead_states = [state for state, loaded in self._frozen.items() if not loaded.trainer.alive]
        for state in dead_states:
            self._frozen.pop(state).drop_sampler()
        dead_bases = [digest for digest, base in self._bases.items() if not base.alive]
        for digest in dead_bases:
            del self._bases[digest]

    def unsaved(self) -> list[LoadedPolicy]:
        """The training policies that are ahead of their last checkpoint."""
        self._drop_dead_policies()
        return [loaded for loaded in self._training.values() if loaded.policy.step > loaded.saved_step]

    def used_bytes(self) -> int:
        """Bytes that all loaded policies and base models count against the budget (`LoadedPolicy.nbytes`)."""
        # Copies, because another thread may call this while the trainer lane changes the dictionaries.
        policies = [*self._training.copy().values(), *self._frozen.copy().values()]
        bases = self._bases.copy().values()
        return sum(loaded.nbytes() for loaded in policies) + sum(base.nbytes() for base in bases)

    # -- changes -----------------------------------------------------------------------------------------------

    def add_or_touch(self, loaded: LoadedPolicy) -> LoadedPolicy:
        """Adds the policy if it is new, and marks it as the most recently used one.

        A new training policy replaces that of its chain. If there are too many frozen policies, the oldest is dropped.
        """
        # The run needs its policy again, so an earlier `mark_evict_first` no longer counts.
        loaded.released = False
        if not loaded.loaded_at:
            loaded.loaded_at = self._clock()
        if loaded.training:
            previous = self._training.get(loaded.chain)
            self._training[loaded.chain] = loaded
            self._training.move_to_end(loaded.chain)
        else:
            previous = self._frozen.get(loaded.policy.state)
            self._frozen[loaded.policy.state] = loaded
            self._frozen.move_to_end(loaded.policy.state)
        if previous is not None and previous is not loaded:
            previous.drop_sampler()

        # References are cheap to load again, so their number is limited even if memory is free.
        if len(self._frozen) > self._max_frozen:
            _, oldest = self._frozen.popitem(last=False)
            oldest.drop_sampler()
        return loaded

    def shared_base(self, name: str, load: Callable[[], FrozenBase]) -> FrozenBase:
        """The shared base model of this name: its digest, and its precision if it is held in 4 bits. `load` loads it if
        it is not in memory."""
        self._drop_dead_policies()
        if name not in self._bases:
            self._bases[name] = load()
        self._bases.move_to_end(name)
        return self._bases[name]

    def drop(self, policy: PolicyRef) -> None:
        """Forgets the chain's training policy. Call it when its weights are not those of a committed policy."""
        loaded = self._training.pop(chain_key(policy), None)
        if loaded is not None:
            loaded.drop_sampler()

    def mark_evict_first(self, run: str) -> list[LoadedPolicy]:
        """Marks the run's policies to be evicted first, until they are used again.

        Returns those that are ahead of their last checkpoint."""
        released = [loaded for loaded in self._in_eviction_order() if loaded.policy.run == run]
        for loaded in released:
            loaded.released = True
        unsaved = self.unsaved()
        return [loaded for loaded in released if loaded in unsaved]

    # -- eviction ----------------------------------------------------------------------------------------------

    def make_room(self, need: int, *, run: str, what: str, keep: LoadedPolicy | FrozenBase | None = None) -> None:
        """Evicts policies until `need` bytes are free. `keep` and the base model that it uses stay in memory.

        If only these two are left, it returns even if there is too little room.

        `what` names the purpose of the memory in the message.

        Raises:
            OutOfMemory: the budget is too small, even for an engine that holds only `keep`.
            NoRoomYet: policies that were loaded too recently to be evicted hold the memory.
        """
        # Fail before anything is evicted, if even an empty engine has too little memory.
        keep_bytes = keep.nbytes() if keep else 0
        if need + keep_bytes > self.budget:
            in_addition = f" in addition to {keep_bytes / GIB:.2f} GiB" if keep_bytes else ""
            raise OutOfMemory(
                f"{what} takes {need / GIB:.2f} GiB{in_addition}, but this engine "
                f"may fill {self.budget / GIB:.2f} GiB; raise engine.memory_gib, or train a smaller model or an adapter"
            )

        while self.used_bytes() + need > self.budget:
            if not self._evict_next(run, keep):
                return

    def _evict_next(self, run: str, keep: LoadedPolicy | FrozenBase | None) -> bool:
        """Evicts an unused base model, else the first unprotected policy in eviction order. False if none is left."""
        # A base model that no policy uses goes first, since no checkpoint must be written for it.
        policies = self._in_eviction_order()
        for digest, base in self._bases.items():
            is_used = any(loaded.trainer.base is base for loaded in policies)
            if base is not keep and not is_used:
                del self._bases[digest]
                return True

        candidates = [loaded for loaded in policies if loaded is not keep]
        if not candidates:
            return False
        for loaded in candidates:
            if self._protected_seconds(loaded, run) <= 0:
                self._evict(loaded)
                return True

        # All are protected. The caller waits until the first protection ends.
        seconds = min(self._protected_seconds(loaded, run) for loaded in candidates)
        raise NoRoomYet(
            f"the engine's memory is taken by runs that were loaded less than {self.protection_seconds} s ago",
            max(seconds, 0.0),
        )

    def _in_eviction_order(self) -> list[LoadedPolicy]:
        """Released policies first; among these and among the others, frozen ones first, then by last use."""
        policies = [*self._frozen.values(), *self._training.values()]
        return sorted(policies, key=lambda loaded: not loaded.released)  # the sort is stable

    def _protected_seconds(self, loaded: LoadedPolicy, run: str) -> float:
        """Seconds for which the policy may not be evicted by `run`.

        Released and frozen policies are never protected. A run may always evict its own policies."""
        if loaded.released or not loaded.training or loaded.policy.run == run:
            return 0.0
        return loaded.loaded_at + self.protection_seconds - self._clock()

    def _evict(self, loaded: LoadedPolicy) -> None:
        # Save first: if the save fails, the policy stays in memory and no step must be redone.
        if loaded.training and loaded.policy.step > loaded.saved_step:
            self._save(loaded)
        if loaded.training:
            self._training.pop(loaded.chain, None)
        else:
            self._frozen.pop(loaded.policy.state, None)
        loaded.drop_sampler()
