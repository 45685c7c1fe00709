"""Reads the tables of a step's shards in order: several at a time, but never all in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_step_table

AHEAD = 16
"""Shards that are read concurrently, so that a step of thousands does not wait for the latency of each request."""


def read_tables(
    store: ObjectStore, refs: Sequence[ArtifactRef], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yields the tables of `refs` in order; at most AHEAD are in memory. Raises the errors of `read_table`."""
    if len(refs) == 1:
        yield read_step_table(store, refs[0], columns)
        return
    pool = ThreadPoolExecutor(min(AHEAD, max(1, len(refs))), thread_name_prefix="shards")
    try:
        waiting: deque[Future[pa.Table]] = deque()
        for ref in refs:
            # Yield the oldest table before another read begins, which bounds the memory.
            if len(waiting) == AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(read_step_table, store, ref, columns))
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Also reached when the caller stops early: reads that have not begun are dropped.
        pool.shutdown(cancel_futures=True)
