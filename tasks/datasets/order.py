"""The order in which a run reads a dataset: an order of the rows per epoch, and a cursor into it.

The cursor is two integers. They are stored in the commit records, so a resumed run continues after its last step.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import gcd

import numpy as np
from pydantic import ConfigDict, Field

from storage.serialization import Frozen


class DataCursor(Frozen):
    """The position of a run: `index` rows of epoch `epoch` (from 0) are read. Always `index < rows`.

    Where rows are left out, it has `rows`, the rows of an epoch. The cursor of a mixture has further numbers: see
    tasks.datasets.load_order.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]

    epoch: int = Field(default=0, ge=0)
    index: int = Field(default=0, ge=0)


EpochOrder = Callable[[int], Sequence[int] | np.ndarray]
"""epoch (from 0) -> the row indices in the order in which that epoch reads them."""


@dataclass(frozen=True)
class DataOrder:
    """The order in which a run reads a dataset of `rows` rows."""

    rows: int
    epoch_order: EpochOrder
    table_rows: int | None = None
    """Number of rows of the dataset, if the order leaves out some of them. Else None."""

    @property
    def leaves_out_rows(self) -> bool:
        """Whether the dataset has more rows than these. The cursor then says how many an epoch has, for the audit."""
        return self.table_rows is not None

    def take(self, cursor: DataCursor, n: int) -> tuple[list[int], DataCursor]:
        """Return the next `n` row indices and the cursor after them.

        Within an epoch no row comes twice. After an epoch the next one begins. The result depends on the order and the
        arguments only: taking n1 and then n2 rows returns the same rows as taking n1 + n2 at once.
        """
        # Check the arguments.
        if self.rows < 1:
            raise ValueError(f"given a dataset of {self.rows} rows; expected at least 1")
        if n < 0:
            raise ValueError(f"given n={n}; expected 0 or more rows to take")
        if cursor.index >= self.rows:
            raise ValueError(
                f"given a cursor after {cursor.index} rows of an epoch, and a dataset of {self.rows} rows; the cursor "
                "belongs to another dataset. Start a new run, or give the dataset with which this run began."
            )

        # Take rows from one epoch after the other.
        taken: list[int] = []
        epoch, index = cursor.epoch, cursor.index
        while len(taken) < n:
            chunk = self.epoch_order(epoch)[index : index + n - len(taken)]
            taken.extend(int(row) for row in chunk)
            index += len(chunk)
            if index == self.rows:
                epoch, index = epoch + 1, 0
        further = {"rows": self.rows} if self.leaves_out_rows else {}
        return taken, DataCursor(epoch=epoch, index=index, **further)

    def only(self, rows: Sequence[int] | np.ndarray) -> "DataOrder":
        """Return this order without the row indices that are not in `rows`."""
        table_rows = self.table_rows or self.rows
        kept = np.zeros(table_rows, dtype=bool)
        kept[np.asarray(rows, dtype=np.int64)] = True
        left = int(kept[np.asarray(self.epoch_order(0))].sum())

        def epoch_order(epoch: int) -> np.ndarray:
            order = np.asarray(self.epoch_order(epoch))
            return order[kept[order]]

        return DataOrder(left, epoch_order, table_rows if left < table_rows else None)


WEIGHT_DECIMALS = 6
"""Decimals of a weight that count."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratio of the weights, of which WEIGHT_DECIMALS decimals count."""
    whole = [round(weight * 10**WEIGHT_DECIMALS) for weight in weights]
    divisor = reduce(gcd, whole)
    return [weight // divisor for weight in whole]


def take_turns(owed: list[int], weights: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Return the part from which each of the next `n` rows comes, by largest remainder, and what the parts are owed
    after them: see tasks.datasets.load_order.MixtureOrder."""
    chosen: list[int] = []
    for _ in range(n):
        owed = [behind + weight for behind, weight in zip(owed, weights, strict=True)]
        part = owed.index(max(owed))
        owed[part] -= sum(weights)
        chosen.append(part)
    return chosen, owed


def owed_of(numbers: Mapping[str, int], names: Iterable[object], weights: Sequence[int]) -> list[int]:
    """What the further numbers of a cursor say that the parts are owed. Nothing at the start, and with other weights or
    parts."""
    owed = [numbers.get(f"owed_{name}", 0) for name in names]
    # The sum is 0 for the parts of the cursor, and for others only by chance.
    if numbers.get("weights") != sum(weights) or sum(owed) != 0:
        return [0] * len(weights)
    return owed


def shuffled(rows: int, *, seed: int, part: int = 0) -> DataOrder:
    """The order that is another seeded permutation in each epoch. Each part of a mixture has its own ones."""
    return DataOrder(rows, lru_cache(maxsize=2)(partial(_permute, rows, seed, part)))


def same_in_each_epoch(indices: Sequence[int] | np.ndarray) -> DataOrder:
    """The order that reads the rows in the order of `indices` in each epoch."""
    return DataOrder(len(indices), lambda epoch: indices)


def repetitions(rows: list[int]) -> list[int]:
    """For each row, the number of times that it stands earlier in the list."""
    count_of: Counter[int] = Counter()
    earlier_counts = []
    for row in rows:
        earlier_counts.append(count_of[row])
        count_of[row] += 1
    return earlier_counts


@lru_cache(maxsize=2)
def permutation(rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(rows), int64, read-only. It depends on (rows, seed, epoch) only.

    It sorts the raw 64-bit stream of Philox, which numpy promises never to change. The stream of
    `Generator.permutation` may change between numpy versions, so an upgrade could break a resumed run.
    """
    return _permute(rows, seed, 0, epoch)


def _permute(rows: int, seed: int, part: int, epoch: int) -> np.ndarray:
    # The hash gives each (seed, epoch, part) an unrelated key. A stable sort makes equal draws deterministic, too.
    name = f"data order {seed} {epoch}" + (f" part {part}" if part else "")
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
    order = np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable").astype(np.int64)
    # The caches return the same array to all callers.
    order.flags.writeable = False
    return order
