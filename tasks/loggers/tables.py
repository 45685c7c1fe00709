"""A small table for people: what the loggers, a terminal and a flow run's page are given to show."""

from __future__ import annotations

from storage.serialization import Frozen

Cell = str | int | float | None


class Table(Frozen):
    """Rows of equal columns, of one moment of a stage."""

    name: str
    """Equal names of one stage are one table over time."""
    step: int
    """Steps of the stage that came before."""
    rows: tuple[dict[str, Cell], ...]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def cells(self) -> list[list[Cell]]:
        return [[row[column] for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """As a table of Markdown: line breaks and bars of a cell stay within it."""
        lines = [self.columns, ["---"] * len(self.columns), *([_shown(cell) for cell in row] for row in self.cells)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def text(self) -> str:
        """A line per row, `column value`, for a terminal."""
        rows = ("  ".join(f"{name} {_plain(cell)}" for name, cell in row.items()) for row in self.rows)
        return "\n".join([f"{self.name} after {self.step} steps", *(f"  {row}" for row in rows)])


def _shown(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", r"\|").replace("\n", "<br>")


def _plain(cell: Cell) -> str:
    return repr(cell) if isinstance(cell, str) else str(cell)
