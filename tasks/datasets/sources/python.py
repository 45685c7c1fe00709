"""The dataset of a user's own function or class, given by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from engine import import_paths
from engine.import_paths import ImportPathError, load_object
from storage.store.objects import ObjectStore
from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import DatasetUse, ReadPosition
from tasks.datasets.read import RowsDataset


class PythonDataset(RowsDataset):
    """Rows of a user's own function or class: its call returns an iterable of dicts, with columns as in a file."""

    imports_code: ClassVar = True
    location_fields: ClassVar = frozenset({"path", "arguments"})

    kind: Literal["python"] = "python"
    path: str = Field(pattern=import_paths.PATTERN)
    """The function or class, as package.module:name. It is called with `arguments`."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the function or class."""

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return self.path

    @property
    def title(self) -> str:
        return self.path.partition(":")[2]

    def check(self, store: ObjectStore) -> None:
        """Raise DatasetError if the function or class does not take the arguments, ImportPathError if there is none."""
        target = load_object(self.path)
        if not callable(target):
            raise DatasetError(f"{self.path!r} is a {type(target).__name__}; expected a function or a class")
        try:
            inspect.signature(target).bind(**self.arguments)
        except TypeError as error:
            raise DatasetError(f"{self.path!r} with the arguments {sorted(self.arguments)}: {error}") from error
        except ValueError:
            return  # builtins have no signature

    def raw_rows(self, use: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
        """Yield the rows in their order, counted from 1. Raises DatasetError, with the import path, for every exception
        of the user's code."""
        try:
            target = load_object(self.path)
        except ImportPathError as error:
            raise DatasetError(f"dataset {error}") from error
        try:
            for row, values in enumerate(self._rows_of(target), start=1):
                yield RowLocation(self.path, row), values
        except DatasetError:
            raise
        except Exception as error:  # the boundary to a user's code
            raise DatasetError(f"dataset {self.path!r} with arguments={self.arguments} raised {error!r}") from error

    def _rows_of(self, target: Any) -> Iterable[Any]:
        """Call the user's function or class and return its rows."""
        if not callable(target):
            given = type(target).__name__
            raise DatasetError(f"dataset {self.path!r}: given a {given}; expected a function or a class")
        dataset = target(**self.arguments)
        if hasattr(dataset, "__iter__"):
            return dataset  # type: ignore[no-any-return]
        # torch.utils.data.Dataset has no __iter__, and many subclasses raise no IndexError at their end.
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return (dataset[index] for index in range(len(dataset)))
        raise DatasetError(
            f"dataset {self.path!r}: its call gave a {type(dataset).__name__}; expected something to iterate over, of "
            "dicts"
        )
