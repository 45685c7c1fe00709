"""Tests that a policy that is evicted from memory also closes its sampler, because samplers may share one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from engine.local.loaded_policies import LoadedPolicies, LoadedPolicy
from storage.chain.records import PolicyRef


@dataclass
class Weights:
    """As much of a trainer as a slot asks for."""

    alive: bool = True

    def nbytes(self, *, training: bool = True) -> int:
        return 10


@dataclass
class Drawer:
    """As much of a sampler."""

    closed: int = 0

    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        self.closed += 1


@dataclass
class Engine:
    """LoadedPolicies that hold two trainings at most, and one frozen policy."""

    saved: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loaded_policies = LoadedPolicies(
            budget=20, protection_seconds=0, max_frozen=1, save=lambda slot: self.saved.append(slot.policy.run)
        )

    def hold(self, run: str, *, training: bool = True, step: int = 0) -> tuple[LoadedPolicy, Drawer]:
        policy = PolicyRef(run=run, stage="0-grpo", model="policy", step=step, state=f"{run}-{step}")
        slot = LoadedPolicy(policy, cast(Any, Weights()), training=training)
        drawer = Drawer()
        slot.sampler = cast(Any, drawer)
        return self.loaded_policies.add_or_touch(slot), drawer


def test_a_slot_that_makes_room() -> None:
    engine = Engine()
    _, leaving = engine.hold("first")
    _, staying = engine.hold("second")
    engine.loaded_policies.make_room(10, run="third", what="a model")
    assert (leaving.closed, staying.closed) == (1, 0)


def test_a_frozen_policy_beyond_the_limit() -> None:
    engine = Engine()
    _, leaving = engine.hold("first", training=False)
    _, staying = engine.hold("second", training=False)
    assert (leaving.closed, staying.closed) == (1, 0)


def test_a_slot_that_is_dropped_or_replaced() -> None:
    engine = Engine()
    slot, dropped = engine.hold("first")
    engine.loaded_policies.drop(slot.policy)
    _, replaced = engine.hold("second")
    _, present = engine.hold("second", step=1)
    assert (dropped.closed, replaced.closed, present.closed) == (1, 1, 0)


def test_a_slot_whose_process_died() -> None:
    engine = Engine()
    slot, drawer = engine.hold("first")
    cast(Any, slot.trainer).alive = False
    assert engine.loaded_policies.training_policy_of(slot.policy) is None
    assert drawer.closed == 1


def test_a_slot_that_is_used_again_keeps_its_sampler() -> None:
    engine = Engine()
    slot, drawer = engine.hold("first")
    assert engine.loaded_policies.add_or_touch(slot) is slot
    assert drawer.closed == 0
