"""Damaged Arrow bodies for the fuzz tests: valid bodies of every kind, and mutations of their messages and numbers.

A case depends only on (kind, seed, number), so that a case that ended a process can be made again.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from engine.http import wire
from engine.models.images import PlacedImage
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import PolicyRef

POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=3, state="f" * 64)
IMAGES = [(PlacedImage(1, 2, b"\x89PNG" + bytes(range(40))),), (), (PlacedImage(0, 1, b"a"), PlacedImage(2, 2, b"bc"))]
PROMPTS = [[1, 2, 3, 4], [5] * 40, [2**31 - 1, 0, 7, 8]]
EXTREMES = [0, 1, 2, 3, 4, 7, 8, 16, 127, 128, 255, 1 << 15, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
LONG_EXTREMES = [*EXTREMES, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8]
CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + bytes(4)

Decode = Callable[[bytes], object]


def _generate(images: bool) -> bytes:
    sampling = SamplingParams(temperature=0.7, top_k=5, max_new_tokens=3, stop_token_ids=(1, 2))
    request = GenerateRequest(POLICY, PROMPTS, [3, -(2**63), 9], sampling, images=IMAGES if images else None)
    return wire.encode_generate(request, epoch=2)


def _logprobs_request(images: bool) -> bytes:
    sequences = [
        TokenSequence(ids, [0.0, 1.0] * (len(ids) // 2), f"group {number}", IMAGES[number] if images else ())
        for number, ids in enumerate(PROMPTS)
    ]
    return wire.encode_logprobs_request(LogprobsRequest(POLICY, sequences, 0.5), epoch=1)


def _completions() -> bytes:
    return wire.encode_completions([Completion(ids, [-0.5] * len(ids), "eos") for ids in PROMPTS])


KINDS: dict[str, tuple[Callable[[], bytes], Decode]] = {
    "generate": (lambda: _generate(False), wire.decode_generate),
    "generate with images": (lambda: _generate(True), wire.decode_generate),
    "logprobs request": (lambda: _logprobs_request(False), wire.decode_logprobs_request),
    "logprobs request with images": (lambda: _logprobs_request(True), wire.decode_logprobs_request),
    "completions": (_completions, wire.decode_completions),
    "logprobs": (lambda: wire.encode_logprobs([[-1.0, -2.5], [], [0.0] * 30]), wire.decode_logprobs),
    "values": (lambda: wire.encode_values([[0.25, 3.0], [], [1.5] * 30]), wire.decode_values),
}
"""Kind of body -> (function that makes a valid body, function that decodes a body)."""


@cache
def bodies(kind: str) -> list[bytes]:
    """Valid bodies of a kind: as this package writes them, uncompressed, of LZ4, of two batches, and without rows."""
    body = KINDS[kind][0]()
    with pa.ipc.open_stream(body) as reader:
        schema, batches = reader.schema, list(reader)
    return [
        body,
        _stream(schema, batches, None),
        _stream(schema, batches, "lz4"),
        _stream(schema, batches * 2, None),
        _stream(schema, [batch.slice(1) for batch in batches], "zstd"),
        _stream(schema, [], None),
    ]


def _stream(schema: pa.Schema, batches: list[pa.RecordBatch], compression: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@cache
def foreign_messages() -> list[bytes]:
    """Well-formed messages that belong in none of our bodies: dictionaries, tensors, schemas of other types."""
    dictionary = pa.array(["a", "b", "a"]).dictionary_encode()
    deep = pa.array([[[[1]]]], pa.list_(pa.list_(pa.list_(pa.int32()))))
    tables = [
        {"x": dictionary},
        {"x": deep, "y": pa.array([{"a": 1}])},
        {"x": pa.array(["text"], pa.string_view()), "y": pa.array([b"b"], pa.large_binary())},
        {"x": pa.array([1, None, 3]), "y": pa.array([True, False, None])},
        {"x": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([1]))},
        {"x": pa.array([[1]], pa.list_(pa.int32())), "y": pa.nulls(1)},
    ]
    streams = []
    for columns in tables:
        batch = pa.RecordBatch.from_pydict(columns)
        streams.append(_stream(batch.schema, [batch], None))
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.arange(6).reshape(2, 3)), sink)
    streams.append(sink.getvalue().to_pybytes())
    return [message for stream in streams for message in messages(stream)]


def messages(stream: bytes) -> list[bytes]:
    """The messages of a valid stream, each with its frame; the end marker is not one of them."""
    parts, start = [], 0
    while start + 8 <= len(stream):
        length = struct.unpack_from("<I", stream, start + 4)[0]
        if length == 0:
            break
        end = start + 8 + length + _body_length(stream[start + 8 : start + 8 + length])
        if not start + 8 < end <= len(stream):
            raise struct.error("a message has no valid length")
        parts.append(stream[start:end])
        start = end
    return parts


def _message_field(metadata: bytes, index: int) -> int:
    """Where the flatbuffer of a message has the field of this number; 0 when it is absent."""
    table = struct.unpack_from("<I", metadata)[0]
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    size = struct.unpack_from("<H", metadata, vtable)[0]
    offset = struct.unpack_from("<H", metadata, vtable + 4 + 2 * index)[0] if 4 + 2 * index < size else 0
    return table + offset if offset else 0


def _body_length(metadata: bytes) -> int:
    field = _message_field(metadata, 3)
    return struct.unpack_from("<q", metadata, field)[0] if field else 0


# -- mutations -------------------------------------------------------------------------------------------------


def case(kind: str, seed: int, number: int) -> bytes:
    """The damaged body of this number."""
    draw = random.Random(f"{seed}/{kind}/{number}")
    data = bytearray(draw.choice(bodies(kind)))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        with contextlib.suppress(struct.error, IndexError):  # an earlier mutation broke the structure that one needs
            data = draw.choice(MUTATIONS)(data, kind, draw)
    if not data.endswith(END) and draw.random() < 0.8:
        data += END  # without the end marker a stream is refused at once
    return bytes(data)


def flip_bits(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    for _ in range(draw.randint(1, 8)):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def overwrite_bytes(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    for _ in range(draw.randint(1, 6)):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    return data


def truncate(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    return data[: draw.randrange(len(data) + 1)]


def splice(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """The beginning of this body and the end of another one, cut at places that often are aligned."""
    other = draw.choice(bodies(draw.choice(list(KINDS))))
    step = draw.choice((1, 8))
    head = draw.randrange(len(data) + 1) // step * step
    tail = draw.randrange(len(other) + 1) // step * step
    return data[:head] + bytearray(other[tail:])


def overwrite_integers(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """Lengths, offsets and counts replaced by extremes; most of them stand on multiples of 4."""
    for _ in range(draw.randint(1, 3)):
        wide = draw.random() < 0.5
        size, extremes = (8, LONG_EXTREMES) if wide else (4, EXTREMES)
        if len(data) < size:
            return data
        start = draw.randrange(len(data) - size + 1) // 4 * 4
        data[start : start + size] = draw.choice(extremes).to_bytes(size, "little")
    return data


def nudge_integers(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """A 32-bit number changed by a little: offsets that no longer increase, counts off by one."""
    if len(data) < 4:
        return data
    start = draw.randrange(len(data) - 3) // 4 * 4
    value = struct.unpack_from("<I", data, start)[0] + draw.choice((-8, -4, -1, 1, 4, 8))
    struct.pack_into("<I", data, start, value % (1 << 32))
    return data


def swap_types(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """A message that says it is of another type: schema, dictionary, record batch, tensor, sparse tensor, none."""
    parts = _parts(data)
    if not parts:
        return data
    number = draw.randrange(len(parts))
    message = bytearray(parts[number])
    field = _message_field(bytes(message[8:]), 1)
    if field:
        message[8 + field] = draw.choice((0, 1, 2, 3, 4, 5, 6, 255))
    parts[number] = bytes(message)
    return bytearray(b"".join(parts) + END)


def rearrange(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """Messages duplicated, dropped, moved, or put in from elsewhere."""
    parts = _parts(data)
    others = foreign_messages() + _parts(bytearray(draw.choice(bodies(draw.choice(list(KINDS))))))
    for _ in range(draw.randint(1, 3)):
        action = draw.randrange(4)
        if action == 0 and parts:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(parts))
        elif action == 1 and parts:
            del parts[draw.randrange(len(parts))]
        elif action == 2:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(others))
        else:
            draw.shuffle(parts)
    return bytearray(b"".join(parts) + draw.choice((END, b"", CONTINUATION, END + END, bytes(8))))


def reframe(data: bytearray, kind: str, draw: random.Random) -> bytearray:
    """The length of a message's metadata or body replaced, or bytes put in before a message, so that it is no longer
    aligned."""
    parts = _parts(data)
    if not parts:
        return data
    number = draw.randrange(len(parts))
    message = bytearray(parts[number])
    action = draw.randrange(3)
    if action == 0:
        struct.pack_into("<I", message, 4, draw.choice(EXTREMES) % (1 << 32))
    elif action == 1 and (field := _message_field(bytes(message[8:]), 3)):
        struct.pack_into("<Q", message, 8 + field, draw.choice(LONG_EXTREMES))
    else:
        length = len(message) - 8 - _body_length(bytes(message[8:]))
        padding = draw.randint(1, 9)
        struct.pack_into("<I", message, 4, (length + padding) % (1 << 32))
        message[8 + length : 8 + length] = bytes(padding)
    parts[number] = bytes(message)
    return bytearray(b"".join(parts) + END)


def _parts(data: bytearray) -> list[bytes]:
    """The messages of a body, when it is still whole enough to be cut into them."""
    try:
        return messages(bytes(data))
    except struct.error:
        return []


MUTATIONS = (
    flip_bits,
    overwrite_bytes,
    truncate,
    splice,
    overwrite_integers,
    overwrite_integers,
    nudge_integers,
    swap_types,
    rearrange,
    reframe,
)
