"""Tests of the order of a mixture: the shares by hand computation, each part in its own order, and resuming."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.datasets.load_order import MixtureOrder, whole_weights
from tasks.datasets.order import DataCursor, permutation, same_in_each_epoch, shuffled

ROWS = 1000


def parts_of_rows(weights: list[float], n: int) -> list[int]:
    """The part of each of the first n rows of a mixture of datasets with ROWS rows each."""
    order = MixtureOrder([same_in_each_epoch(range(ROWS)) for _ in weights], weights)
    return [row // ROWS for row in order.take(DataCursor(), n)[0]]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # (owed before the choice): (3 1) (2 2) (1 3) (4 0)
        ([3, 1], [0, 0, 1, 0] * 2),
        # (5 3 2) (0 6 4) (5 -1 6) (10 2 -2) (5 5 0) (0 8 2) (5 1 4) (0 4 6) (5 7 -2) (10 0 0)
        ([0.5, 0.3, 0.2], [0, 1, 2, 0, 0, 1, 0, 2, 1, 0] * 2),
        ([1, 1, 1], [0, 1, 2] * 3),
    ],
)
def test_the_shares_by_hand(weights: list[float], expected: list[int]) -> None:
    assert parts_of_rows(weights, len(expected)) == expected


def test_a_batch_that_holds_the_shares_has_them() -> None:
    parts = parts_of_rows([0.7, 0.2, 0.1], 60)
    for start in range(0, 60, 20):
        assert Counter(parts[start : start + 20]) == {0: 14, 1: 4, 2: 2}


def test_batches_that_cannot_hold_the_shares_have_them_together() -> None:
    """Three equal shares in batches of four: the odd row goes to the first, the second and the third part in turn."""
    parts = parts_of_rows([1, 1, 1], 12)
    batches = [Counter(parts[start : start + 4]) for start in range(0, 12, 4)]
    assert batches == [{0: 2, 1: 1, 2: 1}, {0: 1, 1: 2, 2: 1}, {0: 1, 1: 1, 2: 2}]


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 20), min_size=2, max_size=6), n=st.integers(1, 200))
def test_no_part_is_a_row_ahead_and_whole_shares_are_exact(weights: list[int], n: int) -> None:
    drawn = Counter(parts_of_rows([float(weight) for weight in weights], n))
    total = sum(weights)
    for part, weight in enumerate(weights):
        assert drawn[part] * total < n * weight + total
        if n % total == 0:
            assert drawn[part] == n // total * weight


def test_weights_are_ratios() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == whole_weights([70, 20, 10]) == [7, 2, 1]
    assert whole_weights([0.333333, 0.666667]) == [333333, 666667]


def test_a_small_part_begins_its_next_epoch_while_a_large_one_goes_on() -> None:
    order = MixtureOrder([same_in_each_epoch([1, 0]), shuffled(8, seed=5, part=1)], [1, 1])
    rows, cursor = order.take(DataCursor(), 10)
    assert rows[::2] == [1, 0, 1, 0, 1]
    large = permutation(8, seed=5, epoch=0).tolist()
    assert sorted(row - 2 for row in rows[1::2]) == sorted(set(row - 2 for row in rows[1::2]))
    assert [row - 2 for row in rows[1::2]] != large[:5]  # each part has its own permutation
    further, cursor = order.take(cursor, 6)
    assert sorted(row - 2 for row in (rows + further)[1::2]) == list(range(8))
    # 16 rows of 10: one pass and 6 rows
    assert (cursor.epoch, cursor.index) == (1, 6)
    assert cursor.model_extra == {"drawn_0": 8, "drawn_1": 8, "owed_0": 0, "owed_1": 0, "weights": 2}


def test_the_first_part_is_shuffled_like_a_single_dataset() -> None:
    """So that a fork may add a dataset to the one that the run began with."""
    order = MixtureOrder([shuffled(8, seed=5), same_in_each_epoch([0])], [1, 1])
    assert order.take(DataCursor(), 16)[0][::2] == permutation(8, seed=5, epoch=0).tolist()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    chunks=st.lists(st.integers(0, 30), max_size=5),
    data=st.data(),
)
def test_any_split_of_the_requests_takes_the_same_rows(
    sizes: list[int], chunks: list[int], data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))

    def new_order() -> MixtureOrder:
        parts = [shuffled(size, seed=1, part=part) for part, size in enumerate(sizes)]
        return MixtureOrder(parts, [float(weight) for weight in weights])

    at_once, end = new_order().take(DataCursor(), sum(chunks))
    piecewise: list[int] = []
    cursor = DataCursor()
    for n in chunks:
        # another process, which has the stored cursor and nothing else
        stored = DataCursor.model_validate(cursor.model_dump())
        taken, cursor = new_order().take(stored, n)
        piecewise += taken
    assert piecewise == at_once and (not chunks or cursor == end)


def test_rows_are_left_out_of_their_part() -> None:
    order = MixtureOrder([same_in_each_epoch(range(3)), same_in_each_epoch([2, 1, 0])], [1, 1])
    shorter = order.only([0, 2, 3, 5])
    assert shorter.rows == 4 and shorter.take(DataCursor(), 6)[0] == [0, 5, 2, 3, 0, 5]
    with pytest.raises(ValueError, match="all rows of part 2 of the mixture are left out"):
        order.only([0, 1])


def test_a_fork_with_other_weights_has_the_new_shares_from_its_first_step() -> None:
    parts = [same_in_each_epoch(range(ROWS)), same_in_each_epoch(range(ROWS))]
    _, cursor = MixtureOrder(parts, [9, 1]).take(DataCursor(), 105)
    rows, after = MixtureOrder(parts, [1, 2]).take(cursor, 30)
    assert Counter(row // ROWS for row in rows) == {0: 10, 1: 20}
    # the parts go on where they were
    drawn = cursor.model_extra or {}
    assert rows[1] == drawn["drawn_0"] and rows[0] == ROWS + drawn["drawn_1"]
    # a third part begins at its first row
    rows, _ = MixtureOrder([*parts, same_in_each_epoch(range(ROWS))], [1, 1, 1]).take(after, 3)
    assert rows[2] == 2 * ROWS
