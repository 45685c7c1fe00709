"""Many shards of a step, read by one process: in order, some on their way at once, never all in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

AHEAD = 16
"""Shards on their way at once: a step of thousands waits for bandwidth, not for the latency of each request."""


def read_tables(
    store: ObjectStore, refs: Sequence[ArtifactRef], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The tables of `refs`, in their order; at most AHEAD are in memory. Raises what read_table does."""
    if len(refs) == 1:
        yield read_table(store, refs[0], columns)
        return
    pool = ThreadPoolExecutor(min(AHEAD, max(1, len(refs))), thread_name_prefix="shards")
    try:
        waiting: deque[Future[pa.Table]] = deque()
        for ref in refs:
            if len(waiting) == AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(read_table, store, ref, columns))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
