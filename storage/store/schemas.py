"""The columns of each kind of table.

A rollouts table repeats the prompt (its tokens, its thread and its images) in the row of each completion, so that a row
can be read alone. In the file, it is stored about once per prompt: Parquet replaces repeated values by numbers of a
dictionary, or zstd finds the repetition. With 8 completions per prompt, tokens of 526 kB take 66 kB, and images of
12.8 MB take 1.7 MB (1.6 MB once each). In memory, the copies remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from storage.errors import SchemaMismatch

_LISTS_INT, _LISTS_BOOL = pa.list_(pa.int32()), pa.list_(pa.bool_())
_LISTS_FLOAT, _LISTS_DOUBLE = pa.list_(pa.float32()), pa.list_(pa.float64())


def _schema(*required: tuple[str, pa.DataType], nullable: Sequence[tuple[str, pa.DataType]] = ()) -> pa.Schema:
    required_fields = [pa.field(name, kind, nullable=False) for name, kind in required]
    return pa.schema([*required_fields, *(pa.field(name, kind) for name, kind in nullable)])


SCHEMAS: dict[str, pa.Schema] = {
    # datasets
    "threads": _schema(
        ("index", pa.int64()), ("id", pa.string()), ("thread", pa.string()), nullable=[("metadata", pa.string())]
    ),
    "pairs": _schema(  # two conversations with the same beginning
        ("index", pa.int64()), ("id", pa.string()), ("chosen", pa.string()), ("rejected", pa.string()),
        nullable=[("metadata", pa.string())],
    ),
    # samples and their grades
    "rollouts": _schema(
        # One row per segment of a trajectory, whose tokens form one sequence. The segments of a trajectory are adjacent
        # and in order. A completion is a trajectory of one segment with one turn.
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("completion", pa.int32()),  # index of the trajectory among those of its prompt
        ("segment", pa.int32()),
        ("first_turn", pa.int32()),  # index of the segment's first sampled turn in the trajectory
        ("token_ids", _LISTS_INT),
        ("loss_mask", _LISTS_BOOL),  # true: sampled in this segment
        ("logprobs", _LISTS_FLOAT),  # under the sampler, one per sampled token
        ("turn_tokens", _LISTS_INT),  # this and the next: one per sampled turn of the segment
        ("stop_reasons", pa.list_(pa.string())),
        ("thread", pa.string()),  # the prompt of a completion, or the whole conversation of an episode
        ("policy_state", pa.string()),
    ),
    "segments": _schema(  # the tokens that one call sampled of the unfinished completions of a shard
        ("index", pa.int32()),  # of the completion, in the shard
        ("seed", pa.uint64()),  # of these tokens
        ("token_ids", _LISTS_INT),
        ("logprobs", _LISTS_FLOAT),
        ("stop_reason", pa.string()),  # interrupted: a later segment continues the completion
    ),
    "graded": pa.schema(
        [
            pa.field("prompt_index", pa.int64(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("completion", pa.int32(), nullable=False),
            pa.field("reward", pa.float64()),  # null: masked
            pa.field("status", pa.string(), nullable=False),  # ok, masked, ignored
            pa.field("reason", pa.string()),
        ]
    ),
    "answers": _schema(  # stored answers that are graded like the completions of rollouts
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("completion", pa.int32()),
        ("text", pa.string()),
        ("thread", pa.string()),
    ),
    # batches of gradient steps
    "batch": _schema(
        ("group", pa.string()),
        ("completion", pa.int32()),
        ("token_ids", _LISTS_INT),
        ("loss_mask", _LISTS_BOOL),  # one per token; true: trained
        nullable=[
            ("advantages", _LISTS_FLOAT),  # this and the next three: one per trained token
            ("old_logprobs", _LISTS_FLOAT),
            ("reference_logprobs", _LISTS_FLOAT),
            ("sampler_logprobs", _LISTS_FLOAT),
            ("reward", pa.float64()),
            ("returns", _LISTS_FLOAT),  # this and the next two: one per trained token
            ("old_values", _LISTS_FLOAT),
            ("tangents", _LISTS_FLOAT),
            ("preferred", pa.bool_()),  # which of the two rows of a pair this is, or the label of the row
        ],
    ),
    # evaluations
    "evaluation": pa.schema(
        [
            pa.field("prompt_index", pa.int64(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("reward", pa.float64()),
            pa.field("status", pa.string(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("thread", pa.string(), nullable=False),
        ]
    ),
    "validation": _schema(  # one row per held-out conversation or pair
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("tokens", pa.int64()),  # trained ones
        ("loss", pa.float64()),  # of a conversation, the sum over its tokens
        nullable=[("margin", pa.float64())],  # of a pair, implicit reward of chosen minus rejected
    ),
    "comparison": _schema(
        ("model", pa.string()),
        ("dataset", pa.string()),
        ("grader", pa.string()),
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("graded", pa.int64()),
        ("completions", pa.int64()),
        nullable=[("reward", pa.float64())],  # mean over the graded completions; null if none is graded
    ),
}
"""Columns of each kind of table."""

_IMAGES = pa.list_(pa.struct([("start", pa.int32()), ("tokens", pa.int32()), ("data", pa.binary())]))
_PARTS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64()), ("weight", pa.float64())]))

OPTIONAL: dict[str, pa.Schema] = {
    "rollouts": _schema(
        nullable=[
            ("images", _IMAGES),  # of the prompt
            # of a completion
            ("seed", pa.uint64()),
            ("text", pa.string()),
            # of a completion whose policy may change at a token: one per part that was sampled without a cut
            ("policy_states", pa.list_(pa.string())),
            ("policy_tokens", _LISTS_INT),
            # of an episode, which its environment graded
            ("graded_turns", _LISTS_INT),  # indices of the turns that have a grade; `grades` has one value for each
            ("grades", _LISTS_DOUBLE),
            ("status", pa.string()),  # of the whole episode: ok, masked, ignored
            ("ending", pa.string()),  # environment, turns, tokens, time, masked, ignored
            ("reason", pa.string()),
        ]
    ),
    "graded": _schema(
        nullable=[
            ("answer", pa.string()),  # extracted by the grader, for a majority vote
            ("parts", _PARTS),  # that the reward was computed from
        ]
    ),
    "batch": _schema(
        nullable=[
            ("images", _IMAGES),
            ("kl_baseline", pa.float64()),
            ("selected", _LISTS_FLOAT),
            ("teacher_logprobs", _LISTS_FLOAT),  # one per trained token, of a distillation
            ("teacher_top_ids", _LISTS_INT),  # K per trained token, the teacher's most probable tokens
            ("teacher_top_logprobs", _LISTS_FLOAT),  # K per trained token
        ]
    ),
}
"""Optional columns of each kind of table, after those of SCHEMAS. A table has them only if its first rows have them, so
that a table without images has the same bytes whether or not this code supports images."""


def table_schema(kind: str, column_names: Iterable[str] = ()) -> pa.Schema:
    """Returns the columns of a table of this kind: those of SCHEMAS, and those OPTIONAL ones that are in
    `column_names`. Raises SchemaMismatch for an unknown kind."""
    required, names = schema_of(kind), set(column_names)
    optional = [field for field in OPTIONAL.get(kind, ()) if field.name in names]
    return pa.schema([*required, *optional]) if optional else required


def schema_of(kind: str) -> pa.Schema:
    """Returns the required columns of a table of this kind. Raises SchemaMismatch for an unknown kind."""
    if kind not in SCHEMAS:
        raise SchemaMismatch(f"no table is called {kind!r}; there are {sorted(SCHEMAS)}")
    return SCHEMAS[kind]
