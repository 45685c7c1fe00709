"""Routing of completions to replicas: affinity, the bound, and what happens when replicas come and go."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.vllm.serving.routing import BOUND, LEADING_TOKENS, Work, affinity, plan, ranking

names = st.lists(st.sampled_from([f"replica-{n}" for n in range(8)]), min_size=1, max_size=8, unique=True)
works = st.lists(
    st.builds(Work, key=st.sampled_from([bytes([n]) * 16 for n in range(6)]), tokens=st.integers(1, 5000)), max_size=60
)


@st.composite
def loads(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.integers(0, 20_000)) for name in draw(names)}


@given(works, loads())
def test_work_goes_to_open_replicas_and_the_plan_is_a_function_of_its_arguments(
    pieces: list[Work], open_replicas: dict[str, int]
) -> None:
    before = dict(open_replicas)
    places = plan(pieces, open_replicas)
    assert len(places) == len(pieces) and set(places) <= set(open_replicas)
    assert plan(pieces, dict(reversed(open_replicas.items()))) == places
    assert open_replicas == before


@given(works, loads())
def test_no_replica_passes_the_bound_unless_its_last_piece_fits_nowhere(
    pieces: list[Work], open_replicas: dict[str, int]
) -> None:
    total = sum(open_replicas.values()) + sum(piece.tokens for piece in pieces)
    limit = math.ceil(BOUND * total / len(open_replicas))
    held = dict(open_replicas)
    for piece, place in zip(pieces, plan(pieces, open_replicas), strict=True):
        if held[place] + piece.tokens > limit:
            assert all(load + piece.tokens > limit for load in held.values())
            assert held[place] == min(held.values())
        held[place] += piece.tokens


@given(st.integers(1, 8), st.integers(1, 100))
def test_equal_work_is_never_more_than_a_quarter_and_one_piece_above_the_mean(replicas: int, count: int) -> None:
    pieces = [Work(affinity([n // 8]), 10) for n in range(count)]
    given_to = Counter(plan(pieces, {f"replica-{n}": 0 for n in range(replicas)}))
    assert max(given_to.values()) <= BOUND * count / replicas + 1


@given(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=20), min_size=1, max_size=20), names)
def test_completions_of_one_prompt_stay_together_where_the_bound_allows(
    prompts: list[list[int]], replicas: list[str]
) -> None:
    # one group of four pieces against a mean that has room for it: all four go to the first replica of its ranking
    for prompt in prompts:
        key = affinity(prompt)
        first = ranking(key, replicas)[0]
        crowd = {name: (0 if name == first else 1_000_000) for name in replicas}
        if len(replicas) > 1:
            assert plan([Work(key, 10)] * 4, crowd) == [first] * 4


@given(st.lists(st.integers(0, 50_000), min_size=1), names)
def test_a_replica_that_leaves_moves_only_its_own_prompts(prompt: list[int], replicas: list[str]) -> None:
    order = ranking(affinity(prompt), replicas)
    for gone in replicas:
        assert ranking(affinity(prompt), [name for name in replicas if name != gone]) == [n for n in order if n != gone]


def test_prompts_that_share_their_leading_tokens_share_a_key() -> None:
    document = list(range(LEADING_TOKENS))
    assert affinity([*document, 7]) == affinity([*document, 8, 9])
    assert affinity([*document[:-1], 7]) != affinity([*document[:-1], 8])
    assert affinity([1, 2]) != affinity([2, 1])


def test_prompts_spread_over_all_replicas() -> None:
    # 4000 prompts over 4 replicas, 1000 each in the mean with a standard deviation of 27: 850 is five of them away
    replicas = [f"replica-{n}" for n in range(4)]
    firsts = Counter(ranking(affinity([n]), replicas)[0] for n in range(4000))
    assert min(firsts.values()) > 850


def test_no_replica_is_an_error() -> None:
    with pytest.raises(ValueError, match="no open replica"):
        plan([Work(b"x", 1)], {})
