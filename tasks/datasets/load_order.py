"""Prepares the order in which a run reads a loaded dataset. A curriculum reads only the metadata of the rows."""

from __future__ import annotations

import json
import math
from functools import lru_cache

import numpy as np

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_column
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset
from tasks.datasets.naming import row_name
from tasks.datasets.order import DataOrder, same_in_each_epoch, shuffled

MAX_VALUE_LETTERS = 60
"""Length to which a value is cut in an error message."""


def load_order(store: ObjectStore, data: LoadedDataset, *, seed: int) -> DataOrder:
    """Return the order of a dataset. It takes 8 bytes of memory per row.

    Raises DatasetError, with the number of the row, if a curriculum has no number for a row.
    """
    if data.order == "file":
        return same_in_each_epoch(range(data.rows))
    if data.curriculum_column is not None:
        return same_in_each_epoch(_ascending(store, data.ref, data.curriculum_column))
    return shuffled(data.rows, seed=seed)


@lru_cache(maxsize=2)
def _ascending(store: ObjectStore, dataset: ArtifactRef, column: str) -> np.ndarray:
    """The row indices by ascending value of the column, rows with equal values by ascending index: int64, read-only."""
    values = np.empty(dataset.rows or 0, dtype=np.float64)
    for index, metadata in enumerate(read_column(store, dataset, "metadata")):
        values[index] = _number(store, dataset, index, column, json.loads(metadata or "{}"))
    order = np.argsort(values, kind="stable").astype(np.int64)
    # The cache returns the same array to all callers.
    order.flags.writeable = False
    return order


def _number(store: ObjectStore, dataset: ArtifactRef, index: int, column: str, metadata: dict[str, object]) -> float:
    """The value of the column in the metadata of a row. Raises DatasetError if there is none, or it is no number."""
    value = metadata.get(column)
    # In Python a bool is an int, but it is no number to sort by.
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    given = f"{value!r:.{MAX_VALUE_LETTERS}}" if column in metadata else f"metadata without {column!r}"
    raise DatasetError(
        f"{row_name(store, dataset, index)}: given {given}; expected a number in the metadata's {column!r}, by which "
        f"order='curriculum' sorts. If it is a column of the file, name it in metadata_columns: [{column}]"
    )
