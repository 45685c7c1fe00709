"""Grades of trajectories, their advantages, and the rows of an RL batch as Arrow columns, whole shards at a time,
without a Python object per token.

A completion is a trajectory of one segment with one turn.

Axes: K trajectory of a step · N segment, a row of the rollouts · U turn of all trajectories · G grade · T token of all
rows, one after the other
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import BadSpec
from engine.protocol import TableRows
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_tables, table_schema
from tasks.batches.advantages import DECOUPLED, Rewards, discounted, estimator_of, subtract_group_mean, whiten

_GRADES_OF_GRADER = ("prompt_index", "prompt_id", "completion", "reward", "status")
_GRADES_OF_ENVIRONMENT = (
    "prompt_index", "prompt_id", "completion", "segment", "turn_tokens", "graded_turns", "grades", "status", "ending",
)  # fmt: skip


class NotOneGrade(BadSpec):
    """A loss over whole sequences needs exactly one grade per trajectory."""


def read_grades(store: ObjectStore, graded: list[ArtifactRef], *, with_parts: bool = False) -> Grades:
    """The grades of a step. `graded` are the grades of each shard, or rollouts that their environment graded. With
    `with_parts`, they have the parts of the rewards, if a grader gave some."""
    by_environment = any(ref.kind == "rollouts" for ref in graded)
    columns = _GRADES_OF_ENVIRONMENT if by_environment else _GRADES_OF_GRADER
    tables = list(read_tables(store, graded, (*columns, "parts") if with_parts else columns))
    # a shard without a grade has no parts
    return Grades(pa.concat_tables(tables, promote_options="default"))


class TrainedRows(NamedTuple):
    """Rows of the batch, and their turns."""

    columns: dict[str, pa.Array]
    sources: list[TableRows]
    """The rows in the committed rollouts that they come from."""
    turns: np.ndarray
    """Index of each turn of the rows among all turns of the step."""
    turn_tokens: np.ndarray
    """Number of trained tokens of each of these turns."""

    @classmethod
    def concatenate(cls, parts: list[TrainedRows]) -> TrainedRows:
        """The rows of several shards."""
        columns = {}
        for name in parts[0].columns:
            columns[name] = pa.concat_arrays([part.columns[name] for part in parts])
        sources = [source for part in parts for source in part.sources]
        turns = np.concatenate([part.turns for part in parts])
        return cls(columns, sources, turns, np.concatenate([part.turn_tokens for part in parts]))


class Grades:
    """The grades of all trajectories of a step, and the advantages computed from them.

    It holds some tens of bytes per completion, so all grades of a step fit into memory. Its rows are the rows of the
    shards, one shard after the other. `table` has the columns of `graded` tables, or those of rollouts with grades.
    """

    def __init__(self, table: pa.Table) -> None:
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        self.by_environment = "grades" in columns
        self._prompts, self._completions = columns["prompt_id"], columns["completion"]
        self._rows_of_dataset = columns["prompt_index"]
        self._endings = columns.get("ending")
        self._parts = columns.get("parts")
        # The segments and turns of each trajectory.
        rows = table.num_rows
        turns_N, first_N = np.ones(rows, np.int32), np.ones(rows, bool)
        if self.by_environment:
            turns_N, first_N = _lengths(columns["turn_tokens"]), _numbers(columns["segment"]) == 0
        self._trajectory_N = np.cumsum(first_N, dtype=np.int32) - 1
        self._first_row_K = np.flatnonzero(first_N).astype(np.int32)
        self._turn_starts_N = _offsets(turns_N).astype(np.int32)
        self.trajectory_U = np.repeat(self._trajectory_N, turns_N)
        """The trajectory of each turn."""
        self._turns_K = np.bincount(self.trajectory_U, minlength=len(self._first_row_K)).astype(np.int32)
        self._finished_K = _numbers(pc.equal(columns["status"], "ok"))[self._first_row_K]
        self.masked_count = int(_numbers(pc.equal(columns["status"], "masked"))[self._first_row_K].sum())
        """Number of trajectories without a grade because of an error."""

        # The grades, and the turns that have them.
        if self.by_environment:
            row_G = np.repeat(np.arange(rows), _lengths(columns["grades"]))
            first_row_G = self._first_row_K[self._trajectory_N[row_G]]
            self.turn_G = self._turn_starts_N[first_row_G] + _flatten(columns["graded_turns"])
            self.grade_G = _flatten(columns["grades"]).astype(np.float64)
        else:
            rewards_K = _numbers(columns["reward"]).astype(np.float64)
            self.turn_G = np.flatnonzero(self._finished_K & ~np.isnan(rewards_K)).astype(np.int32)
            self.grade_G = rewards_K[self.turn_G]
        # `turn_G` are indices of turns; penalties are later subtracted from `grade_G`, which gives the advantages.
        self._trajectory_G = self.trajectory_U[self.turn_G]
        self.rewards_K = self._sums_of_grades()
        """The sum of the grades of each trajectory, before penalties; NaN where it has none."""
        self._group_K = _group_numbers(self._prompts)[self._first_row_K]
        self.left_out_K = np.zeros(len(self._first_row_K), dtype=bool)
        """True for trajectories that are left out of the batch. Their rewards still count in their groups."""
        self._in_batch_N = np.zeros(rows, dtype=bool)

    def _sums_of_grades(self) -> np.ndarray:
        rewards_K = np.full(len(self._first_row_K), np.nan)
        rewards_K[self._trajectory_G] = self.grade_G
        # The grades of a trajectory are adjacent. Only those of several turns need a sum.
        grades_K = np.bincount(self._trajectory_G, minlength=len(rewards_K))
        ends_K = np.cumsum(grades_K)
        for k in np.flatnonzero(grades_K > 1):
            rewards_K[k] = math.fsum(self.grade_G[ends_K[k] - grades_K[k] : ends_K[k]])
        return rewards_K

    @property
    def rewards(self) -> np.ndarray:
        """The rewards of the trajectories that have a grade."""
        return self.rewards_K[~np.isnan(self.rewards_K)]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of trajectories, of those that were neither masked nor ignored, and of those with a grade."""
        return len(self.rewards_K), int(self._finished_K.sum()), len(self.rewards)

    def advantages(
        self, estimator: str, *, pass_k: int | None = None, per_trajectory: bool = False
    ) -> np.ndarray:
        """float32 [U]: the advantage of each turn. The grades of all turns of a group are normalised together; the
        advantage of a turn is the sum of its trajectory's normalised grades at and after it. With `per_trajectory`, it
        is that of the trajectory's only grade, whichever turn has it. Raises NotOneGrade."""
        if estimator == DECOUPLED:
            return self.decoupled_advantages()
        if per_trajectory:
            self._check_one_grade()
        group_G = self._group_K[self._trajectory_G]
        normalised_G = group_advantages(group_G, self.grade_G.tolist(), estimator, pass_k)
        if per_trajectory:
            advantages_K = np.zeros(len(self.rewards_K), np.float32)
            advantages_K[self._trajectory_G] = normalised_G
            return advantages_K[self.trajectory_U]
        return discounted(self.per_turn(normalised_G), self._turns_K, 1.0)

    def decoupled_advantages(self) -> np.ndarray:
        """float32 [U]: the parts of the rewards normalised within the group by `group`, each times its weight, added,
        and whitened over all completions with a grade (GDPO, arXiv:2601.05242). A completion without a part has 0 for
        it. Raises BadSpec if no reward has parts."""
        if self._parts is None or self._parts.null_count == len(self._parts):
            raise BadSpec(
                "advantage_estimator='gdpo' normalises the parts of the rewards, and no grade of the step has parts; "
                "give a tasks.graders.CombinedGrader, whose graders are the parts, or Grade(parts=...) in a grader of "
                "your own"
            )
        row_P = np.repeat(np.arange(len(self._parts)), _numbers(pc.fill_null(pc.list_value_length(self._parts), 0)))
        name_P, value_P, weight_P = (self._parts.flatten().field(name) for name in ("name", "value", "weight"))
        names, values, weights = np.asarray(name_P), _numbers(value_P), _numbers(weight_P)
        sums_K = np.zeros(len(self.rewards_K))
        for name in sorted(set(names)):
            own_P = names == name
            rewards: list[float | None] = [None] * len(self.rewards_K)
            for row, value in zip(row_P[own_P], values[own_P], strict=True):
                rewards[row] = value
            weights_K = np.zeros(len(self.rewards_K))
            weights_K[row_P[own_P]] = weights[own_P]
            sums_K += weights_K * np.nan_to_num(group_advantages(self._group_K, rewards, "group"))
        valid_K = ~np.isnan(self.rewards_K)
        sums_K[valid_K] = whiten(sums_K[valid_K])
        return sums_K[self.trajectory_U].astype(np.float32)

    def centred_advantages(self) -> np.ndarray:
        """float64 [U]: like `advantages`, with each grade minus the mean grade of its prompt."""
        centred_G = subtract_group_mean(self.grade_G, self._group_K[self._trajectory_G])
        return discounted(self.per_turn(centred_G), self._turns_K, 1.0)

    def per_turn(self, values_G: np.ndarray) -> np.ndarray:
        """[U]: the values of the grades at their turns, and 0 at the others."""
        values_U = np.zeros(len(self.trajectory_U), values_G.dtype)
        values_U[self.turn_G] = values_G
        return values_U

    def _check_one_grade(self) -> None:
        """Raises NotOneGrade if a trajectory that ended well has no grade or several."""
        grades_K = np.bincount(self._trajectory_G, minlength=len(self.rewards_K))
        wrong_K = np.flatnonzero(self._finished_K & (grades_K != 1))
        if not len(wrong_K):
            return
        k, row = wrong_K[0], int(self._first_row_K[wrong_K[0]])
        if grades_K[k]:
            first_turn = self._turn_starts_N[row]
            grades = f"grades at the turns {(self.turn_G[self._trajectory_G == k] - first_turn).tolist()}"
        else:
            assert self._endings is not None  # a finished completion has a grade
            grades = f"no grade (its ending: {self._endings[row]})"
        raise NotOneGrade(
            f"episode {self._completions[row]} of prompt {self._prompts[row].as_py()!r} has {grades}; a loss "
            "over whole sequences (GSPO) expects exactly one grade per trajectory: grade only the last turn, grade "
            "episodes that a limit ends in on_limit, or train with ENVGRPO, which has an advantage per turn"
        )

    def informative_groups(self) -> np.ndarray:
        """bool, one per prompt: whether the rewards of its trajectories differ. Compared within a group, the
        trajectories of other prompts have advantage 0, unless a length penalty makes their rewards differ."""
        groups = self._group_K.max(initial=-1) + 1
        # A group without a reward keeps low = inf and high = -inf, so it counts as equal.
        low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
        valid_K = ~np.isnan(self.rewards_K)
        np.minimum.at(low, self._group_K[valid_K], self.rewards_K[valid_K])
        np.maximum.at(high, self._group_K[valid_K], self.rewards_K[valid_K])
        return low < high  # type: ignore[no-any-return]

    def pass_rates(self, correct_from: float) -> dict[int, float | None]:
        """Row of the dataset -> the share of its trajectories with a reward of at least `correct_from`, among those
        with a reward; None if it has none. The rows are in the order of the shards."""
        passed: dict[int, list[bool]] = {}
        rows_K = _numbers(self._rows_of_dataset)[self._first_row_K]
        for row, reward in zip(rows_K.tolist(), self.rewards_K.tolist(), strict=True):
            of_row = passed.setdefault(row, [])
            if not math.isnan(reward):
                of_row.append(reward >= correct_from)
        return {row: sum(of_row) / len(of_row) if of_row else None for row, of_row in passed.items()}

    def equal_group_share(self) -> float | None:
        """The share of groups with equal rewards, among those with two rewards or more. None if there is no such
        group."""
        rewards_P = np.bincount(self._group_K[~np.isnan(self.rewards_K)])
        compared_P = rewards_P >= 2
        if not compared_P.any():
            return None
        return float(1 - self.informative_groups()[: len(rewards_P)][compared_P].mean())

    def leave_out_equal_groups(self) -> None:
        """Leaves out the trajectories of each prompt whose rewards are all equal."""
        self.left_out_K |= ~self.informative_groups()[self._group_K]

    def take_trained_rows(
        self, ref: ArtifactRef, rollouts: pa.Table, start: int, advantages_U: np.ndarray
    ) -> TrainedRows | None:
        """The rows of the batch of the shard `ref` whose grades begin at row `start`, without the segments that are
        empty, masked or of a trajectory without a grade. None if the rows from `start` are not the grades of this
        shard. `rollouts` is the content of `ref`."""
        # The grades must be in the same order as the rollouts: a wrong order would train on the rewards of others.
        part = slice(start, start + rollouts.num_rows)
        first_turns_N = self._turn_starts_N[start : start + rollouts.num_rows + 1]
        same = self._prompts[part].equals(rollouts.column("prompt_id").combine_chunks())
        same &= self._completions[part].equals(rollouts.column("completion").combine_chunks())
        if not same or (_lengths(rollouts["turn_tokens"].combine_chunks()) != np.diff(first_turns_N)).any():
            return None

        # Choose the rows that are trained.
        trajectories = self._trajectory_N[part]
        rewards = self.rewards_K[trajectories]
        trained_N = trained_lengths(rollouts, "logprobs") > 0
        trained_N &= ~np.isnan(rewards) & ~self.left_out_K[trajectories]
        self._in_batch_N[part] = trained_N
        turns = first_turns_N[0] + np.flatnonzero(np.repeat(trained_N, np.diff(first_turns_N)))
        rows = rollouts.filter(pa.array(trained_N))
        turn_tokens = _flatten(rows.column("turn_tokens").combine_chunks())

        names = {"prompt_id": "group", "logprobs": "sampler_logprobs"}
        kept = [name for name in _BATCH_COLUMNS if name in rows.column_names]
        columns = {names.get(name, name): rows.column(name).combine_chunks() for name in kept}
        lengths_N = trained_lengths(rows, "logprobs")
        advantages_T = np.repeat(advantages_U[turns], turn_tokens)
        columns["advantages"] = list_column(_offsets(lengths_N), advantages_T, pa.float32())
        columns["reward"] = pa.array(rewards[trained_N])
        sources = [TableRows(ref, trained_N)] if trained_N.any() else []
        return TrainedRows(columns, sources, turns, turn_tokens)

    def prompts_in_batch(self) -> int:
        """Number of prompts with at least one row in the batch so far."""
        return len(np.unique(self._group_K[self._trajectory_N[self._in_batch_N]]))


_BATCH_COLUMNS = ("prompt_id", "completion", "token_ids", "loss_mask", "logprobs", "images")


def group_advantages(
    group_N: np.ndarray, rewards_N: Rewards, estimator: str, pass_k: int | None = None
) -> np.ndarray:
    """float32 [N]: the advantage of each reward within its group, whose members may be in different shards. A reward
    that is None gets NaN; the rest of its group still gets advantages."""
    # Sort the rows by group, so that a group is one slice of the order.
    order_N = np.argsort(group_N, kind="stable")
    group_starts = np.flatnonzero(np.diff(group_N[order_N])) + 1
    advantages_N = np.full(len(group_N), np.nan, dtype=np.float32)
    if len(order_N) == 0:
        return advantages_N
    estimate = estimator_of(estimator, pass_k)
    for members in np.split(order_N, group_starts):
        advantages_G = estimate([rewards_N[i] for i in members])
        advantages_N[members] = [np.nan if advantage is None else advantage for advantage in advantages_G]
    return advantages_N


def batch_table(columns: dict[str, pa.Array], **logprobs: np.ndarray | None) -> pa.Table:
    """The rows of a batch with `old_logprobs`, `reference_logprobs` and `teacher_logprobs`, each [T]. None leaves that
    column null, or out if it is optional: the loss does not use it."""
    computed = {name: values_T for name, values_T in logprobs.items() if values_T is not None}
    schema = table_schema("batch", [*columns, *computed])
    rows = len(columns["group"])
    arrays = {field.name: pa.nulls(rows, field.type) for field in schema if field.nullable}
    arrays |= columns
    offsets = _offsets(_lengths(columns["advantages"]))
    for name, values_T in computed.items():
        arrays[name] = list_column(offsets, values_T.astype(np.float32), pa.float32())
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def with_token_column(table: pa.Table, name: str, values_T: np.ndarray) -> pa.Table:
    """Replaces the column `name` of the batch, or adds it. `values_T` has one value per trained token of all rows."""
    lists = list_column(_offsets(trained_lengths(table)), values_T.astype(np.float32), pa.float32())
    if name not in table.column_names:
        return table.append_column(table_schema("batch", [name]).field(name), lists)
    return table.set_column(table.column_names.index(name), table.schema.field(name), lists)


def trained_lengths(table: pa.Table, column: str = "advantages") -> np.ndarray:
    """int64 [N]: number of trained tokens of each row, from a column with one value per trained token."""
    return _lengths(table[column].combine_chunks())


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


def _group_numbers(prompts_N: pa.Array) -> np.ndarray:
    """[N]: a number per prompt, from 0 in the order of first appearance."""
    return _numbers(prompts_N.dictionary_encode().indices)


def token_values(table: pa.Table, column: str) -> np.ndarray:
    """float64 [T]: the values of a list column, all rows one after the other."""
    return _flatten(table[column].combine_chunks()).astype(np.float64)


def _lengths(lists: pa.ListArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)


def _flatten(lists: pa.ListArray) -> np.ndarray:
    return _numbers(lists.flatten())


def _numbers(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _offsets(lengths_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_N)])


def list_column(offsets: np.ndarray, values_T: np.ndarray, item_type: pa.DataType) -> pa.ListArray:
    """A list column of these values. `offsets` are where each row begins, and the end of the last one."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values_T, item_type))
