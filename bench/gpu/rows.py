"""The rows that a part of the GPU bench prints, as lines of JSON, and the table of all rows. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

MARK = "ROW "
"""The beginning of a line that is a row. Other lines that a part prints are for people."""


@dataclass(frozen=True, slots=True)
class Row:
    """One result of a part."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    note: str = ""
    ok: bool | None = None
    """Whether the result is as expected. None for a figure without an expectation."""

    def line(self) -> str:
        return MARK + json.dumps(asdict(self))

    @property
    def figure(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        return f"{value} {self.unit}".strip()


def row_of(line: str) -> Row | None:
    """Returns the row of a printed line, or None for any other line."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def table(rows: Iterable[Row]) -> str:
    """Returns a Markdown table. Every column but the last is as wide as its widest cell."""
    cells = [("part", "what", "figure", "ok", "note")]
    ok_texts = {None: "", True: "yes", False: "NO"}
    for row in rows:
        cells.append((row.part, row.what, row.figure, ok_texts[row.ok], row.note))
    # pad the cells
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line[:4], widths, strict=True)]
        lines.append("| " + " | ".join([*padded, line[4]]) + " |")
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|---|"
    return "\n".join([lines[0], rule, *lines[1:]])
