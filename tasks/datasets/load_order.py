"""Prepares the order in which a run reads a loaded dataset. A curriculum reads only the metadata of the rows."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from itertools import islice

import numpy as np

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_column
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset
from tasks.datasets.mixture_order import MixtureOrder
from tasks.datasets.naming import row_name
from tasks.datasets.order import DataOrder, same_in_each_epoch, shuffled
from tasks.datasets.spec import OrderedDataset

RunOrder = DataOrder | MixtureOrder
"""The order of a dataset, or of a mixture."""
MAX_VALUE_LETTERS = 60
"""Length to which a value is cut in an error message."""


def load_order(store: ObjectStore, data: LoadedDataset, *, seed: int) -> RunOrder:
    """Return the order of a dataset. Except for order="file", it takes 8 bytes of memory per row.

    Raises DatasetError, with the number of the row, if a curriculum has no number for a row.
    """
    if not data.parts:
        return _order_of_rows(store, data.ref, data, range(data.rows), part=0, seed=seed)
    orders, first = [], 0
    for number, part in enumerate(data.parts):
        rows = range(first, first + part.rows)
        orders.append(_order_of_rows(store, data.ref, part, rows, part=number, seed=seed))
        first = rows.stop
    return MixtureOrder(orders, [part.weight for part in data.parts])


def _order_of_rows(
    store: ObjectStore, dataset: ArtifactRef, settings: OrderedDataset, rows: range, *, part: int, seed: int
) -> DataOrder:
    """The order of these rows of the table, counted from the first of them."""
    if settings.order == "file":
        return same_in_each_epoch(range(len(rows)))
    if settings.curriculum_column is not None:
        return same_in_each_epoch(_rows_by_value(store, dataset, settings.curriculum_column, rows))
    return shuffled(len(rows), seed=seed, part=part)


@lru_cache(maxsize=8)
def _rows_by_value(store: ObjectStore, dataset: ArtifactRef, column: str, rows: range) -> np.ndarray:
    """These rows by ascending value of the column, those with equal values in their order: int64, read-only. They are
    counted from the first of them."""
    values = np.empty(len(rows), dtype=np.float64)
    metadata_of_rows = islice(read_column(store, dataset, "metadata"), rows.start, rows.stop)
    for place, metadata in enumerate(metadata_of_rows):
        values[place] = _number(store, dataset, rows[place], column, json.loads(metadata or "{}"))
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
    value_text = f"{value!r:.{MAX_VALUE_LETTERS}}" if column in metadata else f"metadata without {column!r}"
    raise DatasetError(
        f"{row_name(store, dataset, index)}: given {value_text}; expected a number in the metadata's {column!r}, by "
        f"which order='curriculum' sorts. If it is a column of the file, name it in metadata_columns: [{column}]"
    )
