"""CPU time that the caller of an engine spends per token to have the rows of a batch scored over HTTP.

    PYTHONPATH=. .venv/bin/python bench/token_handling.py --rows 512 --tokens 1024

"sequences" sends the tokens (`logprobs`): it makes TokenSequences of the rows, encodes the request, decodes the
response and makes a column of it. "committed rows" names the rows of a table (`logprobs_of_rows`), which the engine
reads itself. Both end with the same column. The times are the least of `--repeats` tries of the process's CPU time,
without the engine and the connection.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from engine.http import wire
from engine.models.samples import rows_of_lists
from engine.protocol import LogprobsRequest, RowsRequest, TableRows, TokenSequence
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.columns import batch_table, token_values

POLICY = PolicyRef(run="r", stage="0-grpo", model="policy", step=0, state="0" * 64)
ROLLOUTS = ArtifactRef(kind="rollouts", key="runs/r/rollouts", sha256="0" * 64, bytes=1, rows=None, parents=())
PROMPT_TOKENS = 16


def columns_of(rows: int, tokens: int) -> dict[str, pa.Array]:
    """Rows of a batch without logprobs of the trainer, 8 per prompt."""
    random = np.random.default_rng(0)
    length = PROMPT_TOKENS + tokens
    offsets, trained_offsets = np.arange(rows + 1) * length, np.arange(rows + 1) * tokens
    mask = np.tile(np.arange(length) >= PROMPT_TOKENS, rows)

    def lists(starts: np.ndarray, values: np.ndarray) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values))

    logprobs = -random.exponential(1.0, rows * tokens).astype(np.float32)
    return {
        "group": pa.array([str(row // 8) for row in range(rows)]),
        "completion": pa.array(np.arange(rows, dtype=np.int32) % 8),
        "token_ids": lists(offsets, random.integers(3, 100_000, rows * length, dtype=np.int32)),
        "loss_mask": lists(offsets, mask),
        "sampler_logprobs": lists(trained_offsets, logprobs),
        "advantages": lists(trained_offsets, np.ones(rows * tokens, np.float32)),
        "reward": pa.array(np.ones(rows)),
    }


def with_sequences(columns: dict[str, pa.Array], response: bytes) -> pa.Table:
    """The batch, scored by its tokens."""
    parts = (rows_of_lists(columns["token_ids"]), rows_of_lists(columns["loss_mask"]), columns["group"].to_pylist())
    sequences = [TokenSequence(*row) for row in zip(*parts, strict=True)]
    wire.encode_logprobs_request(LogprobsRequest(POLICY, sequences), epoch=0)
    logprobs = wire.decode_logprobs(response)
    return batch_table(columns, old_logprobs=np.array([logprob for row in logprobs for logprob in row]))


def with_rows(columns: dict[str, pa.Array], response: bytes) -> pa.Table:
    """The batch, scored by the rows of its table."""
    tables = [TableRows(ROLLOUTS, np.ones(len(columns["group"]), bool))]
    wire.encode_rows_request(RowsRequest(POLICY, tables), epoch=0)
    return batch_table(columns, old_logprobs=wire.decode_scores(response))


def cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time per token of a scoring call's caller.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="trained tokens per row")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    columns = columns_of(options.rows, options.tokens)
    total = options.rows * options.tokens
    scores = -np.random.default_rng(1).exponential(1.0, total).astype(np.float32)
    by_row, flat = wire.encode_logprobs(np.split(scores.astype(np.float64), options.rows)), wire.encode_scores(scores)
    before, after = with_sequences(columns, by_row), with_rows(columns, flat)
    assert np.array_equal(token_values(before, "old_logprobs"), token_values(after, "old_logprobs"))
    for name, call in (
        ("sequences", lambda: with_sequences(columns, by_row)),
        ("committed rows", lambda: with_rows(columns, flat)),
    ):
        print(f"{name}: {1e9 * cpu_seconds(call, options.repeats) / total:.1f} ns of CPU per trained token")


if __name__ == "__main__":
    main()
