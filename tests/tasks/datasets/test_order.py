"""The order of a run: permutations, epochs, and resuming from a cursor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.datasets.order import DataCursor, permutation, same_in_each_epoch, shuffled


def test_each_epoch_is_a_permutation_and_epochs_differ() -> None:
    rows, cursor = shuffled(50, seed=7).take(DataCursor(), 100)
    first, second = rows[:50], rows[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert cursor == DataCursor(epoch=2, index=0)


def test_wraps_in_the_middle_of_a_request() -> None:
    rows, cursor = shuffled(5, seed=0).take(DataCursor(epoch=0, index=3), 4)
    assert rows[:2] == permutation(5, seed=0, epoch=0)[3:].tolist()
    assert rows[2:] == permutation(5, seed=0, epoch=1)[:2].tolist()
    assert cursor == DataCursor(epoch=1, index=2)


def test_the_order_of_some_rows_leaves_the_others_out_of_each_epoch() -> None:
    # epochs 0 and 1 of 8 rows, pinned below, without 0, 2 and 5
    order = shuffled(8, seed=0).only([1, 3, 4, 6, 7])
    assert order.rows == 5
    rows, cursor = order.take(DataCursor(), 7)
    assert rows == [3, 4, 6, 1, 7, 3, 1]
    assert cursor == DataCursor(epoch=1, index=2, rows=5)  # the audit multiplies epochs by these rows
    assert same_in_each_epoch(range(4)).only([0, 3]).take(DataCursor(), 3)[0] == [0, 3, 0]


def test_the_order_is_pinned() -> None:
    """These numbers may never change: a run that resumes after an upgrade depends on them."""
    assert permutation(8, seed=0, epoch=0).tolist() == [5, 3, 4, 0, 6, 1, 7, 2]
    assert permutation(8, seed=0, epoch=1).tolist() == [2, 0, 3, 1, 7, 6, 5, 4]
    assert permutation(8, seed=1, epoch=0).tolist() == [1, 0, 2, 3, 5, 7, 6, 4]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 20), chunks=st.lists(st.integers(0, 30), max_size=5), seed=st.integers(-5, 2**70))
def test_any_split_of_the_requests_takes_the_same_rows(rows: int, chunks: list[int], seed: int) -> None:
    order = shuffled(rows, seed=seed)
    at_once, end = order.take(DataCursor(), sum(chunks))
    piecewise: list[int] = []
    cursor = DataCursor()
    for n in chunks:
        taken, cursor = order.take(cursor, n)
        piecewise += taken
    assert piecewise == at_once and cursor == end
    for epoch in range(len(at_once) // rows):
        assert sorted(at_once[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_an_order_that_is_the_same_in_each_epoch() -> None:
    order = same_in_each_epoch([2, 0, 1])
    rows, cursor = order.take(DataCursor(), 4)
    assert (rows, cursor) == ([2, 0, 1, 2], DataCursor(epoch=1, index=1))
    assert order.take(cursor, 2) == ([0, 1], DataCursor(epoch=2, index=0))


def test_one_row_and_no_rows() -> None:
    assert shuffled(1, seed=0).take(DataCursor(), 3) == ([0, 0, 0], DataCursor(epoch=3, index=0))
    assert shuffled(4, seed=0).take(DataCursor(), 0) == ([], DataCursor())


@pytest.mark.parametrize(
    ("cursor", "n", "rows", "message"),
    [
        (DataCursor(), 1, 0, "expected at least 1"),
        (DataCursor(), -1, 5, "expected 0 or more"),
        (DataCursor(index=5), 1, 5, "another dataset"),
    ],
)
def test_nonsense_is_refused(cursor: DataCursor, n: int, rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shuffled(rows, seed=0).take(cursor, n)
