"""Tests of concurrent calls that are sent as one: an error reaches every caller."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

import pytest

from engine.errors import PermanentEngineError
from engine.models.call_batching import CallBatcher


async def test_calls_of_one_turn_and_key_are_one_batch_in_order() -> None:
    batches: list[tuple[Hashable, list[int]]] = []

    async def double(key: Hashable, items: list[int]) -> list[int]:
        batches.append((key, items))
        return [2 * item for item in items]

    calls = CallBatcher(double)
    assert await asyncio.gather(*(calls.submit("a" if n < 3 else "b", n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert batches == [("a", [0, 1, 2]), ("b", [3, 4])]


@pytest.mark.parametrize("failure", ["raises", "answers too few"])
async def test_a_failure_reaches_every_caller(failure: str) -> None:
    async def broken(_: Hashable, items: list[int]) -> list[int]:
        if failure == "raises":
            raise PermanentEngineError("no")
        return items[:1]

    calls = CallBatcher(broken)
    waiting = asyncio.gather(*(calls.submit("a", n) for n in range(3)), return_exceptions=True)
    results = await asyncio.wait_for(waiting, timeout=5)
    assert [type(result) for result in results] == [PermanentEngineError] * 3
