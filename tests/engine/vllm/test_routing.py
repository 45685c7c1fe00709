"""Routing of completions to replicas: affinity_key, the bound, and what happens when replicas come and go."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.replicas.dispatch import (
    LEADING_TOKENS,
    LOAD_BOUND,
    WorkItem,
    affinity_key,
    assign_replicas,
    rank_replicas,
)

replica_names = st.lists(st.sampled_from([f"replica-{n}" for n in range(8)]), min_size=1, max_size=8, unique=True)
keys = st.sampled_from([bytes([number]) * 16 for number in range(6)])
work_items = st.lists(st.builds(WorkItem, key=keys, tokens=st.integers(1, 5000)), max_size=60)


@st.composite
def loads(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.integers(0, 20_000)) for name in draw(replica_names)}


@given(work_items, loads())
def test_assignments_use_open_replicas_and_are_reproducible(
    items: list[WorkItem], open_replicas: dict[str, int]
) -> None:
    before = dict(open_replicas)
    assigned = assign_replicas(items, open_replicas)
    assert len(assigned) == len(items) and set(assigned) <= set(open_replicas)
    assert assign_replicas(items, dict(reversed(open_replicas.items()))) == assigned
    assert open_replicas == before


@given(work_items, loads())
def test_no_replica_exceeds_the_bound_unless_an_item_fits_nowhere(
    items: list[WorkItem], open_replicas: dict[str, int]
) -> None:
    total = sum(open_replicas.values()) + sum(item.tokens for item in items)
    limit = math.ceil(LOAD_BOUND * total / len(open_replicas))
    replica_loads = dict(open_replicas)
    for item, replica in zip(items, assign_replicas(items, open_replicas), strict=True):
        if replica_loads[replica] + item.tokens > limit:
            assert all(load + item.tokens > limit for load in replica_loads.values())
            assert replica_loads[replica] == min(replica_loads.values())
        replica_loads[replica] += item.tokens


@given(st.integers(1, 8), st.integers(1, 100))
def test_equal_items_exceed_the_mean_by_at_most_a_quarter_and_one(replicas: int, count: int) -> None:
    items = [WorkItem(affinity_key([number // 8]), 10) for number in range(count)]
    open_replicas = {f"replica-{number}": 0 for number in range(replicas)}
    items_per_replica = Counter(assign_replicas(items, open_replicas))
    assert max(items_per_replica.values()) <= LOAD_BOUND * count / replicas + 1


@given(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=20), min_size=1, max_size=20), replica_names)
def test_completions_of_one_prompt_share_a_replica_within_the_bound(
    prompts: list[list[int]], replicas: list[str]
) -> None:
    # the first replica has room for a group of four items, so all four go to it
    for prompt in prompts:
        key = affinity_key(prompt)
        first = rank_replicas(key, replicas)[0]
        crowd = dict.fromkeys(replicas, 1_000_000) | {first: 0}
        if len(replicas) > 1:
            assert assign_replicas([WorkItem(key, 10)] * 4, crowd) == [first] * 4


@given(st.lists(st.integers(0, 50_000), min_size=1), replica_names)
def test_removing_a_replica_moves_only_its_own_prompts(prompt: list[int], replicas: list[str]) -> None:
    order = rank_replicas(affinity_key(prompt), replicas)
    for removed in replicas:
        remaining = [name for name in replicas if name != removed]
        assert rank_replicas(affinity_key(prompt), remaining) == [name for name in order if name != removed]


def test_prompts_that_share_their_leading_tokens_share_a_key() -> None:
    document = list(range(LEADING_TOKENS))
    assert affinity_key([*document, 7]) == affinity_key([*document, 8, 9])
    assert affinity_key([*document[:-1], 7]) != affinity_key([*document[:-1], 8])
    assert affinity_key([1, 2]) != affinity_key([2, 1])


def test_prompts_spread_over_all_replicas() -> None:
    # 4000 prompts over 4 replicas, 1000 each in the mean with a standard deviation of 27: 850 is five of them away
    replicas = [f"replica-{n}" for n in range(4)]
    firsts = Counter(rank_replicas(affinity_key([n]), replicas)[0] for n in range(4000))
    assert min(firsts.values()) > 850


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ValueError, match="no open replica"):
        assign_replicas([WorkItem(b"x", 1)], {})
