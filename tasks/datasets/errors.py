"""What can be wrong with a dataset. None of it is cured by trying again."""


class DatasetError(Exception):
    """The dataset as declared cannot be loaded."""

    transient = False


class DatasetNotFound(DatasetError):
    """No file is there."""


class EmptyDataset(DatasetError):
    """Nothing is left to train on."""


class ExtraNotInstalled(DatasetError):
    """An optional dependency is missing; the message says which extra brings it."""


class BadRow(DatasetError):
    """One row cannot be used. Rows are counted from 1; in JSON lines that is the line number."""

    def __init__(self, source: str, row: int, column: str | None, *, given: str, expected: str, todo: str = "") -> None:
        place = f"{source}, row {row}" + (f", column {column!r}" if column is not None else "")
        super().__init__(f"{place}: given {given}; expected {expected}." + (f" {todo}" if todo else ""))
        self.source, self.row, self.column = source, row, column
