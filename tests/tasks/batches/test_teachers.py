"""Tests of how the rows of a batch are divided over teachers and over calls of the engine."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import BadSpec
from engine.protocol import TableRows
from storage.store.artifacts import ArtifactRef
from tasks.batches.teachers import _calls, _only, of_prompt


def rows_of(name: str, mask: list[bool]) -> TableRows:
    table = ArtifactRef(kind="rollouts", key=f"runs/r/{name}", sha256="0" * 64, bytes=1, rows=None, parents=())
    return TableRows(table, np.array(mask))


A, B = rows_of("a", [True, False, True, True]), rows_of("b", [True, True])


def shown(parts: list[TableRows]) -> list[tuple[str, list[int]]]:
    return [(part.table.key[-1], np.flatnonzero(part.rows).tolist()) for part in parts]


def test_the_rows_of_a_teacher_are_those_of_its_tables() -> None:
    assert shown(_only([A, B], np.array([True, False, True, False, True]))) == [("a", [0, 3]), ("b", [1])]
    assert shown(_only([A, B], np.array([False, False, False, True, False]))) == [("b", [0])]
    assert np.array_equal(A.rows, [True, False, True, True])  # the table's own rows stay as they were


def test_a_call_has_at_most_as_many_tokens_as_it_may_or_one_row() -> None:
    lengths_N = np.array([3, 3, 9, 1, 4])
    calls = [shown(call) for call in _calls([A, B], lengths_N, 6)]
    assert calls == [[("a", [0, 2])], [("a", [3])], [("b", [0, 1])]]
    assert [shown(call) for call in _calls([A, B], lengths_N, 100)] == [[("a", [0, 2, 3]), ("b", [0, 1])]]


@pytest.mark.parametrize("metadata", [{}, {"kind": "other"}, {"kind": 3}, {"kind": None}], ids=str)
def test_a_prompt_without_a_teacher_is_named(metadata: dict) -> None:
    assert of_prompt({"odd": 1, "even": 2}, {"kind": "even"}, "kind", "p7") == 2
    with pytest.raises(BadSpec, match="prompt p7 has kind=.* teacher.by_value has teachers for 'odd', 'even'"):
        of_prompt({"odd": 1, "even": 2}, metadata, "kind", "p7")
