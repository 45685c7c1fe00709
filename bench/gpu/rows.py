"""What a part of the bench says: rows, one JSON line each, and the table of all of them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

MARK = "ROW "
"""Begins a line that is a row; everything else that a part prints is for people."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `ok` is None for a figure, which nothing is expected of."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    note: str = ""
    ok: bool | None = None

    def line(self) -> str:
        return MARK + json.dumps(asdict(self))

    @property
    def figure(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        return f"{value} {self.unit}".strip()


def row_of(line: str) -> Row | None:
    """The row that a part printed, or None for any other line."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def table(rows: Iterable[Row]) -> str:
    """Markdown; widths are those of the widest cell but in the last column."""
    head = ("part", "what", "figure", "ok", "note")
    said = {None: "", True: "yes", False: "NO"}
    cells = [head, *((row.part, row.what, row.figure, said[row.ok], row.note) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "| " + " | ".join([*(c.ljust(w) for c, w in zip(line[:4], widths, strict=True)), line[4]]) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|---|"
    return "\n".join([lines[0], rule, *lines[1:]])
