"""A step of many shards through a real server in a process of its own: the client is bounded by what it admits."""

from __future__ import annotations

import pytest

from bench.many_shards import Load, measure
from engine.http.calls import CallLimits

MEMORY_PER_SHARD = 16 << 10
"""Bytes: references of the rollouts and grades of a shard, its plan and its waiting task."""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens_of_5000_shards() -> None:
    limits = CallLimits(waiting_of_verb=32)
    few, _ = measure(Load(320, limits=limits))
    many, server = measure(Load(5000, limits=limits))
    assert many.rollouts == many.graded == server.calls == 5000
    assert server.most_calls <= 32
    assert server.most_connections <= 34  # one for the handshake, and one that is being closed
    assert server.refused == 0
    growth = many.memory_peak - few.memory_peak
    assert growth <= (5000 - 320) * MEMORY_PER_SHARD
