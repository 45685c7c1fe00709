"""Batches as Arrow IPC streams: columns of lists, zstd buffers, the small typed part as JSON in the schema's metadata.

Exact: token ids are int32 (others are refused), seeds int64, weights and logprobs float64. Bytes of a stranger end in
BadSpec: engine.http.arrow_stream checks each message, and adds up what it decodes to, before anything is decompressed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, ValidationError

from engine.errors import BadSpec, PermanentEngineError, SampleTooLong
from engine.http.arrow_stream import READ_ERRORS, Stream, StreamTooLarge, buffer_weights, decoded_bytes, open_stream
from engine.http.errors import BodyTooLarge
from engine.models.images import Images, PlacedImage
from engine.protocol import (
    Completion,
    GenerateRequest,
    LogprobsRequest,
    SamplingParams,
    StopReason,
    TokenSequence,
)
from engine.validation_messages import describe_errors
from storage.chain.records import PolicyRef
from storage.serialization import Frozen

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
MAX_REQUEST_BYTES = 1 << 30
"""Memory of one decoded request, as Python lists: 24 million prompt tokens, or 12 million with a weight each."""
MAX_ANSWER_BYTES = 4 << 30
"""Memory of one decoded answer: 50 million sampled tokens with their logprobs."""
MAX_SEQUENCE_TOKENS = 1 << 22
"""Tokens of one sequence, longer than the context of any model that is trained here."""
MAX_VALUES = 1 << 26
"""Values of one column that is encoded: its offsets are 32-bit integers."""
_HEAD = b"ostinato"
_IDS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float64())
_MAX_ID = (1 << 31) - 1

Head = TypeVar("Head", bound=Frozen)


class GenerateHead(Frozen):
    """What a generate call says besides prompts and seeds."""

    policy: PolicyRef
    sampling: SamplingParams = SamplingParams()
    tensor_parallel: int | None = Field(None, ge=1, le=1 << 16)
    epoch: int = Field(0, ge=0, lt=1 << 63)


class LogprobsHead(Frozen):
    """What a logprobs or values call says besides the sequences."""

    policy: PolicyRef
    temperature: float = Field(1.0, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    epoch: int = Field(0, ge=0, lt=1 << 63)


class AnswerHead(Frozen):
    """Answers are their columns."""


@dataclass(frozen=True)
class Announced:
    """What the headers of a request's body say of it, before anything is decompressed."""

    policy: PolicyRef
    decoded_bytes: int
    """Memory that decoding needs, at most."""


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


GENERATE = _schema(prompt=_IDS, seed=pa.int64())
COMPLETIONS = _schema(token_ids=_IDS, logprobs=_FLOATS, stop_reason=pa.string())
SEQUENCES = _schema(token_ids=_IDS, weights=_FLOATS, group=pa.string())
LOGPROBS = _schema(logprobs=_FLOATS)
VALUES = _schema(values=_FLOATS)


# -- the messages -----------------------------------------------------------------------------------------


def encode_generate(request: GenerateRequest, *, epoch: int) -> bytes:
    """Raises BadSpec: prompts and seeds of unequal number, ids outside int32, seeds outside int64."""
    prompts, seeds = request.prompts, request.seeds
    if len(prompts) != len(seeds):
        raise BadSpec(f"{len(prompts)} prompts were given with {len(seeds)} seeds; give one seed per prompt")
    columns = [_ids(prompts, "prompt"), _numbers(seeds, "q", "seeds")]
    head = GenerateHead(
        policy=request.policy, sampling=request.sampling, tensor_parallel=request.tensor_parallel, epoch=epoch
    )
    images = _image_columns(request.images or ())
    return _write(_with_images(GENERATE) if images else GENERATE, columns + images, head)


def decode_generate(data: bytes, *, context: int | None = None) -> tuple[GenerateRequest, int]:
    """The request and the caller's epoch. Raises BadSpec, SampleTooLong for a prompt longer than `context`."""
    head, (prompts, seeds, *rest) = _read(data, GENERATE, GenerateHead, context=context)
    images = _images(rest) if rest else None
    return GenerateRequest(head.policy, prompts, seeds, head.sampling, head.tensor_parallel, images), head.epoch


def announced_generate(data: bytes) -> Announced:
    """Raises BadSpec."""
    head, stream = _open(data, GENERATE, GenerateHead)
    return Announced(head.policy, stream.decoded_bytes)


def announced_logprobs_request(data: bytes) -> Announced:
    """Raises BadSpec."""
    head, stream = _open(data, SEQUENCES, LogprobsHead)
    return Announced(head.policy, stream.decoded_bytes)


def encode_completions(completions: Sequence[Completion]) -> bytes:
    columns = [
        _ids([c.token_ids for c in completions], "completion"),
        _floats([c.logprobs for c in completions], "logprobs of completion"),
        pa.array([c.stop_reason for c in completions], pa.string()),
    ]
    return _write(COMPLETIONS, columns, AnswerHead())


def decode_completions(data: bytes) -> list[Completion]:
    """Raises BadSpec."""
    _, columns = _read(data, COMPLETIONS, AnswerHead)
    rows = zip(*columns, strict=True)
    return [Completion(ids, logprobs, cast(StopReason, reason)) for ids, logprobs, reason in rows]


def encode_logprobs_request(request: LogprobsRequest, *, epoch: int) -> bytes:
    """Raises BadSpec: ids outside int32."""
    columns = [
        _ids([s.token_ids for s in request.sequences], "sequence"),
        _floats([s.weights for s in request.sequences], "weights of sequence"),
        pa.array([s.group for s in request.sequences], pa.string()),
    ]
    head = _head_of(
        LogprobsHead, policy=request.policy, temperature=request.temperature, max_tokens=request.max_tokens, epoch=epoch
    )
    images = _image_columns(request.images)
    return _write(_with_images(SEQUENCES) if images else SEQUENCES, columns + images, head)


def decode_logprobs_request(data: bytes, *, context: int | None = None) -> tuple[LogprobsRequest, int]:
    """The request and the caller's epoch. Raises BadSpec, SampleTooLong for a sequence longer than `context`."""
    head, (ids, weights, groups, *rest) = _read(data, SEQUENCES, LogprobsHead, context=context)
    images = _images(rest) if rest else [()] * len(ids)
    sequences = [TokenSequence(*row) for row in zip(ids, weights, groups, images, strict=True)]
    return LogprobsRequest(head.policy, sequences, head.temperature, head.max_tokens), head.epoch


def encode_logprobs(logprobs: Sequence[Sequence[float]]) -> bytes:
    return _write(LOGPROBS, [_floats(logprobs, "logprobs of sequence")], AnswerHead())


def decode_logprobs(data: bytes) -> list[list[float]]:
    """Raises BadSpec."""
    _, (logprobs,) = _read(data, LOGPROBS, AnswerHead)
    return logprobs


def encode_values(values: Sequence[Sequence[float]]) -> bytes:
    return _write(VALUES, [_floats(values, "values of sequence")], AnswerHead())


def decode_values(data: bytes) -> list[list[float]]:
    """Raises BadSpec."""
    _, (values,) = _read(data, VALUES, AnswerHead)
    return values


# -- images ----------------------------------------------------------------------------------------------------

IMAGE_COLUMNS = _schema(image_start=_IDS, image_tokens=_IDS, image_data=pa.list_(pa.binary()))
"""Of each row's images; a message has them only where a row has an image."""


def _with_images(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, *IMAGE_COLUMNS])


def _image_columns(images: Sequence[Images]) -> list[pa.Array]:
    """Nothing where no row has an image. Raises BadSpec for more bytes than one message takes."""
    if not any(images):
        return []
    if (size := sum(len(image.data) for row in images for image in row)) > MAX_REQUEST_BYTES // 2:
        raise BadSpec(f"the images of one call have {size >> 20} MiB; send it in several calls")
    starts, counts = ([[getattr(i, name) for i in row] for row in images] for name in ("start", "tokens"))
    data = pa.array([[image.data for image in row] for row in images], IMAGE_COLUMNS.field("image_data").type)
    return [_ids(starts, "image of sequence"), _ids(counts, "image of sequence"), data]


def _images(columns: Sequence[list[Any]]) -> list[Images]:
    """Those of each row. Raises BadSpec for columns that do not fit together."""
    found = []
    for row in zip(*columns, strict=True):
        if len(set(map(len, row))) != 1:
            raise BadSpec(f"a row has {', '.join(str(len(one)) for one in row)} starts, counts and images; one each")
        found.append(tuple(PlacedImage(*one) for one in zip(*row, strict=True)))
    return found


# -- columns ---------------------------------------------------------------------------------------------------


def _ids(rows: Sequence[Sequence[int]], what: str) -> pa.Array:
    return _lists(rows, "i", what, f"has token ids outside 0 … {_MAX_ID}; give the ids of the model's tokenizer")


def _floats(rows: Sequence[Sequence[float]], what: str) -> pa.Array:
    return _lists(rows, "d", what, "has entries that are no numbers")


def _lists(rows: Sequence[Sequence[Any]], code: str, what: str, wrong: str) -> pa.Array:
    """A list column. array.array checks kind and range of every value, several times faster than pyarrow does."""
    values = array(code)
    for index, row in enumerate(rows):
        try:
            values.extend(row)
        except (OverflowError, TypeError) as error:
            raise BadSpec(f"{what} {index} {wrong}") from error
    ends = accumulate(map(len, rows), initial=0)
    if len(values) > MAX_VALUES:
        raise BadSpec(f"{len(values)} values in one call, at most {MAX_VALUES} travel at once; split the batch")
    flat = pa.Array.from_buffers(_TYPES[code], len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(pa.array(array("i", ends), pa.int32()), flat)


def _numbers(values: Sequence[int], code: str, what: str) -> pa.Array:
    try:
        numbers = array(code, values)
    except (OverflowError, TypeError) as error:
        raise BadSpec(f"{what} must be integers of 64 bits: {error}") from error
    return pa.Array.from_buffers(_TYPES[code], len(numbers), [None, pa.py_buffer(numbers)])


_TYPES = {"i": pa.int32(), "q": pa.int64(), "d": pa.float64()}


# -- one message -----------------------------------------------------------------------------------------------


def _write(schema: pa.Schema, columns: Sequence[pa.Array], head: Frozen) -> bytes:
    buffers = [buffer for column in columns for buffer in column.buffers()]
    sizes = [0 if buffer is None else buffer.size for buffer in buffers]
    size, most = decoded_bytes(sizes, buffer_weights(schema)), _most(type(head))
    if size > most:
        raise BodyTooLarge(f"the batch decodes to {size >> 20} MiB of lists, at most {most >> 20} MiB; split the batch")
    schema = schema.with_metadata({_HEAD: head.model_dump_json().encode()})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))
    return sink.getvalue().to_pybytes()


def _head_of(kind: type[Head], **fields: Any) -> Head:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise BadSpec(describe_errors(error.errors(), fields)) from error


def _most(kind: type[Frozen]) -> int:
    return MAX_ANSWER_BYTES if kind is AnswerHead else MAX_REQUEST_BYTES


@contextmanager
def _blaming_the_body(schema: pa.Schema) -> Iterator[None]:
    """Whatever a stranger's bytes raise becomes BadSpec, or BodyTooLarge."""
    try:
        yield
    except PermanentEngineError:
        raise
    except StreamTooLarge as error:
        raise BodyTooLarge(str(error)) from error
    except READ_ERRORS as error:
        raise BadSpec(f"the body is no Arrow stream of {', '.join(schema.names)}: {str(error)[:300]}") from error


def _open(data: bytes, schema: pa.Schema, kind: type[Head]) -> tuple[Head, Stream]:
    """The head, and the stream whose messages were checked and not decoded. Raises BadSpec, whatever the bytes are."""
    schemas = [schema, _with_images(schema)] if schema in (GENERATE, SEQUENCES) else [schema]
    with _blaming_the_body(schema):
        stream = open_stream(data, schemas, _most(kind))
        try:
            return kind.model_validate_json((stream.schema.metadata or {}).get(_HEAD, b"")), stream
        except ValidationError as error:
            problems = describe_errors(error.errors())
            raise BadSpec(f"the metadata {_HEAD.decode()!r} of the Arrow schema: {problems}") from error


def _read(
    data: bytes, schema: pa.Schema, kind: type[Head], *, context: int | None = None
) -> tuple[Head, list[list[Any]]]:
    """The head and one Python list per column. Raises BadSpec, whatever the bytes are; SampleTooLong for a sequence
    longer than `context` or MAX_SEQUENCE_TOKENS."""
    head, stream = _open(data, schema, kind)
    longest = MAX_SEQUENCE_TOKENS if context is None else min(context, MAX_SEQUENCE_TOKENS)
    meaning = "what one sequence may have" if longest == MAX_SEQUENCE_TOKENS else "the model's context"

    def check(batch: pa.RecordBatch) -> None:
        for column in batch.columns:
            length = int(np.diff(column.offsets).max()) if batch.num_rows and pa.types.is_list(column.type) else 0
            if length > longest:
                raise SampleTooLong(
                    f"a sequence of {length} tokens exceeds {meaning}, {longest} tokens; shorten it or leave it out"
                )

    with _blaming_the_body(schema):
        return head, stream.columns(check)
