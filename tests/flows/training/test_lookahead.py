"""Which steps are collected at the same time, and from which position in the dataset each of them begins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.training.rollout_collection import CollectedRollouts, RolloutCollector, RolloutLookahead
from storage.chain.records import PolicyRef
from tasks.datasets.order import DataCursor

POLICY = PolicyRef(run="r", stage="grpo", model="policy", step=0, state="0" * 64)
PROMPTS = 2


class HeldCollector:
    """Collections that end when they are let go. `refills`: the number of prompts depends on grades, here three."""

    def __init__(self, *, refills: bool) -> None:
        self.refills = refills
        self.started: list[tuple[int, int]] = []
        """(step, position in the dataset)"""
        self.gates = [asyncio.Event() for _ in range(4)]
        chain = SimpleNamespace(policy=lambda step: POLICY.model_copy(update={"step": step}))
        self.prompts = SimpleNamespace(model=SimpleNamespace(chain_of=lambda policy: chain))

    def cursor_after(self, cursor: DataCursor) -> DataCursor | None:
        return None if self.refills else DataCursor(index=cursor.index + PROMPTS)

    async def collect(self, policy: PolicyRef, cursor: DataCursor, *, step: int) -> CollectedRollouts:
        self.started.append((step, cursor.index))
        await self.gates[step].wait()
        drawn = PROMPTS + 1 if self.refills else PROMPTS
        return CollectedRollouts([], [], cursor, DataCursor(index=cursor.index + drawn))


def lookahead_over(collector: HeldCollector, *, in_flight: bool) -> RolloutLookahead:
    as_collector = cast(RolloutCollector, cast(Any, collector))
    return RolloutLookahead(as_collector, DataCursor(index=10), total_steps=4, staleness=2, in_flight=in_flight)


@pytest.mark.parametrize(
    ("in_flight", "refills", "at_once"),
    [(True, False, [(0, 10), (1, 12), (2, 14)]), (True, True, [(0, 10)]), (False, False, [(0, 10)])],
    ids=["in flight", "in flight with refills", "between"],
)
async def test_steps_that_are_collected_at_once(
    in_flight: bool, refills: bool, at_once: list[tuple[int, int]]
) -> None:
    collector = HeldCollector(refills=refills)
    async with lookahead_over(collector, in_flight=in_flight) as lookahead:
        first = asyncio.create_task(lookahead.rollouts_for(POLICY))
        await asyncio.sleep(0.1)
        assert collector.started == at_once
        for gate in collector.gates:
            gate.set()
        assert (await first).cursor_out.index == 10 + PROMPTS + refills
        # all steps are collected once, each from where the one before ended
        for step in (1, 2, 3):
            await lookahead.rollouts_for(POLICY.model_copy(update={"step": step}))
        assert collector.started == [(step, 10 + step * (PROMPTS + refills)) for step in range(4)]
