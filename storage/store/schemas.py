"""The declared columns of every kind of table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from storage.errors import SchemaMismatch

_LISTS_INT, _LISTS_FLOAT, _LISTS_DOUBLE = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.float64())


def _schema(*required: tuple[str, pa.DataType], nullable: Sequence[tuple[str, pa.DataType]] = ()) -> pa.Schema:
    return pa.schema([*(pa.field(n, t, nullable=False) for n, t in required), *(pa.field(n, t) for n, t in nullable)])


SCHEMAS: dict[str, pa.Schema] = {
    "threads": _schema(
        ("index", pa.int64()), ("id", pa.string()), ("thread", pa.string()), nullable=[("metadata", pa.string())]
    ),
    "pairs": _schema(  # of conversations, which differ in how they go on
        ("index", pa.int64()), ("id", pa.string()), ("chosen", pa.string()), ("rejected", pa.string()),
        nullable=[("metadata", pa.string())],
    ),
    "rollouts": _schema(
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("completion", pa.int32()),
        ("seed", pa.uint64()),
        ("prompt_ids", _LISTS_INT),
        ("completion_ids", _LISTS_INT),
        ("logprobs", _LISTS_FLOAT),
        ("stop_reason", pa.string()),
        ("text", pa.string()),
        ("thread", pa.string()),
        ("policy_state", pa.string()),
    ),
    "trajectories": _schema(  # one row per segment of an episode, the segments of an episode one after the other
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("completion", pa.int32()),  # number of the episode among those of its prompt
        ("segment", pa.int32()),
        ("token_ids", _LISTS_INT),
        ("weights", _LISTS_FLOAT),  # above 0: sampled in this segment
        ("logprobs", _LISTS_FLOAT),  # of the sampler, one per token of weight above 0
        ("first_turn", pa.int32()),  # the assistant's turns are counted over the whole episode, from 0
        ("turn_tokens", _LISTS_INT),  # sampled tokens of each of this segment's turns
        ("graded_turns", _LISTS_INT),  # which of them have a grade, and which
        ("grades", _LISTS_DOUBLE),
        ("status", pa.string()),  # of the whole episode: ok, masked, ignored
        ("ending", pa.string()),  # environment, turns, tokens, time, masked, ignored
        ("thread", pa.string()),
        ("policy_state", pa.string()),
        nullable=[("reason", pa.string())],
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
    "batch": _schema(
        ("group", pa.string()),
        ("completion", pa.int32()),
        ("token_ids", _LISTS_INT),
        ("weights", _LISTS_FLOAT),  # one per token; above 0: trained
        nullable=[
            ("advantages", _LISTS_FLOAT),  # this and the next three: one per trained token
            ("old_logprobs", _LISTS_FLOAT),
            ("reference_logprobs", _LISTS_FLOAT),
            ("sampler_logprobs", _LISTS_FLOAT),
            ("reward", pa.float64()),
            ("returns", _LISTS_FLOAT),  # this and the next two: one per trained token
            ("old_values", _LISTS_FLOAT),
            ("tangents", _LISTS_FLOAT),
            ("preferred", pa.bool_()),  # of the two rows of a group that are a pair
        ],
    ),
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
        ("loss", pa.float64()),  # of a conversation: summed over its tokens
        nullable=[("margin", pa.float64())],  # of a pair: chosen less rejected, in implicit rewards
    ),
    "comparison": _schema(
        ("model", pa.string()),
        ("dataset", pa.string()),
        ("grader", pa.string()),
        ("prompt_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("graded", pa.int64()),
        ("completions", pa.int64()),
        nullable=[("reward", pa.float64())],  # mean over the graded completions; null: there is none
    ),
}
"""kind -> columns."""

_IMAGES = pa.list_(pa.struct([("start", pa.int32()), ("tokens", pa.int32()), ("data", pa.binary())]))

OPTIONAL: dict[str, pa.Schema] = {
    "rollouts": _schema(nullable=[("images", _IMAGES)]),  # of the prompt: engine.models.images
    "batch": _schema(nullable=[("images", _IMAGES)]),
}
"""kind -> columns that a table has, after those of SCHEMAS, only where its first rows have them: a table of text alone
has the bytes that it had before there were images."""


def table_schema(kind: str, given: Iterable[str] = ()) -> pa.Schema:
    """The columns of a table of this kind: those of SCHEMAS, and of the OPTIONAL ones those that are `given`. Raises
    SchemaMismatch for an unknown kind."""
    names = set(given)
    more = [field for field in OPTIONAL.get(kind, ()) if field.name in names]
    return pa.schema([*schema_of(kind), *more]) if more else schema_of(kind)


def schema_of(kind: str) -> pa.Schema:
    if kind not in SCHEMAS:
        raise SchemaMismatch(f"no table is called {kind!r}; there are {sorted(SCHEMAS)}")
    return SCHEMAS[kind]
