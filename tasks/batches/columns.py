"""Builds the rows of an RL batch as Arrow columns, whole shards at a time, without a Python object per token.

Axes: N row · T token of all rows, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.store.tables import table_schema
from tasks.batches.advantages import ESTIMATORS, Rewards


class Grades:
    """The grades of all completions of a step, and the advantages computed from them.

    It holds some tens of bytes per completion, so all grades of a step fit into memory. Its rows are the rows of the
    shards, one shard after the other. `table` has the columns prompt_id, completion, reward and status.
    """

    def __init__(self, table: pa.Table) -> None:
        self._prompts = table.column("prompt_id").combine_chunks()
        self._completions = table.column("completion").combine_chunks()
        valid = pc.equal(table.column("status"), "ok")
        rewards = pc.if_else(valid, table.column("reward"), pa.scalar(None, pa.float64()))
        self.rewards: pa.Array = rewards.combine_chunks()
        """Null where the grade is masked or ignored."""
        self.rewards_after_penalty_N = self.rewards.to_numpy(zero_copy_only=False).astype(np.float64)
        """The rewards minus the penalties, from which advantages are computed; NaN where there is no reward."""
        self.masked_N = np.zeros(len(self.rewards), dtype=bool)
        """True for completions that are left out of the batch. Their rewards still count in their groups."""
        self._in_batch_N = np.zeros(len(self.rewards), dtype=bool)

    def advantages(self, estimator: str) -> np.ndarray:
        """float32 [N]: the advantage of each completion; NaN where the grade is masked or ignored."""
        shaped = [None if np.isnan(reward) else reward for reward in self.rewards_after_penalty_N.tolist()]
        return group_advantages(self._prompts, shaped, estimator)

    def mask_equal_groups(self) -> None:
        """Leaves out the completions of each prompt whose valid rewards are all equal."""
        group_N = _group_numbers(self._prompts)
        groups = group_N.max(initial=-1) + 1
        # A group without a valid reward keeps low = inf and high = -inf, so it counts as equal and is masked.
        low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
        valid_N = ~np.isnan(self.rewards_after_penalty_N)
        np.minimum.at(low, group_N[valid_N], self.rewards_after_penalty_N[valid_N])
        np.maximum.at(high, group_N[valid_N], self.rewards_after_penalty_N[valid_N])
        self.masked_N |= ~(low < high)[group_N]

    @property
    def batch_rows(self) -> np.ndarray:
        """Indices of the completions that `batch_columns_of` put into the batch so far, in the order of the batch."""
        return np.flatnonzero(self._in_batch_N)

    @property
    def prompts_N(self) -> np.ndarray:
        return self._prompts.to_numpy(zero_copy_only=False)

    def batch_columns_of(self, rollouts: pa.Table, start: int, advantages_N: np.ndarray) -> dict[str, pa.Array] | None:
        """The columns of the batch for the shard whose grades begin at row `start`, without the completions that are
        empty, masked or without a grade. None if the rows from `start` are not the grades of this shard."""
        # The grades must be in the same order as the rollouts: a wrong order would train on the rewards of others.
        part = slice(start, start + rollouts.num_rows)
        same_prompts = self._prompts[part].equals(rollouts.column("prompt_id").combine_chunks())
        same_completions = self._completions[part].equals(rollouts.column("completion").combine_chunks())
        if not same_prompts or not same_completions:
            return None

        # Choose the rows that are trained.
        has_tokens_N = _lengths(rollouts.column("completion_ids").combine_chunks()) > 0
        trained_N = has_tokens_N & ~np.isnan(self.rewards_after_penalty_N[part]) & ~self.masked_N[part]
        self._in_batch_N[part] = trained_N
        mask = pa.array(trained_N)
        return batch_columns(rollouts.filter(mask), advantages_N[part][trained_N], self.rewards[part].filter(mask))

    def prompts_in_batch(self) -> int:
        """Number of prompts with at least one row in the batch so far."""
        return len(pc.unique(self._prompts.filter(pa.array(self._in_batch_N))))


def group_advantages(prompts_N: pa.Array, rewards_N: Rewards, estimator: str) -> np.ndarray:
    """float32 [N]: the advantage of each completion within the group of its prompt, whose members may be in different
    shards. A reward that is None (masked or ignored) gets NaN; the rest of its group still gets advantages."""
    # Sort the rows by group, so that a group is one slice of the order.
    group_N = _group_numbers(prompts_N)
    order_N = np.argsort(group_N, kind="stable")
    group_starts = np.flatnonzero(np.diff(group_N[order_N])) + 1
    advantages_N = np.full(len(group_N), np.nan, dtype=np.float32)
    if len(order_N) == 0:
        return advantages_N
    for members in np.split(order_N, group_starts):
        advantages_G = ESTIMATORS[estimator]([rewards_N[i] for i in members])
        advantages_N[members] = [np.nan if advantage is None else advantage for advantage in advantages_G]
    return advantages_N


def batch_columns(rollouts: pa.Table, advantages_N: np.ndarray, rewards_N: pa.Array) -> dict[str, pa.Array]:
    """The columns of a batch without the trainer's logprobs. Prompt and completion become one sequence, whose trained
    tokens are those of the completion. All rows of `rollouts` are trained."""
    prompts = rollouts.column("prompt_ids").combine_chunks()
    completions = rollouts.column("completion_ids").combine_chunks()
    token_ids_T, from_completion_T, offsets = _concatenate_rows(prompts, completions)
    lengths_N = _lengths(completions)
    columns = {
        "group": rollouts.column("prompt_id").combine_chunks(),
        "completion": rollouts.column("completion").combine_chunks(),
        "token_ids": _lists(offsets, token_ids_T, pa.int32()),
        "loss_mask": _lists(offsets, from_completion_T, pa.bool_()),
        "advantages": _lists(_offsets(lengths_N), np.repeat(advantages_N, lengths_N), pa.float32()),
        "sampler_logprobs": rollouts.column("logprobs").combine_chunks(),
        "reward": rewards_N,
    }
    if "images" in rollouts.column_names:
        # Images are in the prompt, so their positions are the same in the whole sequence.
        columns["images"] = rollouts.column("images").combine_chunks()
    return columns


def batch_table(
    columns: dict[str, pa.Array], old: Sequence[Sequence[float]] | None, reference: Sequence[Sequence[float]] | None
) -> pa.Table:
    """The rows of a batch with the old and the reference logprobs. None leaves that column null: the loss does not use
    it."""
    schema = table_schema("batch", columns)
    rows = len(columns["group"])
    arrays = {field.name: pa.nulls(rows, field.type) for field in schema if field.nullable}
    arrays |= columns
    for name, values in (("old_logprobs", old), ("reference_logprobs", reference)):
        if values is not None:
            arrays[name] = pa.array(values, schema.field(name).type)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def with_token_column(table: pa.Table, name: str, values_T: np.ndarray) -> pa.Table:
    """Replaces the column `name` of the batch. `values_T` has one value per trained token of all rows."""
    lists = _lists(_offsets(trained_lengths(table)), values_T.astype(np.float32), pa.float32())
    return table.set_column(table.column_names.index(name), table.schema.field(name), lists)


def trained_lengths(table: pa.Table) -> np.ndarray:
    """int64 [N]: number of trained tokens of each row."""
    return _lengths(table["advantages"].combine_chunks())


def gap_to_reference(table: pa.Table, column: str) -> np.ndarray:
    """float64 [T]: the logprobs in `column` minus the reference's, in nats, at each trained token."""
    return token_values(table, column) - token_values(table, "reference_logprobs")


class LogprobGap:
    """Mean |sampler - trainer| logprob of batches, in nats, over the tokens that have both."""

    def __init__(self) -> None:
        self.total, self.tokens = 0.0, 0

    def add(self, batch: pa.Table) -> None:
        """Includes the tokens of `batch` in the mean."""
        has_both = pc.and_(pc.is_valid(batch["old_logprobs"]), pc.is_valid(batch["sampler_logprobs"]))
        rows = batch.filter(has_both)
        trainer_T = token_values(rows, "old_logprobs")
        sampler_T = token_values(rows, "sampler_logprobs")
        self.total += float(np.abs(trainer_T - sampler_T).sum())
        self.tokens += len(trainer_T)

    @property
    def mean(self) -> float | None:
        """None if no token has both logprobs."""
        return self.total / self.tokens if self.tokens else None


def _concatenate_rows(first: pa.ListArray, second: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenates the two lists of each row. Returns the values of all rows, whether each value comes from the second
    list, and the offsets of the rows."""
    first_N, second_N = _lengths(first), _lengths(second)
    offsets = _offsets(first_N + second_N)
    # Lengths in the order of the values: first list of row 0, second list of row 0, first list of row 1, ...
    lengths = np.stack([first_N, second_N], axis=1).ravel()
    from_second_T = np.repeat(np.tile([False, True], len(first_N)), lengths)
    values_T = np.empty(len(from_second_T), dtype=np.int32)
    values_T[~from_second_T] = _flatten(first)
    values_T[from_second_T] = _flatten(second)
    return values_T, from_second_T, offsets


def _group_numbers(prompts_N: pa.Array) -> np.ndarray:
    """[N]: a number per prompt, from 0 in the order of first appearance."""
    return prompts_N.dictionary_encode().indices.to_numpy(zero_copy_only=False)


def token_values(table: pa.Table, column: str) -> np.ndarray:
    """float64 [T]: the values of a list column, all rows one after the other."""
    return _flatten(table[column].combine_chunks()).astype(np.float64)


def _lengths(lists: pa.ListArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)


def _flatten(lists: pa.ListArray) -> np.ndarray:
    return lists.flatten().to_numpy(zero_copy_only=False)


def _offsets(lengths_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_N)])


def _lists(offsets: np.ndarray, values_T: np.ndarray, item_type: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values_T, item_type))
