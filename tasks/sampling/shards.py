"""Reads the tables of a step's shards in order: several at a time, but never all in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from engine.errors import BadSpec
from engine.protocol import SamplingParams
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_column, read_step_table
from tasks.datasets.load import LoadedDataset
from tasks.sampling.completions import prompt_limit

AHEAD = 16
"""Shards that are read concurrently, so that a step of thousands does not wait for the latency of each request."""
SHARDS_AT_ONCE = 256
"""Shards of a step that are sampled or graded at a time: as many as an engine server admits by default
(engine.http.calls.CallLimits), and few enough that memory does not grow with the number of shards."""


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


def rows_that_fit(
    workspace: Workspace,
    data: LoadedDataset,
    base: ArtifactRef,
    *,
    max_prompt_tokens: int | None,
    sampling: SamplingParams,
) -> list[int]:
    """The rows whose prompts have at most `max_prompt_tokens` tokens and leave room for a completion. `base` is the
    model whose tokenizer counts. Raises BadSpec if there is no such row."""
    store = workspace.open_store()
    limit = prompt_limit(workspace, base, max_prompt_tokens, sampling)
    if limit is None:
        return list(range(data.rows))
    renderer = renderer_of(store, base)
    rows = []
    for row, thread in enumerate(read_column(store, data.ref, "thread")):
        prompt = renderer.prompt_sequence(StringThread.from_json(str(thread)))
        if len(prompt.token_ids) <= limit:
            rows.append(row)
    if not rows:
        raise BadSpec(f"all {data.rows} prompts have more than {limit} tokens; raise max_prompt_tokens")
    return rows
