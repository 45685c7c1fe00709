"""Reads rows from a user's own function or class, given by its import path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError
from tasks.datasets.spec import PythonDataset
from tasks.import_paths import ImportPathError, load_object


def raw_rows(spec: PythonDataset) -> Iterator[tuple[RowLocation, Any]]:
    """Yield the rows in their order, with their location. Rows are counted from 1.

    Raises DatasetError, with the import path, for every exception of the user's code.
    """
    try:
        target = load_object(spec.path)
    except ImportPathError as error:
        raise DatasetError(f"dataset {error}") from error
    try:
        for row, values in enumerate(_rows_of(target, spec), start=1):
            yield RowLocation(spec.path, row), values
    except DatasetError:
        raise
    except Exception as error:  # the boundary to a user's code
        raise DatasetError(f"dataset {spec.path!r} with arguments={spec.arguments} raised {error!r}") from error


def _rows_of(target: Any, spec: PythonDataset) -> Iterable[Any]:
    """Call the user's function or class and return its rows."""
    if not callable(target):
        raise DatasetError(f"dataset {spec.path!r}: given a {type(target).__name__}; expected a function or a class")
    dataset = target(**spec.arguments)
    if hasattr(dataset, "__iter__"):
        return dataset  # type: ignore[no-any-return]
    # torch.utils.data.Dataset has no __iter__, and many subclasses raise no IndexError at their end.
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[index] for index in range(len(dataset)))
    raise DatasetError(
        f"dataset {spec.path!r}: its call gave a {type(dataset).__name__}; expected something to iterate over, of dicts"
    )
