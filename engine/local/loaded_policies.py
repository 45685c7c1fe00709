"""Weights in memory: which policies are held, what they take, and who leaves first when another needs the room.

A *slot* holds one policy's weights. There is one training slot per chain, which moves forward with it, and frozen slots
for references and past policies. Adapters of one base model share it. What leaves is checkpointed first, so that coming
back costs a restore and not a redo of the chain.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.backends.protocol import Sampler, Trainer
from engine.backends.torch.shared_base import SharedBase
from engine.errors import OutOfMemory, TransientEngineError
from storage.chain.records import Numerics, PolicyRef, RebaseMark

ChainName = tuple[str, str, str]
GIB = 1 << 30


class NoRoomYet(TransientEngineError):
    """What holds the room may not leave before `seconds` have passed."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(slots=True)
class LoadedPolicy:
    """Weights in memory and the policy they are."""

    policy: PolicyRef
    trainer: Trainer
    training: bool = True
    """Whether it moves along its chain: then it has gradients and moments too."""
    made_under: Numerics | None = None
    """Under which the chain's record made the policy; None at its start."""
    rebase: RebaseMark | None = None
    """The chain's last rebase that these weights descend from."""
    saved_step: int = 0
    """Step of the chain's last checkpoint that this slot knows of; 0: none is needed, or none was made."""
    sampler: Sampler | None = None
    tensor_parallel: int | None = None
    """What the sampler was made for."""
    loaded: float = 0.0
    released: bool = False
    """Its run is done with it for now."""

    @property
    def chain(self) -> ChainName:
        return chain_name(self.policy)

    def nbytes(self) -> int:
        """What would be free if this slot left: the base that it may share is not counted."""
        return self.trainer.nbytes(training=self.training) + (self.sampler.nbytes() if self.sampler else 0)

    def drop_sampler(self) -> None:
        """The next draw makes a new one. A sampler that shares its engine with others must leave it by name."""
        sampler, self.sampler = self.sampler, None
        if sampler is not None:
            sampler.close()


def chain_name(policy: PolicyRef) -> ChainName:
    return policy.run, policy.stage, policy.model


class LoadedPolicies:
    """The slots of one engine within a budget of bytes. Not thread-safe but for `used_bytes`: the compute thread calls.

    `save` checkpoints a training slot that is about to leave; `clock` gives seconds.
    """

    def __init__(
        self,
        *,
        budget: int,
        residency: float,
        frozen: int,
        save: Callable[[LoadedPolicy], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.residency, self._frozen_limit = budget, residency, frozen
        self._save, self._clock = save, clock
        self._training: OrderedDict[ChainName, LoadedPolicy] = OrderedDict()
        self._frozen: OrderedDict[str, LoadedPolicy] = OrderedDict()
        self._bases: OrderedDict[str, SharedBase] = OrderedDict()

    # -- who is there ------------------------------------------------------------------------------------------

    def training(self, policy: PolicyRef) -> LoadedPolicy | None:
        """The training slot of the policy's chain, wherever on the chain it stands."""
        self._drop_dead_slots()
        return self._training.get(chain_name(policy))

    def holding(self, state: str) -> LoadedPolicy | None:
        """A slot with exactly these weights, of whatever run: equal states are equal histories."""
        self._drop_dead_slots()
        if state in self._frozen:
            return self._frozen[state]
        return next((slot for slot in self._training.values() if slot.policy.state == state), None)

    def _drop_dead_slots(self) -> None:
        """Forgets the slots whose weights went with the process that held them."""
        for chain in [chain for chain, slot in self._training.items() if not slot.trainer.alive]:
            self._training.pop(chain).drop_sampler()
        for state in [state for state, slot in self._frozen.items() if not slot.trainer.alive]:
            self._frozen.pop(state).drop_sampler()

    def moved(self) -> list[LoadedPolicy]:
        """Training slots ahead of their last checkpoint."""
        self._drop_dead_slots()
        return [slot for slot in self._training.values() if slot.policy.step > slot.saved_step]

    def used_bytes(self) -> int:
        slots = [*self._training.copy().values(), *self._frozen.copy().values()]
        return sum(slot.nbytes() for slot in slots) + sum(base.nbytes() for base in self._bases.copy().values())

    # -- coming and going --------------------------------------------------------------------------------------

    def use(self, slot: LoadedPolicy) -> LoadedPolicy:
        """Marks the slot as the one used last, and holds it if it is new."""
        slot.released = False
        if not slot.loaded:
            slot.loaded = self._clock()
        held: OrderedDict = self._training if slot.training else self._frozen
        key = slot.chain if slot.training else slot.policy.state
        if (before := held.get(key)) is not None and before is not slot:
            before.drop_sampler()
        held[key] = slot
        held.move_to_end(key)
        if len(self._frozen) > self._frozen_limit:
            self._frozen.popitem(last=False)[1].drop_sampler()
        return slot

    def base(self, digest: str, load: Callable[[], SharedBase]) -> SharedBase:
        """The shared base model of that digest, loaded if it is not held."""
        if digest not in self._bases:
            self._bases[digest] = load()
        self._bases.move_to_end(digest)
        return self._bases[digest]

    def drop(self, policy: PolicyRef) -> None:
        """Forgets the chain's training slot: its weights are not those of any committed policy."""
        slot = self._training.pop(chain_name(policy), None)
        if slot is not None:
            slot.drop_sampler()

    def release(self, run: str) -> list[LoadedPolicy]:
        """The run's slots leave first from now on, until it is heard of again. Returns those that moved past their last
        checkpoint."""
        own = [slot for slot in self._slots() if slot.policy.run == run]
        for slot in own:
            slot.released = True
        return [slot for slot in own if slot in self.moved()]

    def make_room(self, need: int, *, run: str, what: str, keep: LoadedPolicy | SharedBase | None = None) -> None:
        """Lets others leave until `need` bytes are free, but neither `keep` nor the base it stands on.

        Raises:
            OutOfMemory: not even an empty engine has that room (beside `keep`).
            NoRoomYet: others hold it, and came too recently to be sent away.
        """
        kept = keep.nbytes() if keep else 0
        if need + kept > self.budget:
            raise OutOfMemory(
                f"{what} takes {need / GIB:.2f} GiB{f' beside {kept / GIB:.2f} GiB' if kept else ''}, but this engine "
                f"may fill {self.budget / GIB:.2f} GiB; raise engine.memory_gib, or train a smaller model or an adapter"
            )
        while self.used_bytes() + need > self.budget:
            if not self._let_one_leave(run, keep):
                return  # what is left is the base of `keep`

    def _let_one_leave(self, run: str, keep: LoadedPolicy | SharedBase | None) -> bool:
        """Sends away an unused base, else the least recently used slot that may leave. False when none is left."""
        for digest, base in self._bases.items():
            if base is not keep and not any(getattr(slot.trainer, "base", None) is base for slot in self._slots()):
                del self._bases[digest]
                return True
        others = [slot for slot in self._slots() if slot is not keep]
        if not others:
            return False
        waits = {id(slot): self._must_stay(slot, run) for slot in others}
        leaving = next((slot for slot in others if waits[id(slot)] <= 0), None)
        if leaving is None:
            seconds = min(waits.values())
            raise NoRoomYet(f"the engine's memory is taken by runs that came less than {self.residency} s ago", seconds)
        self._leave(leaving)
        return True

    def _slots(self) -> Iterator[LoadedPolicy]:
        """Those that should leave first come first: released, frozen, then training; least recently used first."""
        everyone = [*self._frozen.values(), *self._training.values()]
        return iter(sorted(everyone, key=lambda slot: not slot.released))  # stable

    def _must_stay(self, slot: LoadedPolicy, run: str) -> float:
        """Seconds that the slot may still stay. A run may send away its own, and nobody is kept for a frozen one."""
        if slot.released or not slot.training or slot.policy.run == run:
            return 0.0
        return slot.loaded + self.residency - self._clock()

    def _leave(self, slot: LoadedPolicy) -> None:
        if slot.training and slot.policy.step > slot.saved_step:
            self._save(slot)
        if slot.training:
            self._training.pop(slot.chain, None)
        else:
            self._frozen.pop(slot.policy.state, None)
        slot.drop_sampler()
