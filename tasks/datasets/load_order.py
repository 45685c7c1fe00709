"""Prepares the order in which a run reads a loaded dataset, or a mixture of datasets.

A curriculum reads only the metadata of the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice

import numpy as np

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_column
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset
from tasks.datasets.naming import row_name
from tasks.datasets.order import (
    DataCursor,
    DataOrder,
    owed_of,
    same_in_each_epoch,
    shuffled,
    take_turns,
    whole_weights,
)
from tasks.datasets.pools import PoolOrder
from tasks.datasets.spec import KeptRows, OrderedDataset


class MixtureOrder:
    """The order in which a run reads a mixture whose table holds the rows of one part after the other.

    The parts take turns row by row, by largest remainder. Part p of k has the weight w[p], a whole number, and W is
    the sum of the weights. `owed[p]` begins at 0. For each row of the mixture:

        owed[p] += w[p]                for every part
        p = argmax owed                the first of equal ones
        owed[p] -= W                   and the row is the next one of part p

    After t rows, owed[p] / W = t w[p] / W - drawn[p]: how many rows the part is behind its share. A part is never a
    whole row ahead of it, because the part that is chosen has owed[p] > 0. So when t w[p] / W is a whole number for
    every part, no part is behind either, and each has exactly its share. If batch_size w[p] / W is whole for every
    p, this is so after every batch; else after each m batches, for the smallest m for which m batch_size w[p] / W
    is whole.

    The cursor counts the rows of the mixture as if it were one dataset. Its further numbers are, for each part p,
    drawn_p, the rows that were read of the part, and owed_p as above, and `weights`, the sum of the weights. In a fork
    with another sum of the weights, or with more or fewer parts, the shares begin again.
    """

    def __init__(
        self, parts: Sequence[DataOrder], weights: Sequence[float]
    ) -> None:
        self.parts = tuple(parts)
        self.weights = whole_weights(weights)
        self.rows = sum(part.rows for part in parts)
        self.sizes = [part.table_rows or part.rows for part in parts]
        """Number of rows of each part in the table, with those that its order leaves out."""
        self.first_rows = list(accumulate([0, *self.sizes[:-1]]))

    def only(self, rows: Sequence[int]) -> MixtureOrder:
        """Return this order without the row indices that are not in `rows`. Raises ValueError if a part has none of
        them."""
        kept = np.asarray(rows)
        parts = []
        for number, (part, first, size) in enumerate(zip(self.parts, self.first_rows, self.sizes, strict=True)):
            rows_of_part = kept[(kept >= first) & (kept < first + size)] - first
            parts.append(part.only(rows_of_part))
            if not parts[-1].rows:
                raise ValueError(
                    f"all rows of part {number + 1} of the mixture are left out for their length; raise "
                    "max_prompt_tokens, or leave this dataset out of the mixture"
                )
        return MixtureOrder(parts, self.weights)

    def take(self, cursor: DataCursor, n: int) -> tuple[list[int], DataCursor]:
        """Return the next `n` row indices and the cursor after them. Taking n1 and then n2 rows returns the same rows
        as taking n1 + n2 at once."""
        if n < 0:
            raise ValueError(f"given n={n}; expected 0 or more rows to take")
        # Choose the part of each row.
        numbers = cursor.model_extra or {}
        drawn = [numbers.get(f"drawn_{part}", 0) for part in range(len(self.parts))]
        owed = owed_of(numbers, range(len(self.parts)), self.weights)
        chosen, owed = take_turns(owed, self.weights, n)

        # Take the rows of each part in its own order.
        rows_of_part = []
        for part, order in enumerate(self.parts):
            epoch, index = divmod(drawn[part], order.rows)
            rows, _ = order.take(DataCursor(epoch=epoch, index=index), chosen.count(part))
            drawn[part] += len(rows)
            rows_of_part.append(iter([self.first_rows[part] + row for row in rows]))
        taken = [next(rows_of_part[part]) for part in chosen]

        # The cursor after them.
        epoch, index = divmod(cursor.epoch * self.rows + cursor.index + n, self.rows)
        after = {f"drawn_{part}": count for part, count in enumerate(drawn)}
        after |= {f"owed_{part}": behind for part, behind in enumerate(owed)}
        return taken, DataCursor(epoch=epoch, index=index, weights=sum(self.weights), **after)


RunOrder = DataOrder | MixtureOrder | PoolOrder
"""The order of a dataset, or of a mixture."""
KEPT = "keep filters"
"""The use of a column by `keep`, in an error message."""
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
    assert all(isinstance(order, DataOrder) for order in orders)  # the parts of a mixture have no pools
    return MixtureOrder(orders, [part.weight for part in data.parts])  # type: ignore[arg-type]


def _order_of_rows(
    store: ObjectStore, dataset: ArtifactRef, settings: OrderedDataset, rows: range, *, part: int, seed: int
) -> DataOrder | PoolOrder:
    """The order of these rows of the table, counted from the first of them. Raises DatasetError."""
    order: DataOrder | PoolOrder
    if settings.order == "file":
        order = same_in_each_epoch(range(len(rows)))
    elif settings.curriculum_column is not None:
        values = _values(store, dataset, settings.curriculum_column, rows, "order='curriculum' sorts")
        order = same_in_each_epoch(np.argsort(values, kind="stable").astype(np.int64))
    else:
        order = shuffled(len(rows), seed=seed, part=part)
    if settings.keep is not None:
        order = order.only(_kept_rows(store, dataset, settings.keep, rows))
    if settings.order == "pools":
        return PoolOrder(order, settings.pools)
    return order


def _kept_rows(store: ObjectStore, dataset: ArtifactRef, keep: KeptRows, rows: range) -> np.ndarray:
    """Those of these rows whose value is within the limits, counted from the first of them."""
    values = _values(store, dataset, keep.column, rows, KEPT)
    low = -math.inf if keep.min is None else keep.min
    high = math.inf if keep.max is None else keep.max
    kept = np.flatnonzero((values >= low) & (values <= high))
    if not len(kept):
        raise DatasetError(
            f"keep leaves out all {len(rows)} rows: the values of {keep.column!r} are from {np.nanmin(values):g} to "
            f"{np.nanmax(values):g}, and {low:g} to {high:g} are kept; give other limits"
        )
    return kept


@lru_cache(maxsize=8)
def _values(store: ObjectStore, dataset: ArtifactRef, column: str, rows: range, purpose: str) -> np.ndarray:
    """The value of the column in each of these rows, float64, read-only. `purpose`: what uses it, for errors."""
    values = np.empty(len(rows), dtype=np.float64)
    metadata_of_rows = islice(read_column(store, dataset, "metadata"), rows.start, rows.stop)
    for place, metadata in enumerate(metadata_of_rows):
        of_row = json.loads(metadata or "{}")
        if purpose == KEPT and column in of_row and of_row[column] is None:
            # a prompt whose pass rate could not be measured is not within any limits
            values[place] = math.nan
            continue
        values[place] = _number(store, dataset, rows[place], column, of_row, purpose)
    # The cache returns the same array to all callers.
    values.flags.writeable = False
    return values


def _number(
    store: ObjectStore, dataset: ArtifactRef, index: int, column: str, metadata: dict[str, object], purpose: str
) -> float:
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
        f"which {purpose}. If it is a column of the file, name it in metadata_columns: [{column}]"
    )
