"""Scores the rows of a batch with the teachers of a distillation, and adds what the loss reads of them.

Axes: N row of the batch · T trained token of all rows, one after the other · K most probable token of a teacher
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from engine.errors import BadSpec
from engine.protocol import RowsRequest, TableRows, TopRowsRequest
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_tables, table_schema
from tasks.batches.columns import TrainedRows, list_column, token_values, trained_lengths, with_token_column
from tasks.plans import BatchPlan
from tasks.reports.clock import timed

CALL_VALUES = 1 << 22
"""Numbers that one call for the teacher's most probable tokens returns, about. It bounds the size of a response."""

Value = TypeVar("Value")


def of_prompt(threads: Mapping[str, Value], metadata: Mapping[str, JsonValue], column: str, prompt: str) -> Value:
    """The entry of `threads` for the value that the prompt has in `column`. Raises BadSpec if there is none."""
    value = metadata.get(column)
    if not isinstance(value, str) or value not in threads:
        raise BadSpec(
            f"prompt {prompt} has {column}={value!r:.60} in its metadata, and teacher.by_value has teachers for "
            f"{', '.join(map(repr, threads))}; give a teacher for each value, and name the column in metadata_columns "
            "of the dataset"
        )
    return threads[value]


async def teacher_logprobs(workspace: Workspace, rows: TrainedRows, plan: BatchPlan) -> np.ndarray | None:
    """(T,): the logprob of each trained token under its teacher. None without a teacher, and if the batch has the
    teacher's most probable tokens instead."""
    if not plan.has_teacher or plan.teacher_top_k is not None:
        return None

    async def score(teacher: PolicyRef, sources: list[TableRows], _lengths_N: np.ndarray) -> np.ndarray:
        request = RowsRequest(teacher, sources, plan.temperature, workspace.max_tokens)
        return await workspace.connect().logprobs_of_rows(request, epoch=workspace.epoch)

    return await _by_teacher(workspace, rows, plan, score, np.zeros(0))


async def with_teacher_top(workspace: Workspace, table: pa.Table, rows: TrainedRows, plan: BatchPlan) -> pa.Table:
    """The batch with the most probable tokens of the teacher before each trained token, and their logprobs, if `plan`
    has a loss that reads them. Such a loss reads no advantages, so the batch has none."""
    top = plan.teacher_top_k
    if top is None:
        return table

    async def score(teacher: PolicyRef, sources: list[TableRows], lengths_N: np.ndarray) -> np.ndarray:
        parts = []
        for part in _calls(sources, lengths_N, max(1, CALL_VALUES // top)):
            request = TopRowsRequest(teacher, part, plan.temperature, workspace.max_tokens, top=top)
            answer = await workspace.connect().top_logprobs_of_rows(request, epoch=workspace.epoch)
            parts.append(np.stack([answer.token_ids_TK, answer.logprobs_TK], axis=2))
        return np.concatenate(parts)

    top_TK2 = await _by_teacher(workspace, rows, plan, score, np.zeros((0, top, 2)))
    offsets = top * np.concatenate([[0], np.cumsum(trained_lengths(table))])
    for name, values, item in (
        ("teacher_top_ids", top_TK2[..., 0].astype(np.int32), pa.int32()),
        ("teacher_top_logprobs", top_TK2[..., 1].astype(np.float32), pa.float32()),
    ):
        column = list_column(offsets, values.ravel(), item)
        table = table.append_column(table_schema("batch", [name]).field(name), column)
    # A column of zeros would say that the step can teach nothing. No policy sampled the answers of a dataset.
    for name in ("advantages", "sampler_logprobs") if plan.dataset_answers else ("advantages",):
        index = table.column_names.index(name)
        field = table.schema.field(name)
        table = table.set_column(index, field, pa.nulls(table.num_rows, field.type))
    return table


async def _by_teacher(
    workspace: Workspace,
    rows: TrainedRows,
    plan: BatchPlan,
    score: Callable[[PolicyRef, list[TableRows], np.ndarray], Awaitable[np.ndarray]],
    nothing: np.ndarray,
) -> np.ndarray:
    """(T, …): what `score` gives for the rows of each teacher, in the order of the rows. `score` gets the rows and the
    number of trained tokens of each. `nothing` is its result for no rows."""
    if not rows.sources:
        return nothing
    lengths_N = np.diff(rows.columns["advantages"].offsets.to_numpy()).astype(np.int64)
    with timed("train"):
        if plan.teacher is not None:
            return await score(plan.teacher, rows.sources, lengths_N)
        # Some rows have one teacher, some another: score the rows of each, and put the results in their places.
        teacher_N = _teacher_of_rows(workspace.open_store(), rows.sources, plan)
        result_T: np.ndarray | None = None
        for number, teacher in enumerate(plan.teachers.values()):
            of_teacher_N = teacher_N == number
            if not of_teacher_N.any():
                continue
            values = await score(teacher, _only(rows.sources, of_teacher_N), lengths_N[of_teacher_N])
            if result_T is None:
                result_T = np.zeros((int(lengths_N.sum()), *values.shape[1:]))
            result_T[np.repeat(of_teacher_N, lengths_N)] = values
    assert result_T is not None  # every row has a teacher
    return result_T


def _teacher_of_rows(store: ObjectStore, sources: Sequence[TableRows], plan: BatchPlan) -> np.ndarray:
    """int64 (N,): the place in `plan.teachers` of the teacher of each row, by the metadata of its prompt."""
    assert plan.teacher_column is not None
    places = {value: place for place, value in enumerate(plan.teachers)}
    of_thread: dict[str, int] = {}
    numbers: list[int] = []
    tables = read_tables(store, [source.table for source in sources], ["thread", "prompt_id"])
    for source, table in zip(sources, tables, strict=True):
        kept = table.filter(pa.array(source.rows))
        # the completions of a prompt have the same thread
        for thread, prompt in zip(kept["thread"].to_pylist(), kept["prompt_id"].to_pylist(), strict=True):
            if thread not in of_thread:
                metadata = StringThread.from_json(thread).metadata
                of_thread[thread] = of_prompt(places, metadata, plan.teacher_column, prompt)
            numbers.append(of_thread[thread])
    return np.array(numbers, np.int64)


def _only(sources: Sequence[TableRows], keep_N: np.ndarray) -> list[TableRows]:
    """The rows of `sources` for which `keep_N` is True, without tables that have none."""
    kept, start = [], 0
    for source in sources:
        count = int(source.rows.sum())
        mask = source.rows.copy()
        mask[mask] = keep_N[start : start + count]
        start += count
        if mask.any():
            kept.append(TableRows(source.table, mask))
    return kept


def _calls(sources: Sequence[TableRows], lengths_N: np.ndarray, tokens: int) -> Iterator[list[TableRows]]:
    """The rows in calls of at most this many trained tokens, or of one row. `lengths_N`: trained tokens of each row."""
    call_N = np.zeros(len(lengths_N), np.int64)
    call, used = 0, 0
    for row, length in enumerate(lengths_N.tolist()):
        if used and used + length > tokens:
            call, used = call + 1, 0
        call_N[row], used = call, used + length
    for number in range(call + 1):
        yield _only(sources, call_N == number)


class TeacherTerm:
    """Adds the term of the teacher of `plan` to the advantages of a batch, and measures the distance to the teacher.

    The term of a token is beta * (its logprob under the teacher - under the sampler). Its expectation under the sampler
    is -beta times the reverse KL divergence to the teacher, which a policy gradient therefore lowers (the policies of
    MiniLLM, arXiv:2306.08543, without its credit for later tokens)."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.total, self.tokens = 0.0, 0

    def add(self, table: pa.Table) -> pa.Table:
        """Returns `table` with the term in its advantages; unchanged without a teacher, and if the loss reads the
        teacher's most probable tokens."""
        if not self.plan.has_teacher or self.plan.teacher_top_k is not None or not table.num_rows:
            return table
        gap_T = token_values(table, "teacher_logprobs") - token_values(table, "sampler_logprobs")
        self.total, self.tokens = self.total - float(gap_T.sum()), self.tokens + len(gap_T)
        advantages_T = token_values(table, "advantages") + self.plan.teacher_beta * gap_T
        return with_token_column(table, "advantages", advantages_T)

    @property
    def extra(self) -> dict[str, JsonValue]:
        """The manifest's entry `teacher_kl`: the estimated reverse KL to the teacher, in nats per token."""
        return {"teacher_kl": self.total / self.tokens} if self.tokens else {}
