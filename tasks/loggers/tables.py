"""A small table that loggers, the terminal and the page of a flow run can show."""

from __future__ import annotations

from storage.serialization import Frozen

Cell = str | int | float | None


class Table(Frozen):
    """Rows with the same columns, measured at one step of a stage."""

    name: str
    """Name of the table. Tables of a stage with the same name show the same thing at different steps."""
    step: int
    """Number of steps of the stage before the table was made."""
    rows: tuple[dict[str, Cell], ...]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def cells(self) -> list[list[Cell]]:
        return [[row[column] for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """The table in Markdown. Line breaks and bars inside a cell are escaped."""
        # Markdown needs the separator line to recognise a table.
        lines = [self.columns, ["---"] * len(self.columns)]
        for row in self.cells:
            lines.append([_markdown_cell(cell) for cell in row])
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def text(self) -> str:
        """The table for a terminal: one line of `column value` pairs per row."""
        lines = [f"{self.name} after {self.step} steps"]
        for row in self.rows:
            pairs = [f"{name} {_text_cell(cell)}" for name, cell in row.items()]
            lines.append("  " + "  ".join(pairs))
        return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", r"\|").replace("\n", "<br>")


def _text_cell(cell: Cell) -> str:
    return repr(cell) if isinstance(cell, str) else str(cell)
