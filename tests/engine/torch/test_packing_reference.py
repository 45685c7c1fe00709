"""Packing and reading batches by arrays gives what plain Python lists give, also for ragged, empty and null rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from engine.backends.torch.packing import micro_batches, pack, shared_prefix
from engine.errors import BadSpec
from engine.models.samples import Sample, as_loss_mask, as_token_ids, rows_of_lists, samples_from_table
from storage.store.tables import table_schema

Row = tuple[list[int], list[bool], str]


def random_rows(draw: random.Random) -> list[Row]:
    """Rows of a few groups and of none, with common prompts, empty completions, and trained tokens in between."""
    rows: list[Row] = []
    for group in range(draw.randint(1, 4)):
        name = draw.choice(["", f"g{group}"])
        prompt = [draw.randint(1, 3) for _ in range(draw.randint(1, 6))]
        for _ in range(draw.randint(1, 4)):
            own = [draw.randint(1, 3) for _ in range(draw.randint(0, 6))]
            if draw.random() < 0.2:  # segments of an episode may begin with other tokens
                prompt = [draw.randint(1, 3) for _ in prompt]
            mask = [False] * len(prompt) + [draw.random() < 0.7 for _ in own]
            rows.append((prompt + own, mask, name))
    draw.shuffle(rows)
    return rows


def plain_prefix(rows: list[Row]) -> int:
    """The definition: leading tokens that all rows have, that none trains, and of which each row has more."""
    shared = 0
    for position in range(min(len(ids) for ids, _, _ in rows) - 1):
        tokens = {ids[position] for ids, _, _ in rows}
        if len(tokens) > 1 or any(mask[position] for _, mask, _ in rows):
            break
        shared += 1
    return shared


def plain_pack(rows: list[Row]) -> tuple[list[int], list[int], list[int], list[int]]:
    """(tokens, positions, sources, targets) of one packed row, whose neighbours of one group share their prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    index = 0
    while index < len(rows):
        end = index + 1
        while rows[index][2] and end < len(rows) and rows[end][2] == rows[index][2]:
            end += 1
        members = rows[index:end]
        prefix = plain_prefix(members) if len(members) > 1 else 0
        start = len(tokens)
        tokens += members[0][0][:prefix]
        positions += range(prefix)
        for ids, mask, _ in members:
            # Place of each token of this row in the packed row.
            places = [*range(start, start + prefix), *range(len(tokens), len(tokens) + len(ids) - prefix)]
            tokens += ids[prefix:]
            positions += range(prefix, len(ids))
            for position in range(1, len(ids)):
                if mask[position]:
                    sources.append(places[position - 1])
                    targets.append(ids[position])
        index = end
    return tokens, positions, sources, targets


@pytest.mark.parametrize("seed", range(60))
def test_a_packed_row_is_that_of_plain_lists(seed: int) -> None:
    rows = random_rows(random.Random(seed))
    samples = [Sample(ids, mask, group) for ids, mask, group in rows]
    order = sorted(range(len(rows)), key=lambda index: rows[index][2])
    packed = pack([samples[index] for index in order], device=torch.device("cpu"))
    tokens, positions, sources, targets = plain_pack([rows[index] for index in order])
    assert packed.token_ids_T.tolist() == tokens and packed.positions_T.tolist() == positions
    assert packed.source_N.tolist() == sources and packed.target_N.tolist() == targets
    assert packed.trained_S == tuple(sum(rows[index][1]) for index in order)
    assert all(tensor.dtype == torch.long for tensor in (packed.token_ids_T, packed.source_N, packed.target_N))
    assert shared_prefix(samples) == plain_prefix(rows)


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_fill_with_runs_of_a_group(seed: int) -> None:
    draw = random.Random(seed)
    rows = random_rows(draw)
    limit = max(len(ids) for ids, _, _ in rows) + draw.randint(0, 15)
    batches = micro_batches([Sample(*row) for row in rows], max_tokens=limit)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        tokens, *_ = plain_pack([rows[index] for index in batch])
        assert len(tokens) <= limit


def test_a_group_that_is_split_is_not_joined_again() -> None:
    """Two samples share 50 tokens, and the third only 5 with them: in one row, the common prompt would be 5 long."""
    long, short = [1] * 50, [1] * 5 + [2] * 15
    rows = [(ids, [False] * len(ids), "g") for ids in (long + [3] * 10, long + [4] * 10, short)]
    assert micro_batches([Sample(*row) for row in rows], max_tokens=100) == [[0, 1], [2]]


def batch(**columns: Any) -> pa.Table:
    rows = len(columns["token_ids"])
    columns = {"group": ["g"] * rows, "completion": [0] * rows, **columns}
    schema = table_schema("batch")
    arrays = [pa.array(columns.get(field.name, [None] * rows), field.type) for field in schema]
    return pa.table(arrays, schema=schema)


def test_samples_have_the_values_of_the_table() -> None:
    ids = [[5, 6, 7], [], [1], [2, 3]]
    masks = [[False, True, True], [], [False], [False, True]]
    advantages = [[0.5, -1.5], [], [], [2.0]]
    table = batch(token_ids=ids, loss_mask=masks, advantages=advantages, old_logprobs=[[-1, -2], None, [], [-3]])
    # Several chunks and a slice, as a reader of row groups may return them.
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    for given, first in ((table, 0), (chunked, 0), (table.slice(2), 2)):
        samples = samples_from_table(given)
        assert [s.token_ids.tolist() for s in samples] == ids[first:]
        assert [s.loss_mask.tolist() for s in samples] == masks[first:]
        assert [s.advantages.tolist() for s in samples] == advantages[first:]
        assert [s.trained for s in samples] == [2, 0, 0, 1][first:]
        olds = [None if s.old_logprobs is None else s.old_logprobs.tolist() for s in samples]
        assert olds == [[-1.0, -2.0], None, [], [-3.0]][first:]
        assert all(s.returns is None and s.preferred is None for s in samples)
    assert samples_from_table(table)[0].advantages.dtype == np.float32


def test_rows_of_an_empty_column() -> None:
    assert rows_of_lists(pa.chunked_array([], pa.list_(pa.int32()))) == []
    assert samples_from_table(batch(token_ids=[], loss_mask=[])) == []


@pytest.mark.parametrize("ids", [[1.5], [1 << 31], [-(1 << 31) - 1], ["a"], [None], [[1]], [1 << 70], [True]])
def test_token_ids_that_are_no_integers_of_32_bits_are_refused(ids: list[Any]) -> None:
    with pytest.raises(BadSpec, match="not integers of 32 bits"):
        as_token_ids(ids, "a sample")
    with pytest.raises(BadSpec, match="not integers of 32 bits"):
        as_token_ids(np.asarray([ids, ids]), "a sample")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0, float("nan")], "a token of weight nan"),
        ([0, float("inf")], "a token of weight inf"),
        ([0, -1], "a token of weight -1"),
        ([1, 0], "the first token of a sample has a weight above 0"),
        ([True, False], "the first token of a sample has a weight above 0"),
        ([0, 1, 1], "2 tokens and 3 weights"),
        ([[0, 1], [1, 0]], "not a list of numbers"),
        ([[0, 1], [1]], "not a list of numbers"),
        (["0", "1"], "not a list of numbers"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: list[Any], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        as_loss_mask(weights, 2, "a sample")
