"""Rows of an RL batch as Arrow columns: whole shards at a time, no Python object per token.

Axes: N row, T token of all rows
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.store.tables import table_schema
from tasks.credit.advantages import ESTIMATORS, Rewards


class Grades:
    """The grades of a whole step, and the advantages over them: some tens of bytes per completion, however long it is.

    Its rows are those of the shards, one after the other. `table` has prompt_id, completion, reward and status.
    """

    def __init__(self, table: pa.Table) -> None:
        self._prompts, self._completions = (_whole(table.column(name)) for name in ("prompt_id", "completion"))
        valid = pc.equal(table.column("status"), "ok")
        self.rewards: pa.Array = _whole(pc.if_else(valid, table.column("reward"), pa.scalar(None, pa.float64())))
        """Null where the grade is masked or ignored."""
        self.shaped_N = self.rewards.to_numpy(zero_copy_only=False).astype(np.float64)
        """The rewards as they become advantages: with whatever was taken off them; NaN where there is none."""
        self.masked_N = np.zeros(len(self.rewards), dtype=bool)
        """Left out of the batch, though their rewards count in their groups."""
        self._kept = np.zeros(len(self.rewards), dtype=bool)

    def advantages(self, estimator: str) -> np.ndarray:
        """float32 [N]: NaN where the grade is masked or ignored."""
        shaped = [None if np.isnan(reward) else reward for reward in self.shaped_N.tolist()]
        return advantages_of(self._prompts, shaped, estimator)

    def mask_equal_groups(self) -> None:
        """Leaves out the completions of each prompt whose valid rewards are all equal."""
        codes_N = self._prompts.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        valid_N = ~np.isnan(self.shaped_N)
        low, high = (np.full(codes_N.max(initial=-1) + 1, start) for start in (np.inf, -np.inf))
        np.minimum.at(low, codes_N[valid_N], self.shaped_N[valid_N])
        np.maximum.at(high, codes_N[valid_N], self.shaped_N[valid_N])
        self.masked_N |= ~(low < high)[codes_N]

    @property
    def kept_rows(self) -> np.ndarray:
        """Indices of the completions that were kept so far, in the order of the batch."""
        return np.flatnonzero(self._kept)

    @property
    def prompts_N(self) -> np.ndarray:
        return self._prompts.to_numpy(zero_copy_only=False)

    def kept(self, rollouts: pa.Table, start: int, advantages_N: np.ndarray) -> dict[str, pa.Array] | None:
        """Columns of the batch for the shard whose grades begin at row `start`: what has a grade, is not masked and not
        empty. None when these are not its grades, in its order."""
        part = slice(start, start + rollouts.num_rows)
        named = (self._prompts, "prompt_id"), (self._completions, "completion")
        if not all(mine[part].equals(_whole(rollouts.column(name))) for mine, name in named):
            return None
        teaches_N = _lengths(_whole(rollouts.column("completion_ids"))) > 0
        self._kept[part] = teaches_N & ~np.isnan(self.shaped_N[part]) & ~self.masked_N[part]
        mask = pa.array(self._kept[part])
        return batch_columns(
            rollouts.filter(mask), advantages_N[part][self._kept[part]], self.rewards[part].filter(mask)
        )

    def prompts_kept(self) -> int:
        """Prompts with at least one row that was kept so far."""
        return len(pc.unique(self._prompts.filter(pa.array(self._kept))))


def advantages_of(prompts_N: pa.Array, rewards_N: Rewards, estimator: str) -> np.ndarray:
    """float32 [N]: the advantage of each completion over its prompt's group, wherever in the step its members are. A
    reward that is None (masked, ignored) gets NaN and leaves only itself out: one bad sample never drops its group."""
    codes_N = prompts_N.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order_N = np.argsort(codes_N, kind="stable")
    bounds = np.flatnonzero(np.diff(codes_N[order_N])) + 1
    found_N = np.full(len(codes_N), np.nan, dtype=np.float32)
    for members in np.split(order_N, bounds) if len(order_N) else ():
        group = ESTIMATORS[estimator]([rewards_N[i] for i in members])
        found_N[members] = [np.nan if value is None else value for value in group]
    return found_N


def batch_columns(rollouts: pa.Table, advantages_N: np.ndarray, rewards_N: pa.Array) -> dict[str, pa.Array]:
    """The columns of a batch but the trainer's logprobs: prompt and completion as one sequence, weight 1 on the
    completion. `rollouts` holds the kept rows only."""
    prompts, completions = (_whole(rollouts.column(name)) for name in ("prompt_ids", "completion_ids"))
    ids, trained_T, offsets = _joined(prompts, completions)
    lengths_N = _lengths(completions)
    images = {"images": _whole(rollouts.column("images"))} if "images" in rollouts.column_names else {}
    return {
        "group": _whole(rollouts.column("prompt_id")),
        "completion": _whole(rollouts.column("completion")),
        "token_ids": _lists(offsets, ids, pa.int32()),
        "weights": _lists(offsets, trained_T.astype(np.float32), pa.float32()),
        "advantages": _lists(_offsets(lengths_N), np.repeat(advantages_N, lengths_N), pa.float32()),
        "sampler_logprobs": _whole(rollouts.column("logprobs")),
        "reward": rewards_N,
        **images,  # which stand in the prompt: their places are those of the whole sequence
    }


def batch_table(
    columns: dict[str, pa.Array], old: Sequence[Sequence[float]] | None, reference: Sequence[Sequence[float]] | None
) -> pa.Table:
    """The rows of a batch with the logprobs that its loss compares with; None: it compares with none."""
    schema, rows = table_schema("batch", columns), len(columns["group"])
    for name, values in (("old_logprobs", old), ("reference_logprobs", reference)):
        if values is not None:
            columns = columns | {name: pa.array(values, schema.field(name).type)}
    none = {field.name: pa.nulls(rows, field.type) for field in schema if field.nullable}
    return pa.table([(none | columns)[name] for name in schema.names], schema=schema)


def with_lists(table: pa.Table, name: str, values_T: np.ndarray) -> pa.Table:
    """The batch with this column, one value per trained token of all rows."""
    lists = _lists(_offsets(trained_lengths(table)), values_T.astype(np.float32), pa.float32())
    return table.set_column(table.column_names.index(name), table.schema.field(name), lists)


def trained_lengths(table: pa.Table) -> np.ndarray:
    """int64 [N]: trained tokens of each row."""
    return _lengths(_whole(table["advantages"]))


def policy_gap(table: pa.Table, old: str) -> np.ndarray:
    """float64 [T]: logprob of the column `old` less the reference's, nats, at each trained token."""
    mine, theirs = (_flat(_whole(table[name])).astype(np.float64) for name in (old, "reference_logprobs"))
    return mine - theirs


class LogprobGap:
    """Mean |sampler - trainer| logprob of batches, nats, over the tokens that have both."""

    def __init__(self) -> None:
        self.total, self.tokens = 0.0, 0

    def add(self, batch: pa.Table) -> None:
        """Counts the tokens of `batch`, too."""
        both = batch.filter(pc.and_(pc.is_valid(batch["old_logprobs"]), pc.is_valid(batch["sampler_logprobs"])))
        trainer_T, sampler_T = (
            _flat(_whole(both[name])).astype(np.float64) for name in ("old_logprobs", "sampler_logprobs")
        )
        self.total += float(np.abs(trainer_T - sampler_T).sum())
        self.tokens += len(trainer_T)

    @property
    def mean(self) -> float | None:
        """None if no token has both logprobs."""
        return self.total / self.tokens if self.tokens else None


def _joined(first: pa.ListArray, second: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's two lists as one: the values, whether each is of the second list, and the rows' offsets."""
    one_N, two_N = _lengths(first), _lengths(second)
    offsets = _offsets(one_N + two_N)
    from_second_T = np.repeat(np.tile([False, True], len(one_N)), np.stack([one_N, two_N], axis=1).ravel())
    values_T = np.empty(len(from_second_T), dtype=np.int32)
    values_T[~from_second_T], values_T[from_second_T] = _flat(first), _flat(second)
    return values_T, from_second_T, offsets


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _lengths(lists: pa.ListArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)


def _flat(lists: pa.ListArray) -> np.ndarray:
    return lists.flatten().to_numpy(zero_copy_only=False)


def _offsets(lengths_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_N)])


def _lists(offsets: np.ndarray, values_T: np.ndarray, kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values_T, kind))
