"""Batches as Arrow IPC streams: columns of lists, zstd buffers, the small typed part as JSON in the schema's metadata.

Exact: token ids are int32 (others are refused), seeds int64, weights and logprobs float64. Bytes of a stranger end in
BadSpec: the size of every buffer is read from the message and added up before anything is decompressed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import pyarrow as pa
from pydantic import Field, ValidationError

from engine.errors import BadSpec
from engine.images import Images, PlacedImage, check_images
from engine.protocol import (
    Completion,
    GenerateRequest,
    LogprobsRequest,
    SamplingParams,
    StopReason,
    TokenSequence,
)
from storage.chain import PolicyRef
from storage.models import Frozen

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
MAX_ROWS = 1 << 20
MAX_VALUES = 1 << 26
"""Tokens of one message: some gigabytes as Python lists, far above any batch."""
MAX_DECODED_BYTES = 1 << 30
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


def decode_generate(data: bytes) -> tuple[GenerateRequest, int]:
    """The request and the caller's epoch. Raises BadSpec."""
    head, (prompts, seeds, *rest) = _read(data, GENERATE, GenerateHead)
    images = _images(prompts, rest) if rest else None
    return GenerateRequest(head.policy, prompts, seeds, head.sampling, head.tensor_parallel, images), head.epoch


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


def decode_logprobs_request(data: bytes) -> tuple[LogprobsRequest, int]:
    """The request and the caller's epoch. Raises BadSpec."""
    head, (ids, weights, groups, *rest) = _read(data, SEQUENCES, LogprobsHead)
    images = _images(ids, rest) if rest else [()] * len(ids)
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
    if (size := sum(len(image.data) for row in images for image in row)) > MAX_DECODED_BYTES // 2:
        raise BadSpec(f"the images of one call have {size >> 20} MiB; send it in several calls")
    starts, counts = ([[getattr(i, name) for i in row] for row in images] for name in ("start", "tokens"))
    data = pa.array([[image.data for image in row] for row in images], IMAGE_COLUMNS.field("image_data").type)
    return [_ids(starts, "image of sequence"), _ids(counts, "image of sequence"), data]


def _images(sequences: Sequence[Sequence[int]], columns: Sequence[list[Any]]) -> list[Images]:
    """Those of each row. Raises BadSpec for places that are none."""
    found = []
    for ids, *row in zip(sequences, *columns, strict=True):
        if len(set(map(len, row))) != 1:
            raise BadSpec(f"a row has {', '.join(str(len(one)) for one in row)} starts, counts and images; one each")
        images = tuple(PlacedImage(*one) for one in zip(*row, strict=True))
        check_images(images, len(ids))
        found.append(images)
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
        raise BadSpec(_describe(error)) from error


def _read(data: bytes, schema: pa.Schema, kind: type[Head]) -> tuple[Head, list[list[Any]]]:
    """The head and one Python list per column. Raises BadSpec, whatever the bytes are."""
    try:
        return _read_stream(data, schema, kind)
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error, EOFError) as error:
        if isinstance(error, BadSpec):
            raise
        raise BadSpec(f"the body is no Arrow stream of {', '.join(schema.names)}: {str(error)[:300]}") from error


def _read_stream(data: bytes, schema: pa.Schema, kind: type[Head]) -> tuple[Head, list[list[Any]]]:
    messages = iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(data)))
    found = pa.ipc.read_schema(next(messages, None) or _refuse("it is empty"))
    if schema in (GENERATE, SEQUENCES) and len(found) > len(schema):
        schema = _with_images(schema)
    if not found.equals(schema, check_metadata=False):
        _refuse(f"its columns are {', '.join(f'{f.name}: {f.type}' for f in found)[:300]}")
    try:
        head = kind.model_validate_json((found.metadata or {}).get(_HEAD, b""))
    except ValidationError as error:
        raise BadSpec(f"the metadata {_HEAD.decode()!r} of the Arrow schema: {_describe(error)}") from error
    columns: list[list[Any]] = [[] for _ in schema]
    budget = _Budget()
    for message in messages:
        budget.take(message)
        batch = pa.ipc.read_record_batch(message, found)
        batch.validate(full=True)
        budget.take_values(batch)
        for column, values in zip(columns, batch.columns, strict=True):
            column.extend(values.to_pylist())
    return head, columns


class _Budget:
    """What one message may still cost."""

    def __init__(self) -> None:
        self.bytes, self.rows, self.values = MAX_DECODED_BYTES, MAX_ROWS, MAX_VALUES

    def take(self, message: pa.ipc.Message) -> None:
        """Before decoding. Raises BadSpec."""
        if message.type != "record batch":
            _refuse(f"it holds a message of type {message.type!r}")
        rows, size = _announced(bytes(message.metadata), memoryview(message.body))
        self.rows -= rows
        self.bytes -= size
        if self.rows < 0 or self.bytes < 0:
            raise BadSpec(
                f"the batch decodes to over {MAX_ROWS} rows or {MAX_DECODED_BYTES >> 20} MiB; send it in several calls"
            )

    def take_values(self, batch: pa.RecordBatch) -> None:
        """After decoding, before Python lists are made. Raises BadSpec."""
        for column in batch.columns:
            nested = pa.types.is_list(column.type)
            if column.null_count or (nested and column.flatten().null_count):
                _refuse("it holds nulls")
            self.values -= len(column.flatten()) if nested else 0
        if self.values < 0:
            raise BadSpec(f"the batch has over {MAX_VALUES} values; send it in several calls")


def _announced(metadata: bytes, body: memoryview) -> tuple[int, int]:
    """(rows, bytes after decompression) that a record batch message announces: its flatbuffer, which Arrow has
    verified, read by hand, because Arrow itself says neither before it decompresses."""
    table = _Table.root(metadata).child(2)  # Message.header, a RecordBatch
    rows = struct.unpack_from("<q", metadata, table.field(0))[0] if table.field(0) else 0
    compressed = table.field(3) != 0
    total = 0
    buffers = table.field(2)
    start = buffers + struct.unpack_from("<I", metadata, buffers)[0] if buffers else 0
    count = struct.unpack_from("<I", metadata, start)[0] if buffers else 0
    for index in range(count):
        offset, length = struct.unpack_from("<qq", metadata, start + 4 + 16 * index)
        if offset < 0 or length < 0 or offset + length > len(body) or rows < 0:
            _refuse("a buffer lies outside the body")
        size = length
        if compressed and length >= 8:
            said = struct.unpack_from("<q", body, offset)[0]
            size = length - 8 if said == -1 else said  # -1: stored as it is
            if size < 0:
                _refuse("a buffer announces a negative size")
        total += size
    return rows, total


class _Table:
    """A table of a flatbuffer, by the places of its fields (0: absent)."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.vtable = at - struct.unpack_from("<i", data, at)[0]

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def field(self, index: int) -> int:
        size = struct.unpack_from("<H", self.data, self.vtable)[0]
        slot = 4 + 2 * index
        offset = struct.unpack_from("<H", self.data, self.vtable + slot)[0] if slot < size else 0
        return self.at + offset if offset else 0

    def child(self, index: int) -> _Table:
        at = self.field(index)
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])


def _refuse(why: str) -> Any:
    raise ValueError(why)


def _describe(error: ValidationError) -> str:
    """Where and what, without the values: they may be anything."""
    lines = (f"{'.'.join(map(str, p['loc'])) or 'all of it'}: {p['msg']}" for p in error.errors(include_url=False))
    return "; ".join(lines)[:500]
