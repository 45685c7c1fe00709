"""The order in which a run walks through a dataset: a seeded permutation per epoch, and a cursor into it.

The cursor is two integers, kept in the commit records, so a resumed run goes on where the chain stands.
"""

import hashlib
from collections import Counter
from functools import lru_cache

import numpy as np
from pydantic import Field

from storage.serialization import Frozen


class DataCursor(Frozen):
    """How far a run has read: `index` rows of epoch `epoch` are taken. Always `index < rows`."""

    epoch: int = Field(default=0, ge=0)
    index: int = Field(default=0, ge=0)


def take(cursor: DataCursor, n: int, *, rows: int, seed: int) -> tuple[list[int], DataCursor]:
    """The next `n` row indices and the cursor after them.

    Within an epoch no row comes twice; when an epoch is used up the next one begins, under another permutation.
    The result depends on the arguments only, so n1 then n2 rows are the same rows as n1 + n2 at once.
    """
    if rows < 1:
        raise ValueError(f"given a dataset of {rows} rows; expected at least 1")
    if n < 0:
        raise ValueError(f"given n={n}; expected 0 or more rows to take")
    if cursor.index >= rows:
        raise ValueError(
            f"given a cursor after {cursor.index} rows of an epoch, and a dataset of {rows} rows; the cursor belongs "
            f"to another dataset. Start a new run, or give the dataset this run began with."
        )
    taken: list[int] = []
    epoch, index = cursor.epoch, cursor.index
    while len(taken) < n:
        order = permutation(rows, seed=seed, epoch=epoch)
        chunk = order[index : index + n - len(taken)]
        taken.extend(int(row) for row in chunk)
        index += len(chunk)
        if index == rows:
            epoch, index = epoch + 1, 0
    return taken, DataCursor(epoch=epoch, index=index)


def repetitions(rows: list[int]) -> list[int]:
    """How often each row came before in the same list."""
    seen: Counter[int] = Counter()
    counts = []
    for row in rows:
        counts.append(seen[row])
        seen[row] += 1
    return counts


@lru_cache(maxsize=2)
def permutation(rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(rows), int64, read-only; a function of (rows, seed, epoch) and nothing else.

    It sorts the raw 64-bit stream of Philox, which numpy promises never to change; `Generator.permutation`, whose
    stream may change between numpy versions, would break a resumed run after an upgrade.
    """
    key = int.from_bytes(hashlib.sha256(f"data order {seed} {epoch}".encode()).digest()[:16], "big")
    order = np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
