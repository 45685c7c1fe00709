"""Errors of datasets. All are permanent: loading the same dataset again fails again."""


class DatasetError(Exception):
    """The dataset as declared cannot be loaded."""

    transient = False


class DatasetNotFound(DatasetError):
    """The path of a dataset matches no file."""


class EmptyDataset(DatasetError):
    """The dataset has no usable row."""


class ExtraNotInstalled(DatasetError):
    """An optional dependency is missing; the message names the extra to install."""


class BadRow(DatasetError):
    """One row cannot be used. Rows are counted from 1; in JSON lines that is the line number."""

    def __init__(self, source: str, row: int, column: str | None, *, given: str, expected: str, todo: str = "") -> None:
        location = f"{source}, row {row}"
        if column is not None:
            location += f", column {column!r}"
        message = f"{location}: given {given}; expected {expected}."
        super().__init__(f"{message} {todo}" if todo else message)
        self.source, self.row, self.column = source, row, column
