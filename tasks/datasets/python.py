"""Rows out of a user's own function or class, by import path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError
from tasks.datasets.spec import PythonDataset
from tasks.import_paths import ImportPathError, load_object


def raw_rows(spec: PythonDataset) -> Iterator[tuple[RowLocation, Any]]:
    """Its rows, counted from 1, as they come. Raises DatasetError, naming the user's code, for
    what that raises."""
    try:
        target = load_object(spec.path)
    except ImportPathError as error:
        raise DatasetError(f"dataset {error}") from error
    try:
        for row, values in enumerate(_called(target, spec), start=1):
            yield RowLocation(spec.path, row), values
    except DatasetError:
        raise
    except Exception as error:  # the user's code: whatever it raises is its own fault, and the run has not begun
        raise DatasetError(f"dataset {spec.path!r} with arguments={spec.arguments} raised {error!r}") from error


def _called(target: Any, spec: PythonDataset) -> Iterable[Any]:
    if not callable(target):
        raise DatasetError(f"dataset {spec.path!r}: given a {type(target).__name__}; expected a function or a class")
    made = target(**spec.arguments)
    if hasattr(made, "__iter__"):
        return made  # type: ignore[no-any-return]
    if hasattr(made, "__getitem__") and hasattr(made, "__len__"):  # torch.utils.data.Dataset has no __iter__
        return (made[index] for index in range(len(made)))
    raise DatasetError(
        f"dataset {spec.path!r}: its call gave a {type(made).__name__}; expected something to "
        "iterate over, of dicts"
    )
