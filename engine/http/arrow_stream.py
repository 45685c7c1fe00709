"""Reads Arrow IPC streams from untrusted clients: checks every message and its size before Arrow decodes it.

pyarrow verifies the flatbuffers of a message, but not that the message has the expected type: `pa.ipc.read_schema` of a
record batch reads out of bounds and may end the process. So this module checks the type, the number of buffers, their
bounds and alignment, the null counts and the announced sizes. `validate(full=True)` checks offsets and text before any
list is made. engine.http.wire gives the columns their meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import pyarrow as pa

MAX_ROWS = 1 << 20
"""Most rows in one stream."""
MAX_BATCHES = 1024
"""Most record batches in one stream. engine.http.wire writes one."""
MAX_SCHEMA_BYTES = 1 << 20
"""Most bytes of the schema message, whose metadata holds the JSON part of the request."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_JSON_WEIGHT = 16
"""Bytes of Python objects per byte of JSON. The worst case is a number of two characters, an object of 32 bytes."""

READ_ERRORS = (pa.ArrowException, OSError, ValueError, IndexError, struct.error, EOFError)
"""Classes of the errors that a damaged stream raises."""


class StreamTooLarge(ValueError):
    """The stream has too many rows, batches, schema bytes or decoded bytes."""


@dataclass(frozen=True)
class CheckedStream:
    """A stream whose messages are checked and not decompressed yet."""

    schema: pa.Schema
    batches: list[pa.Message]
    decoded_bytes: int
    """Upper bound of the memory that decoding needs: the decompressed buffers and the Python objects made of them."""

    def columns(self, check: Callable[[pa.RecordBatch], None]) -> list[list[Any]]:
        """Returns one Python list per column. Rows of numbers are arrays. `check` is called with each decoded batch
        before its lists are made.

        Raises one of READ_ERRORS.
        """
        columns: list[list[Any]] = [[] for _ in self.schema]
        for message in self.batches:
            batch = pa.ipc.read_record_batch(message, self.schema)
            batch.validate(full=True)
            check(batch)
            for values, column in zip(columns, batch.columns, strict=True):
                values.extend(_python_values(column))
        return columns


def open_stream(data: bytes, schemas: Sequence[pa.Schema], max_decoded_bytes: int) -> CheckedStream:
    """Checks the messages of a stream, whose schema must be one of `schemas`. It decodes none of them.

    Raises one of READ_ERRORS, or StreamTooLarge if decoding needs more than `max_decoded_bytes` of memory.
    """
    # the schema message: it must come first, and its type is checked before pyarrow reads it
    if not data.endswith(_END_OF_STREAM):
        reject("it does not end with the end-of-stream marker")
    messages = iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(data)))
    first = next(messages, None)
    if first is None:
        reject("it is empty")
    if first.type != "schema":
        reject(f"it begins with a message of type {first.type!r}")
    if len(first.metadata) > MAX_SCHEMA_BYTES:
        raise StreamTooLarge(f"its schema has {len(first.metadata)} bytes, at most {MAX_SCHEMA_BYTES} are taken")
    if b"ARROW:extension" in bytes(first.metadata):
        reject("it has extension types, whose parameters pyarrow would parse")
    schema = pa.ipc.read_schema(first)
    is_expected = any(schema.equals(expected, check_metadata=False) for expected in schemas)
    if not is_expected:
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        reject(f"its columns are {columns[:300]}")

    # the record batches: their headers give the decoded size, which must not exceed the limit
    batches, rows, size = [], 0, _JSON_WEIGHT * len(first.metadata)
    weights = buffer_weights(schema)
    for message in messages:
        batch_rows, buffers = _read_batch_header(message, schema)
        rows += batch_rows
        size += decoded_bytes(buffers, weights)
        if rows > MAX_ROWS or size > max_decoded_bytes:
            raise StreamTooLarge(
                f"the batch decodes to over {MAX_ROWS} rows or {max_decoded_bytes >> 20} MiB; split the batch"
            )
        batches.append(message)
        if len(batches) > MAX_BATCHES:
            raise StreamTooLarge(f"the stream has over {MAX_BATCHES} record batches; send one")
    return CheckedStream(schema, batches, size)


def reject(reason: str) -> NoReturn:
    """Raises the ValueError for a stream that is damaged or has another schema."""
    raise ValueError(reason)


# -- sizes -----------------------------------------------------------------------------------------------------

_VALUE_WEIGHTS = {pa.int32(): 11, pa.int64(): 6, pa.float32(): 9, pa.float64(): 5, pa.bool_(): 9}
"""Memory per byte of a buffer of numbers. Each number needs its bytes in the buffer, 8 bytes in a list, and an object
of 32 bytes (an int) or 24 bytes (a float). A byte of a buffer of bools holds 8 of them, which become an array of 8
bytes."""
_ROW_WEIGHT = 32
"""Memory per byte of the offsets of lists or texts. An offset of 4 bytes stands for one object (a list, a str or bytes)
and a part of the dataclass of its row, which take up to 128 bytes."""
_TEXT_WEIGHT = 5
"""Memory per byte of text: the byte in the buffer, and up to 4 bytes per character of a str."""
_BINARY_WEIGHT = 2
"""Memory per byte of binary data: the byte in the buffer, and the byte in the object."""


def buffer_weights(schema: pa.Schema) -> list[int]:
    """Returns the memory per byte of each buffer of a record batch, in the order of the buffers."""
    weights: list[int] = []
    for field in schema:
        weights.extend(_type_weights(field.type))
    return weights


def _type_weights(data_type: pa.DataType) -> list[int]:
    if pa.types.is_list(data_type):
        return [1, _ROW_WEIGHT, *_type_weights(data_type.value_type)]
    if pa.types.is_string(data_type):
        return [1, _ROW_WEIGHT, _TEXT_WEIGHT]
    if pa.types.is_binary(data_type):
        return [1, _ROW_WEIGHT, _BINARY_WEIGHT]
    # The first buffer of each type is the bitmap of nulls, which has no Python objects.
    return [1, _VALUE_WEIGHTS[data_type]]


def decoded_bytes(buffers: Iterable[int], weights: Sequence[int]) -> int:
    """Returns the memory of a decoded record batch, from the decompressed sizes of its buffers."""
    return sum(size * weight for size, weight in zip(buffers, weights, strict=True))


def _python_values(column: pa.Array) -> list[Any]:
    """Returns the values of a column. A row of a list of numbers or bools is an array, a view of the column's
    values."""
    if len(column) == 0 or not pa.types.is_list(column.type):
        return column.to_pylist()
    values: Any = column.values
    ends = pairwise(column.offsets.to_pylist())
    if pa.types.is_binary(values.type):
        values = values.to_pylist()
        return [values[start:end] for start, end in ends]
    values = values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in ends]


# -- headers of a record batch ------------------------------------------------------------------------------


def _read_batch_header(message: pa.Message, schema: pa.Schema) -> tuple[int, list[int]]:
    """Returns (rows, bytes of each buffer after decompression) of a record batch message. Raises ValueError.

    It reads the fields of the message's flatbuffer, which Arrow has verified, because pyarrow gives neither number
    before it decompresses. Fields of a RecordBatch: 0 length, 1 nodes, 2 buffers, 3 compression.
    """
    # the message
    if message.type != "record batch":
        reject(f"it holds a message of type {message.type!r}")
    metadata, body = bytes(message.metadata), message.body
    if body is not None and body.address % 8:
        reject("a message does not begin at a multiple of 8 bytes")
    table = _FlatTable.root(metadata).child(2)  # Message.header, a RecordBatch
    length_position = table.field_position(0)

    # the number of rows (a flatbuffer leaves out a zero), and the length and null count of each column
    rows = 0
    if length_position:
        rows = struct.unpack_from("<q", metadata, length_position)[0]
    if rows < 0:
        reject("it announces a negative number of rows")
    for length, nulls in table.pairs(1):
        if nulls:
            reject("it holds nulls")
        if length < 0:
            reject("a column has a negative length")

    # the buffers, which must lie within the body
    compressed = table.field_position(3) != 0
    view = memoryview(b"" if body is None else body)
    sizes = [_decompressed_size(view, offset, length, compressed) for offset, length in table.pairs(2)]
    if len(sizes) != len(buffer_weights(schema)):
        reject(f"a record batch has {len(sizes)} buffers, its columns have {len(buffer_weights(schema))}")
    return rows, sizes


def _decompressed_size(body: memoryview, offset: int, length: int, compressed: bool) -> int:
    """Returns the size of a buffer after decompression, which its first 8 bytes give. Raises ValueError."""
    if offset < 0 or length < 0 or offset + length > len(body) or (length and offset % 8):
        reject("a buffer lies outside the body, or not at a multiple of 8 bytes")
    if not compressed or length < 8:
        return length
    size = int(struct.unpack_from("<q", body, offset)[0])
    if size < -1:
        reject("a buffer announces a negative size")
    # The size -1 marks a buffer that is not compressed. Its bytes follow the 8 bytes of the size.
    return length - 8 if size == -1 else size


class _FlatTable:
    """A table in a flatbuffer. `start` is its position in `data`."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data, self.start = data, start
        self.vtable = start - struct.unpack_from("<i", data, start)[0]

    @classmethod
    def root(cls, data: bytes) -> _FlatTable:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def field_position(self, index: int) -> int:
        """Returns where the field begins in `data`, or 0 if the table does not have it."""
        # The vtable begins with two sizes of 2 bytes. Then it has one offset of 2 bytes per field, 0 for an absent one.
        size = struct.unpack_from("<H", self.data, self.vtable)[0]
        slot = 4 + 2 * index
        if slot >= size:
            return 0
        offset = struct.unpack_from("<H", self.data, self.vtable + slot)[0]
        return self.start + offset if offset else 0

    def child(self, index: int) -> _FlatTable:
        """Returns the table that the field refers to. The field must be present."""
        position = self.field_position(index)
        return _FlatTable(self.data, position + struct.unpack_from("<I", self.data, position)[0])

    def pairs(self, index: int) -> Iterator[tuple[int, int]]:
        """Yields the elements of a vector of structs of two 64-bit integers."""
        position = self.field_position(index)
        if not position:
            return
        start = position + struct.unpack_from("<I", self.data, position)[0]
        for number in range(struct.unpack_from("<I", self.data, start)[0]):
            yield struct.unpack_from("<qq", self.data, start + 4 + 16 * number)
