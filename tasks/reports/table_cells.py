"""Text for the cells of a table in Prefect, which reads a cell as Markdown and does not break its lines."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import Any

from engine.text.threads import StringThread
from storage.inspect.step_samples import GradedSample

SIZES = {"grade": (14, 6), "prompt": (28, 6), "completion": (36, 8), "episode": (64, 12)}
"""Column -> characters per line, and number of lines. A sample and its grade fit into a window of 1280 pixels."""
OTHER_SIZE = (36, 6)
_MARKDOWN = re.compile(r"[\\`*_~<>\[\]&#|$]|(?<=\w):(?=//)|(?<=\bwww)\.|@")
"""Characters that Markdown reads as formatting, as HTML or as a link."""
_BLOCK_START = re.compile(r"^(?:[-+=]|\d+(?=[.)]))")
"""The start of a line that Markdown reads as a list or as a heading."""


def table_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a row. A text is broken into lines, cut after some lines, and shown literally."""
    return {name: _cell(name, value) for name, value in row.items()}


def _cell(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    width, most_lines = SIZES.get(column, OTHER_SIZE)
    # break each line of the text; blank lines are left out
    lines: list[str] = []
    for line in value.splitlines():
        lines += textwrap.wrap(line.strip(), _characters_per_line(line, width))
    if len(lines) > most_lines:
        lines = [*lines[:most_lines], "…"]
    return "\n".join(_literal(line) for line in lines)


def _characters_per_line(line: str, width: int) -> int:
    """The number of characters of the line that have this width. Chinese characters, for example, are twice as wide
    as letters."""
    wide = sum(unicodedata.east_asian_width(character) in "WFA" for character in line)
    return max(1, width * len(line) // (len(line) + wide)) if line else width


def _literal(line: str) -> str:
    """The line in Markdown that is shown like the line."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", line)
    number = _BLOCK_START.match(escaped)
    if number is None:
        return escaped
    # a digit cannot be escaped, but the dot after the number can
    return f"{escaped[: number.end()]}\\{escaped[number.end() :]}" if number[0].isdigit() else f"\\{escaped}"


def sample_prompt(sample: GradedSample) -> str:
    """The turn that the completion of a sample answers, or the whole conversation of an episode."""
    turns = StringThread.from_json(sample.thread).turns
    if sample.text is not None:
        return turns[-1].text
    return "\n".join(f"{turn.role}: {turn.text_with_calls}" for turn in turns)
