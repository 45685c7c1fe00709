"""Tests of the text of table cells in Prefect. tests/browser checks that the browser shows it literally."""

from __future__ import annotations

import pytest

from tasks.reports.table_cells import SIZES, table_cells


def cell(text: str, column: str = "completion") -> str:
    return str(table_cells({column: text})[column])


def test_numbers_and_columns_stay_as_they_are() -> None:
    row = {"grade": 0.5, "prompt": "1+1?", "completion": "2", "stopped by": "stop", "other": None}
    assert table_cells(row) == row
    assert list(table_cells(row)) == list(row)


@pytest.mark.parametrize("column", SIZES)
def test_a_long_text_is_broken_into_lines_and_cut(column: str) -> None:
    width, most_lines = SIZES[column]
    lines = cell("some words " * 200, column).split("\n")
    assert len(lines) == most_lines + 1 and lines[-1] == "…"
    assert all(len(line) <= width for line in lines)
    # a word without a break
    assert {len(line) for line in cell("x" * 2000, column).split("\n")[:-1]} == {width}


def test_wide_characters_count_twice() -> None:
    assert cell("\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 20).split("\n") == ["中" * 18, "中" * 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (" \n\n ", ""),
        ("one\n\n    two", "one\ntwo"),
        ("<think>a*b</think>", r"\<think\>a\*b\</think\>"),
        ("`a` [b](c) ~d~ \\n", r"\`a\` \[b\](c) \~d\~ \\n"),
        ("#### 42", r"\#\#\#\# 42"),
        ("- a\n+ b\n1. c\n12) d\n3.5", "\\- a\n\\+ b\n1\\. c\n12\\) d\n3\\.5"),
        ("a - b + 1.", "a - b + 1."),
        ("https://a.b www.a.b a@b.c", r"https\://a.b www\.a.b a\@b.c"),
    ],
)
def test_markdown_is_escaped(text: str, expected: str) -> None:
    assert cell(text) == expected
