"""Prepares the order in which a run reads a loaded dataset, or a mixture of datasets.

A curriculum reads only the metadata of the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate, islice
from math import gcd

import numpy as np

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_column
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset
from tasks.datasets.naming import row_name
from tasks.datasets.order import DataCursor, DataOrder, same_in_each_epoch, shuffled
from tasks.datasets.spec import OrderedDataset

WEIGHT_DECIMALS = 6
"""Decimals of a weight that count."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratio of the weights, of which WEIGHT_DECIMALS decimals count."""
    whole = [round(weight * 10**WEIGHT_DECIMALS) for weight in weights]
    divisor = reduce(gcd, whole)
    return [weight // divisor for weight in whole]


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
        self, parts: Sequence[DataOrder], weights: Sequence[float], first_rows: Sequence[int] | None = None
    ) -> None:
        """`first_rows`: the index of the first row of each part. None: each part begins where the one before ends."""
        self.parts = tuple(parts)
        self.weights = whole_weights(weights)
        self.rows = sum(part.rows for part in parts)
        sizes = [part.rows for part in parts]
        self.first_rows = list(first_rows or accumulate([0, *sizes[:-1]]))

    def only(self, rows: Sequence[int]) -> MixtureOrder:
        """Return this order without the row indices that are not in `rows`. Not to be called on
        what it returned. Raises ValueError if a part has none of the rows."""
        kept = np.asarray(rows)
        parts = []
        for number, (part, first) in enumerate(zip(self.parts, self.first_rows, strict=True)):
            rows_of_part = kept[(kept >= first) & (kept < first + part.rows)] - first
            if not len(rows_of_part):
                raise ValueError(
                    f"all rows of part {number + 1} of the mixture are left out for their length; raise "
                    "max_prompt_tokens, or leave this dataset out of the mixture"
                )
            parts.append(part.only(rows_of_part.tolist()))
        return MixtureOrder(parts, self.weights, self.first_rows)

    def take(self, cursor: DataCursor, n: int) -> tuple[list[int], DataCursor]:
        """Return the next `n` row indices and the cursor after them. Taking n1 and then n2 rows returns the same rows
        as taking n1 + n2 at once."""
        if n < 0:
            raise ValueError(f"given n={n}; expected 0 or more rows to take")
        # Choose the part of each row.
        numbers = cursor.model_extra or {}
        drawn = [numbers.get(f"drawn_{part}", 0) for part in range(len(self.parts))]
        owed = self._owed(numbers)
        chosen: list[int] = []
        for _ in range(n):
            owed = [behind + weight for behind, weight in zip(owed, self.weights, strict=True)]
            part = owed.index(max(owed))
            owed[part] -= sum(self.weights)
            chosen.append(part)

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

    def _owed(self, numbers: dict[str, int]) -> list[int]:
        """What the cursor says that the parts are owed. Nothing at the start, and with other weights or parts."""
        owed = [numbers.get(f"owed_{part}", 0) for part in range(len(self.parts))]
        # The sum is 0 for the parts of the cursor, and for others only by chance.
        if numbers.get("weights") != sum(self.weights) or sum(owed) != 0:
            return [0] * len(self.parts)
        return owed


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
