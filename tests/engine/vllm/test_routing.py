"""Routing of completions to servers: affinity, the bound, and what happens when servers come and go."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.vllm.routing import BOUND, LEADING_TOKENS, Work, affinity, plan, ranking

names = st.lists(st.sampled_from([f"server-{n}" for n in range(8)]), min_size=1, max_size=8, unique=True)
works = st.lists(
    st.builds(Work, key=st.sampled_from([bytes([n]) * 16 for n in range(6)]), tokens=st.integers(1, 5000)), max_size=60
)


@st.composite
def loads(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.integers(0, 20_000)) for name in draw(names)}


@given(works, loads())
def test_work_goes_to_open_servers_and_the_plan_is_a_function_of_its_arguments(
    pieces: list[Work], open_servers: dict[str, int]
) -> None:
    before = dict(open_servers)
    places = plan(pieces, open_servers)
    assert len(places) == len(pieces) and set(places) <= set(open_servers)
    assert plan(pieces, dict(reversed(open_servers.items()))) == places
    assert open_servers == before


@given(works, loads())
def test_no_server_passes_the_bound_unless_its_last_piece_fits_nowhere(
    pieces: list[Work], open_servers: dict[str, int]
) -> None:
    total = sum(open_servers.values()) + sum(piece.tokens for piece in pieces)
    limit = math.ceil(BOUND * total / len(open_servers))
    held = dict(open_servers)
    for piece, place in zip(pieces, plan(pieces, open_servers), strict=True):
        if held[place] + piece.tokens > limit:
            assert all(load + piece.tokens > limit for load in held.values())
            assert held[place] == min(held.values())
        held[place] += piece.tokens


@given(st.integers(1, 8), st.integers(1, 100))
def test_equal_work_is_never_more_than_a_quarter_and_one_piece_above_the_mean(servers: int, count: int) -> None:
    pieces = [Work(affinity([n // 8]), 10) for n in range(count)]
    given_to = Counter(plan(pieces, {f"server-{n}": 0 for n in range(servers)}))
    assert max(given_to.values()) <= BOUND * count / servers + 1


@given(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=20), min_size=1, max_size=20), names)
def test_completions_of_one_prompt_stay_together_where_the_bound_allows(
    prompts: list[list[int]], servers: list[str]
) -> None:
    # one group of four pieces against a mean that has room for it: all four go to the first server of its ranking
    for prompt in prompts:
        key = affinity(prompt)
        first = ranking(key, servers)[0]
        crowd = {name: (0 if name == first else 1_000_000) for name in servers}
        if len(servers) > 1:
            assert plan([Work(key, 10)] * 4, crowd) == [first] * 4


@given(st.lists(st.integers(0, 50_000), min_size=1), names)
def test_a_server_that_leaves_moves_only_its_own_prompts(prompt: list[int], servers: list[str]) -> None:
    order = ranking(affinity(prompt), servers)
    for gone in servers:
        assert ranking(affinity(prompt), [name for name in servers if name != gone]) == [n for n in order if n != gone]


def test_prompts_that_share_their_leading_tokens_share_a_key() -> None:
    document = list(range(LEADING_TOKENS))
    assert affinity([*document, 7]) == affinity([*document, 8, 9])
    assert affinity([*document[:-1], 7]) != affinity([*document[:-1], 8])
    assert affinity([1, 2]) != affinity([2, 1])


def test_prompts_spread_over_all_servers() -> None:
    # 4000 prompts over 4 servers, 1000 each in the mean with a standard deviation of 27: 850 is five of them away
    servers = [f"server-{n}" for n in range(4)]
    firsts = Counter(ranking(affinity([n]), servers)[0] for n in range(4000))
    assert min(firsts.values()) > 850


def test_no_server_is_an_error() -> None:
    with pytest.raises(ValueError, match="no open server"):
        plan([Work(b"x", 1)], {})
