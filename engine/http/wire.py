"""Encodes and decodes batches as Arrow IPC streams.

A stream has columns of lists, buffers compressed with zstd, and the rest of the request as JSON in the schema's
metadata. The encoding is exact: token ids are int32 (others are refused), seeds int64, loss masks bits, and logprobs
float64. Malformed bytes raise BadSpec: engine.http.arrow_stream checks each message and its decoded size before
anything is decompressed."""

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
from engine.http.arrow_stream import (
    READ_ERRORS,
    CheckedStream,
    StreamTooLarge,
    buffer_weights,
    decoded_bytes,
    open_stream,
)
from engine.http.errors import BodyTooLarge
from engine.models.images import Images, PlacedImage
from engine.models.samples import FloatArray
from engine.protocol import (
    MAX_TOP,
    Completion,
    GenerateRequest,
    LogprobsRequest,
    RowsRequest,
    SamplingParams,
    StopReason,
    TableRows,
    TokenIds,
    TokenSequence,
    TopLogprobs,
    TopRowsRequest,
)
from engine.validation_messages import describe_errors
from storage.chain.records import PolicyRef
from storage.errors import InvalidKey
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
MAX_REQUEST_BYTES = 1 << 30
"""Most memory of one decoded request as Python lists: 24 million tokens."""
MAX_RESPONSE_BYTES = 4 << 30
"""Most memory of one decoded response: 50 million sampled tokens with their logprobs."""
MAX_SEQUENCE_TOKENS = 1 << 22
"""Most tokens of one sequence; more than the context of any supported model."""
MAX_VALUES = 1 << 26
"""Most values of one column, whose offsets are 32-bit integers."""
_METADATA_KEY = b"ostinato"
_IDS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float64())
_MAX_ID = (1 << 31) - 1

Metadata = TypeVar("Metadata", bound=Frozen)


class GenerateMetadata(Frozen):
    """The part of a generate request that is not in columns."""

    policy: PolicyRef
    sampling: SamplingParams = SamplingParams()
    tensor_parallel: int | None = Field(None, ge=1, le=1 << 16)
    interruptible: bool = Field(False, exclude_if=lambda interruptible: not interruptible)
    interrupt_after: float | None = Field(None, gt=0, allow_inf_nan=False, exclude_if=lambda seconds: seconds is None)
    steps_ahead: int = Field(0, ge=0, lt=1 << 31, exclude_if=lambda steps: not steps)
    epoch: int = Field(0, ge=0, lt=1 << 63)


class LogprobsMetadata(Frozen):
    """The part of a logprobs or values request that is not in columns."""

    policy: PolicyRef
    temperature: float = Field(1.0, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    top: int | None = Field(None, ge=1, le=MAX_TOP, exclude_if=lambda top: top is None)
    epoch: int = Field(0, ge=0, lt=1 << 63)


class ResponseMetadata(Frozen):
    """Responses have nothing but columns."""


@dataclass(frozen=True)
class BodySummary:
    """What is known of a request before its body is decompressed."""

    policy: PolicyRef
    decoded_bytes: int
    """Upper bound of the memory that decoding needs."""


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, data_type, nullable=False) for name, data_type in columns.items()])


GENERATE = _schema(prompt=_IDS, seed=pa.int64())
CONTINUE = _schema(prompt=_IDS, seed=pa.int64(), sampled=_IDS)
"""GENERATE for completions that have tokens already."""
COMPLETIONS = _schema(token_ids=_IDS, logprobs=_FLOATS, stop_reason=pa.string())
SEQUENCES = _schema(token_ids=_IDS, loss_mask=pa.list_(pa.bool_()), group=pa.string())
LOGPROBS = _schema(logprobs=_FLOATS)
VALUES = _schema(values=_FLOATS)
TABLES = _schema(table=pa.string(), rows=pa.list_(pa.bool_()))
SCORES = _schema(scores=_FLOATS)
SHORT_SCORES = _schema(scores=pa.list_(pa.float32()))
"""SCORES of numbers that float32 holds exactly, as a trainer in float32 gives them."""
TOP = _schema(token_ids=_IDS, logprobs=_FLOATS)
"""The most probable tokens of one position after the other."""
_SCORES_PER_ROW = 1 << 20
"""Numbers in one row of SCORES and of TOP, whose rows have no meaning."""


# -- requests and responses -----------------------------------------------------------------------------------------


def encode_generate(request: GenerateRequest, *, epoch: int) -> bytes:
    """Encodes a generate request.

    Raises BadSpec for prompts and seeds of unequal number, ids outside int32, and seeds outside int64.
    """
    prompts, seeds = request.prompts, request.seeds
    if len(prompts) != len(seeds):
        raise BadSpec(f"{len(prompts)} prompts were given with {len(seeds)} seeds; give one seed per prompt")
    schema, columns = GENERATE, [_ids(prompts, "prompt"), _numbers(seeds, "q", "seeds")]
    if request.sampled is not None:
        schema = CONTINUE
        columns.append(_ids(request.sampled, "completion"))
    metadata = GenerateMetadata(
        policy=request.policy,
        sampling=request.sampling,
        tensor_parallel=request.tensor_parallel,
        interruptible=request.interruptible,
        interrupt_after=request.interrupt_after,
        steps_ahead=request.steps_ahead,
        epoch=epoch,
    )
    return _write(*_with_images(schema, columns, request.images or ()), metadata)


def decode_generate(data: bytes, *, context: int | None = None) -> tuple[GenerateRequest, int]:
    """Returns the request and the client's epoch. Raises BadSpec, SampleTooLong for a prompt longer than `context`."""
    metadata, (prompts, seeds, *rest) = _read(data, GENERATE, GenerateMetadata, context=context)
    # Those of CONTINUE and of the images follow.
    sampled: list[TokenIds] | None = None
    if len(rest) % len(IMAGE_COLUMNS):
        sampled = [tokens.tolist() for tokens in rest.pop(0)]
    request = GenerateRequest(
        metadata.policy,
        [prompt.tolist() for prompt in prompts],
        seeds,
        metadata.sampling,
        metadata.tensor_parallel,
        _images(rest) if rest else None,
        sampled,
        metadata.interruptible,
        metadata.interrupt_after,
        metadata.steps_ahead,
    )
    return request, metadata.epoch


def summarize_generate(data: bytes) -> BodySummary:
    """Returns the summary of a generate request, without decoding it. Raises BadSpec."""
    metadata, stream = _open(data, GENERATE, GenerateMetadata)
    return BodySummary(metadata.policy, stream.decoded_bytes)


def summarize_logprobs_request(data: bytes) -> BodySummary:
    """Returns the summary of a logprobs or values request, without decoding it. Raises BadSpec."""
    metadata, stream = _open(data, SEQUENCES, LogprobsMetadata)
    return BodySummary(metadata.policy, stream.decoded_bytes)


def encode_completions(completions: Sequence[Completion]) -> bytes:
    """Encodes the response to a generate request."""
    columns = [
        _ids([completion.token_ids for completion in completions], "completion"),
        _floats([completion.logprobs for completion in completions], "logprobs of completion"),
        pa.array([completion.stop_reason for completion in completions], pa.string()),
    ]
    return _write(COMPLETIONS, columns, ResponseMetadata())


def decode_completions(data: bytes) -> list[Completion]:
    """Raises BadSpec."""
    _, columns = _read(data, COMPLETIONS, ResponseMetadata)
    completions = []
    for ids, logprobs, reason in zip(*columns, strict=True):
        completions.append(Completion(ids.tolist(), logprobs.tolist(), cast(StopReason, reason)))
    return completions


def encode_logprobs_request(request: LogprobsRequest, *, epoch: int) -> bytes:
    """Encodes a logprobs or values request. Raises BadSpec for ids outside int32."""
    columns = [
        _ids([sequence.token_ids for sequence in request.sequences], "sequence"),
        _masks([sequence.loss_mask for sequence in request.sequences]),
        pa.array([sequence.group for sequence in request.sequences], pa.string()),
    ]
    return _write(*_with_images(SEQUENCES, columns, request.images), _scoring_metadata(request, epoch))


def _scoring_metadata(request: LogprobsRequest | RowsRequest, epoch: int) -> LogprobsMetadata:
    return _make_metadata(
        LogprobsMetadata,
        policy=request.policy,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        top=getattr(request, "top", None),
        epoch=epoch,
    )


def decode_logprobs_request(data: bytes, *, context: int | None = None) -> tuple[LogprobsRequest, int]:
    """Returns the request and the client's epoch. Raises BadSpec, SampleTooLong for a sequence longer than
    `context`."""
    metadata, (ids, loss_masks, groups, *rest) = _read(data, SEQUENCES, LogprobsMetadata, context=context)
    images = _images(rest) if rest else [()] * len(ids)
    sequences = [TokenSequence(*row) for row in zip(ids, loss_masks, groups, images, strict=True)]
    return LogprobsRequest(metadata.policy, sequences, metadata.temperature, metadata.max_tokens), metadata.epoch


def encode_logprobs(logprobs: Sequence[Sequence[float]]) -> bytes:
    return _write(LOGPROBS, [_floats(logprobs, "logprobs of sequence")], ResponseMetadata())


def decode_logprobs(data: bytes) -> list[list[float]]:
    """Raises BadSpec."""
    _, (logprobs,) = _read(data, LOGPROBS, ResponseMetadata)
    return [row.tolist() for row in logprobs]


def encode_values(values: Sequence[Sequence[float]]) -> bytes:
    return _write(VALUES, [_floats(values, "values of sequence")], ResponseMetadata())


def decode_values(data: bytes) -> list[list[float]]:
    """Raises BadSpec."""
    _, (values,) = _read(data, VALUES, ResponseMetadata)
    return [row.tolist() for row in values]


def encode_rows_request(request: RowsRequest, *, epoch: int) -> bytes:
    """Encodes a request for the logprobs, the values or the most probable tokens of committed rows."""
    columns = [
        pa.array([part.table.model_dump_json() for part in request.tables], pa.string()),
        _masks([part.rows for part in request.tables]),
    ]
    return _write(TABLES, columns, _scoring_metadata(request, epoch))


def decode_rows_request(data: bytes, *, context: int | None = None) -> tuple[RowsRequest, int]:
    """Returns the request and the client's epoch. Raises BadSpec. `context` has no effect here."""
    metadata, tables = _read_tables(data)
    return RowsRequest(metadata.policy, tables, metadata.temperature, metadata.max_tokens), metadata.epoch


def _read_tables(data: bytes) -> tuple[LogprobsMetadata, list[TableRows]]:
    metadata, (refs, masks) = _read(data, TABLES, LogprobsMetadata)
    tables = []
    for ref, mask in zip(refs, masks, strict=True):
        try:
            table = ArtifactRef.model_validate_json(ref)
            keys.validate_key(table.key)
        except ValidationError as error:
            raise BadSpec(f"a table of the request: {describe_errors(error.errors())}") from error
        except InvalidKey as error:
            raise BadSpec(str(error)) from error
        tables.append(TableRows(table, mask))
    return metadata, tables


def decode_top_request(data: bytes, *, context: int | None = None) -> tuple[TopRowsRequest, int]:
    """Returns the request and the client's epoch. Raises BadSpec. `context` has no effect here."""
    metadata, tables = _read_tables(data)
    if metadata.top is None:
        raise BadSpec(f"the metadata has no top; give the number of tokens per position, 1 to {MAX_TOP}")
    limits = metadata.temperature, metadata.max_tokens
    return TopRowsRequest(metadata.policy, tables, *limits, top=metadata.top), metadata.epoch


def summarize_rows_request(data: bytes) -> BodySummary:
    """Returns the summary of a request for committed rows, without decoding it. Raises BadSpec."""
    metadata, stream = _open(data, TABLES, LogprobsMetadata)
    return BodySummary(metadata.policy, stream.decoded_bytes)


def encode_scores(scores_T: FloatArray) -> bytes:
    """Encodes the response to a request for committed rows."""
    schema, code = SHORT_SCORES, "f"
    scores: FloatArray = scores_T.astype(np.float32)
    if not np.array_equal(scores, scores_T, equal_nan=True):
        schema, code, scores = SCORES, "d", scores_T
    parts = [scores[start : start + _SCORES_PER_ROW] for start in range(0, len(scores), _SCORES_PER_ROW)]
    column = _lists(parts, code, "scores", "has entries that are no numbers")
    # Their bits are random, so that compression would save little and take most of the reader's time.
    return _write(schema, [column], ResponseMetadata(), compression=None)


def decode_scores(data: bytes) -> FloatArray:
    """(T,) float64. Raises BadSpec."""
    _, (rows,) = _read(data, SCORES, ResponseMetadata)
    return np.concatenate([np.zeros(0), *rows])


def encode_top_logprobs(top: TopLogprobs) -> bytes:
    """Encodes the response to a request for the most probable tokens of committed rows."""
    columns = []
    for values, code, noun in ((top.token_ids_TK.ravel(), "i", "ids"), (top.logprobs_TK.ravel(), "d", "logprobs")):
        parts = [values[start : start + _SCORES_PER_ROW] for start in range(0, len(values), _SCORES_PER_ROW)]
        columns.append(_lists(parts, code, noun, "has entries that are no numbers"))
    return _write(TOP, columns, ResponseMetadata(), compression=None)


def decode_top_logprobs(data: bytes, top: int) -> TopLogprobs:
    """The response to a request for `top` tokens per position. Raises BadSpec for any malformed bytes."""
    _, (id_rows, logprob_rows) = _read(data, TOP, ResponseMetadata)
    ids = np.concatenate([np.zeros(0, np.int32), *id_rows])
    logprobs = np.concatenate([np.zeros(0), *logprob_rows])
    if len(ids) != len(logprobs) or len(ids) % top or (ids < 0).any():
        raise BadSpec(
            f"the engine answered with {len(ids)} ids and {len(logprobs)} logprobs for {top} tokens per position; "
            f"expected equally many, a multiple of {top}, and no id below 0: use one version on both sides"
        )
    return TopLogprobs(ids.reshape(-1, top), logprobs.reshape(-1, top))


# -- images ----------------------------------------------------------------------------------------------------

IMAGE_COLUMNS = _schema(image_start=_IDS, image_tokens=_IDS, image_data=pa.list_(pa.binary()))
"""Columns of the images of each row. A request has them only if some row has an image."""


def _schema_with_images(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, *IMAGE_COLUMNS])


def _with_images(
    schema: pa.Schema, columns: list[pa.Array], images: Sequence[Images]
) -> tuple[pa.Schema, list[pa.Array]]:
    """Returns the schema and the columns, with those of the images if some row has an image.

    Raises BadSpec for too many bytes of images."""
    if not any(images):
        return schema, columns
    starts, counts, data, size = [], [], [], 0
    for row in images:
        starts.append([image.start for image in row])
        counts.append([image.tokens for image in row])
        data.append([image.data for image in row])
        size += sum(len(image.data) for image in row)
    # Half of the limit: decoding an image holds its bytes twice, in the buffer and in the object.
    if size > MAX_REQUEST_BYTES // 2:
        raise BadSpec(f"the images of one call have {size >> 20} MiB; send it in several calls")
    data_column = pa.array(data, IMAGE_COLUMNS.field("image_data").type)
    image_columns = [_ids(starts, "image of sequence"), _ids(counts, "image of sequence"), data_column]
    return _schema_with_images(schema), columns + image_columns


def _images(columns: Sequence[list[Any]]) -> list[Images]:
    """Returns the images of each row. Raises BadSpec if the columns of a row differ in length."""
    images = []
    for row in zip(*columns, strict=True):
        # A row has one start, one count and one image of each of its images.
        lengths = [len(values) for values in row]
        if len(set(lengths)) != 1:
            raise BadSpec(f"a row has {', '.join(map(str, lengths))} starts, counts and images; one each")
        starts, tokens, data = row
        placed = zip(starts.tolist(), tokens.tolist(), data, strict=True)
        images.append(tuple(PlacedImage(*values) for values in placed))
    return images


# -- columns ---------------------------------------------------------------------------------------------------


def _ids(rows: Sequence[Sequence[int] | np.ndarray], noun: str) -> pa.Array:
    return _lists(rows, "i", noun, f"has token ids outside 0 … {_MAX_ID}; give the ids of the model's tokenizer")


def _floats(rows: Sequence[Sequence[float] | np.ndarray], noun: str) -> pa.Array:
    return _lists(rows, "d", noun, "has entries that are no numbers")


def _masks(rows: Sequence[np.ndarray]) -> pa.Array:
    """Returns a column of lists of bools, which Arrow stores as bits."""
    _check_count(sum(map(len, rows)))
    return pa.array(rows, SEQUENCES.field("loss_mask").type)


def _lists(rows: Sequence[Sequence[Any] | np.ndarray], code: str, noun: str, problem: str) -> pa.Array:
    """Returns a column of lists. array.array checks the type and range of every value, several times faster than
    pyarrow.

    `code` is the type code of the values. `noun` and `problem` name a row and its error in the message of BadSpec.
    """
    values = array(code)
    for index, row in enumerate(rows):
        # An array of the right type has been checked by its type.
        if isinstance(row, np.ndarray) and row.dtype.char == code:
            values.frombytes(row.tobytes())
            continue
        try:
            values.extend(row)
        except (OverflowError, TypeError) as error:
            raise BadSpec(f"{noun} {index} {problem}") from error

    # A list column is the flat values, and the offset at which each row ends. Both buffers are used without a copy.
    ends = accumulate(map(len, rows), initial=0)
    _check_count(len(values))
    flat = pa.Array.from_buffers(_TYPES[code], len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(pa.array(array("i", ends), pa.int32()), flat)


def _check_count(values: int) -> None:
    if values > MAX_VALUES:
        raise BadSpec(f"{values} values in one call, at most {MAX_VALUES} travel at once; split the batch")


def _numbers(values: Sequence[int], code: str, noun: str) -> pa.Array:
    try:
        numbers = array(code, values)
    except (OverflowError, TypeError) as error:
        raise BadSpec(f"{noun} must be integers of 64 bits: {error}") from error
    return pa.Array.from_buffers(_TYPES[code], len(numbers), [None, pa.py_buffer(numbers)])


_TYPES = {"i": pa.int32(), "q": pa.int64(), "f": pa.float32(), "d": pa.float64()}


# -- streams --------------------------------------------------------------------------------------------------


def _write(
    schema: pa.Schema, columns: Sequence[pa.Array], metadata: Frozen, *, compression: str | None = "zstd"
) -> bytes:
    """Returns the stream of one batch. Raises BodyTooLarge if it decodes to more than a reader takes."""
    # Check the decoded size here, so that the sender gets the error and not the reader.
    buffer_sizes: list[int] = []
    for column in columns:
        for buffer in column.buffers():
            buffer_sizes.append(0 if buffer is None else buffer.size)
    size, limit = decoded_bytes(buffer_sizes, buffer_weights(schema)), _decoded_limit(type(metadata))
    if size > limit:
        raise BodyTooLarge(
            f"the batch decodes to {size >> 20} MiB of lists, at most {limit >> 20} MiB; split the batch"
        )

    # Write the JSON part into the schema's metadata, and the columns as one record batch.
    schema = schema.with_metadata({_METADATA_KEY: metadata.model_dump_json().encode()})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))
    return sink.getvalue().to_pybytes()


def _make_metadata(kind: type[Metadata], **fields: Any) -> Metadata:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise BadSpec(describe_errors(error.errors(), fields)) from error


def _decoded_limit(kind: type[Frozen]) -> int:
    """Returns the most memory that a decoded request or response may need."""
    return MAX_RESPONSE_BYTES if kind is ResponseMetadata else MAX_REQUEST_BYTES


@contextmanager
def _errors_as_bad_spec(schema: pa.Schema) -> Iterator[None]:
    """Turns every error that reading untrusted bytes may raise into BadSpec or BodyTooLarge."""
    try:
        yield
    except PermanentEngineError:
        raise
    except StreamTooLarge as error:
        raise BodyTooLarge(str(error)) from error
    except READ_ERRORS as error:
        names = ", ".join(schema.names)
        raise BadSpec(f"the body is no Arrow stream of {names}: {str(error)[:300]}") from error


def _open(data: bytes, schema: pa.Schema, kind: type[Metadata]) -> tuple[Metadata, CheckedStream]:
    """Returns the metadata and the checked stream, without decoding it. Raises BadSpec for any malformed bytes."""
    # Only requests may have images.
    schemas = [schema, CONTINUE] if schema == GENERATE else [schema]
    if schema in (GENERATE, SEQUENCES):
        schemas += [_schema_with_images(known) for known in schemas]
    elif schema == SCORES:
        schemas.append(SHORT_SCORES)
    with _errors_as_bad_spec(schema):
        stream = open_stream(data, schemas, _decoded_limit(kind))
        json_metadata = (stream.schema.metadata or {}).get(_METADATA_KEY, b"")
        try:
            return kind.model_validate_json(json_metadata), stream
        except ValidationError as error:
            problems = describe_errors(error.errors())
            raise BadSpec(f"the metadata {_METADATA_KEY.decode()!r} of the Arrow schema: {problems}") from error


def _read(
    data: bytes, schema: pa.Schema, kind: type[Metadata], *, context: int | None = None
) -> tuple[Metadata, list[list[Any]]]:
    """Returns the metadata and one Python list per column. Rows of numbers are arrays.

    Raises BadSpec for any malformed bytes, SampleTooLong for a sequence longer than `context` or MAX_SEQUENCE_TOKENS.
    """
    metadata, stream = _open(data, schema, kind)
    longest, limit_name = MAX_SEQUENCE_TOKENS, "what one sequence may have"
    if context is not None and context < longest:
        longest, limit_name = context, "the model's context"

    # Compare the lengths before lists are made, which take several times the memory of the decoded buffers.
    def check(batch: pa.RecordBatch) -> None:
        for column in batch.columns:
            if not batch.num_rows or not pa.types.is_list(column.type):
                continue
            length = int(np.diff(column.offsets).max())
            if length > longest:
                raise SampleTooLong(
                    f"a sequence of {length} tokens exceeds {limit_name}, {longest} tokens; shorten it or leave it out"
                )

    with _errors_as_bad_spec(schema):
        return metadata, stream.columns(check)
