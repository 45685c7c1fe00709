"""Tests of the wire format: batches are exact, and invalid bytes end in BadSpec."""

from __future__ import annotations

import json
import struct
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadSpec, SampleTooLong
from engine.http import arrow_stream, wire
from engine.http.errors import BodyTooLarge
from engine.models.images import MAX_IMAGE_BYTES, Images, PlacedImage, images_or_none
from engine.protocol import (
    Completion,
    GenerateRequest,
    LogprobsRequest,
    RowsRequest,
    SamplingParams,
    TableRows,
    TokenSequence,
    TopLogprobs,
    TopRowsRequest,
)
from storage.chain.records import PolicyRef
from tests.fixtures.servers.scripted_engine import ref
from tests.fixtures.servers.unchecked import unchecked
from tests.fuzz.mutations import END, messages

POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=3, state="f" * 64)
INT32 = st.integers(0, 2**31 - 1)
SEEDS = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(INT32, max_size=20)
FLOATS = st.floats(allow_nan=False)


def rows(*columns: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(st.tuples(*columns), max_size=12)


@given(rows(IDS, SEEDS), st.integers(0, 2**63 - 1))
def test_generate_requests_come_back_as_they_were(given_rows: list, epoch: int) -> None:
    request = GenerateRequest(
        POLICY,
        [ids for ids, _ in given_rows],
        [seed for _, seed in given_rows],
        SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=3, stop_token_ids=(1, 2)),
    )
    assert wire.decode_generate(wire.encode_generate(request, epoch=epoch)) == (request, epoch)


@given(rows(IDS, SEEDS, IDS), st.booleans(), st.sampled_from([None, 0.5]))
def test_requests_that_continue_completions_come_back_as_they_were(
    given_rows: list, with_images: bool, seconds: float | None
) -> None:
    prompts = [[7, *ids] for ids, _, _ in given_rows]
    images = None
    if with_images and given_rows:
        images = [(PlacedImage(0, 1, b"png"),), *(() for _ in given_rows[1:])]
    request = GenerateRequest(
        POLICY, prompts, [seed for _, seed, _ in given_rows], images=images,
        sampled=[tokens for _, _, tokens in given_rows], interruptible=True, interrupt_after=seconds,
        steps_ahead=len(prompts),
    )  # fmt: skip
    assert wire.decode_generate(wire.encode_generate(request, epoch=2)) == (request, 2)


@given(rows(IDS, st.lists(FLOATS, max_size=20), st.sampled_from(["eos", "stop", "length", "interrupted"])))
def test_completions_come_back_as_they_were(given_rows: list) -> None:
    completions = [Completion(*columns) for columns in given_rows]
    assert wire.decode_completions(wire.encode_completions(completions)) == completions


WEIGHTED = st.lists(st.tuples(INT32, st.floats(0, allow_infinity=False)), max_size=20)
"""The tokens after the first, each with its weight."""


@given(rows(INT32, WEIGHTED, st.text(st.characters(codec="utf-8"), max_size=9)), st.floats(0.01, 100))
def test_sequences_come_back_as_they_were(given_rows: list, temperature: float) -> None:
    sequences = [
        TokenSequence([first, *(token for token, _ in rest)], [0.0, *(weight for _, weight in rest)], group)
        for first, rest, group in given_rows
    ]
    request = LogprobsRequest(POLICY, sequences, temperature)
    assert wire.decode_logprobs_request(wire.encode_logprobs_request(request, epoch=1)) == (request, 1)


def test_committed_rows_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SCORES_PER_ROW", 2)
    masks = {"rollouts": [True, False, False], "batch": [True, False, True]}
    tables = [TableRows(ref(kind, f"runs/r/{kind}", POLICY), np.array(mask)) for kind, mask in masks.items()]
    request, epoch = wire.decode_rows_request(wire.encode_rows_request(RowsRequest(POLICY, tables, 0.7, 9), epoch=3))
    assert (request.policy, request.temperature, request.max_tokens, epoch) == (POLICY, 0.7, 9, 3)
    assert [part.table for part in request.tables] == [part.table for part in tables]
    assert [part.rows.tolist() for part in request.tables] == list(masks.values())
    for scores in ([], [0.1, float("-inf"), 1 / 3], [float(np.float32(0.1))] * 4):
        assert wire.decode_scores(wire.encode_scores(np.array(scores, np.float64))).tolist() == scores


def test_the_most_probable_tokens_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SCORES_PER_ROW", 4)
    tables = [TableRows(ref("batch", "runs/r/b", POLICY), np.array([True, False]))]
    sent = TopRowsRequest(POLICY, tables, 0.7, 9, top=3)
    request, epoch = wire.decode_top_request(wire.encode_rows_request(sent, epoch=3))
    assert (request.policy, request.temperature, request.max_tokens, request.top, epoch) == (POLICY, 0.7, 9, 3, 3)
    ids = np.array([[5, 0, 7], [2, 9, 1]], np.int32)
    logprobs = np.array([[-0.1, -1 / 3, float("-inf")], [-1.0, -2.0, -3.0]])
    top = wire.decode_top_logprobs(wire.encode_top_logprobs(TopLogprobs(ids, logprobs)), 3)
    assert (top.token_ids_TK.tolist(), top.logprobs_TK.tolist()) == (ids.tolist(), logprobs.tolist())
    nothing = TopLogprobs(ids[:0], logprobs[:0])
    assert wire.decode_top_logprobs(wire.encode_top_logprobs(nothing), 3).token_ids_TK.shape == (0, 3)


def test_the_most_probable_tokens_of_another_number_are_refused() -> None:
    logprobs_TK = np.zeros((2, 3))
    for ids_TK in (np.zeros((2, 2), np.int32), np.array([[1, 2, 3], [4, 5, -6]], np.int32)):
        with pytest.raises(BadSpec, match="3 tokens per position"):
            wire.decode_top_logprobs(wire.encode_top_logprobs(TopLogprobs(ids_TK, logprobs_TK)), 3)
    with pytest.raises(BadSpec, match="a multiple of 4"):
        good = TopLogprobs(np.zeros((2, 3), np.int32), logprobs_TK)
        wire.decode_top_logprobs(wire.encode_top_logprobs(good), 4)
    for top in (0, 1025):
        with pytest.raises(BadSpec, match="give 1 to 1024"):
            TopRowsRequest(POLICY, [], top=top)
    with pytest.raises(BadSpec, match="has no top"):
        wire.decode_top_request(wire.encode_rows_request(RowsRequest(POLICY, []), epoch=0))


@pytest.mark.parametrize(("change", "message"), [({"kind": "graded"}, "'graded'"), ({"key": "../x"}, "x")])
def test_tables_that_are_no_rows_of_a_step_are_refused(change: dict, message: str) -> None:
    part = TableRows(ref("batch", "runs/r/b", POLICY), np.array([True]))
    object.__setattr__(part, "table", part.table.model_copy(update=change))
    with pytest.raises(BadSpec, match=message):
        wire.decode_rows_request(wire.encode_rows_request(RowsRequest(POLICY, [part]), epoch=0))


IMAGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.binary(min_size=1, max_size=9)), max_size=3)


def placed(gaps: list[tuple[int, int, bytes]]) -> tuple[Images, int]:
    """Images with these gaps before them, and the tokens that they all need."""
    images, end = [], 0
    for gap, tokens, data in gaps:
        images.append(PlacedImage(end + gap, tokens, data))
        end += gap + tokens
    return tuple(images), end


@settings(deadline=None)  # a busy machine is no defect
@given(st.lists(IMAGES, max_size=6))
def test_images_come_back_as_they_were(given_rows: list) -> None:
    images = [placed(gaps) for gaps in given_rows]
    sequences = [TokenSequence([7] * (n + 1), [0.0] * (n + 1), "g", own) for own, n in images]
    request = LogprobsRequest(POLICY, sequences)
    assert wire.decode_logprobs_request(wire.encode_logprobs_request(request, epoch=1)) == (request, 1)
    with_images = GenerateRequest(
        POLICY,
        [s.token_ids.tolist() for s in sequences],
        list(range(len(sequences))),
        images=images_or_none(request.images),
    )
    assert wire.decode_generate(wire.encode_generate(with_images, epoch=1)) == (with_images, 1)


@pytest.mark.parametrize(
    ("starts", "tokens", "data", "message"),
    [
        ([[1]], [[2]], [[b"a", b"b"]], "1, 1, 2 starts"),
        ([[2]], [[2]], [[b"a"]], "sample of 3 tokens"),
        ([[0, 1]], [[2, 1]], [[b"a", b"b"]], "the one before it ends at 2"),
        ([[0]], [[0]], [[b"a"]], "stands at tokens"),
    ],
)
def test_images_out_of_place_are_refused(starts: list, tokens: list, data: list, message: str) -> None:
    valid = wire.encode_generate(
        GenerateRequest(POLICY, [[1, 2, 3]], [0], images=[(PlacedImage(0, 1, b"a"),)]), epoch=0
    )
    schema = pa.ipc.open_stream(valid).schema
    columns = {"prompt": [[1, 2, 3]], "seed": [0], "image_start": starts, "image_tokens": tokens, "image_data": data}
    with pytest.raises(BadSpec, match=message):
        wire.decode_generate(stream(schema, pa.RecordBatch.from_pydict(columns, schema)))


def test_an_image_of_too_many_bytes_is_refused() -> None:
    images = [(PlacedImage(0, 1, bytes(MAX_IMAGE_BYTES + 1)),)]
    request = unchecked(
        GenerateRequest, policy=POLICY, prompts=[[1]], seeds=[0], sampling=SamplingParams(), images=images
    )
    body = wire.encode_generate(request, epoch=0)
    with pytest.raises(BadSpec, match="image 0 of a sample has 33554433 bytes, at most 33554432 are taken"):
        wire.decode_generate(body)


@given(st.lists(st.lists(st.floats(width=64), max_size=20), max_size=12))
def test_numbers_come_back_to_the_bit(values: list[list[float]]) -> None:
    for back in (
        wire.decode_logprobs(wire.encode_logprobs(values)),
        wire.decode_values(wire.encode_values(values)),
    ):
        bits = [[struct.pack("<d", v) for v in row] for row in back]
        assert bits == [[struct.pack("<d", v) for v in row] for row in values]  # NaN and -0.0 too


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[1], [2**31]], [1, 2], "prompt 1 has token ids outside"),
        ([[-(2**31) - 1]], [1], "prompt 0 has token ids outside"),
        ([[1.5]], [1], "prompt 0 has token ids outside"),
        ([["a"]], [1], "prompt 0 has token ids outside"),
        ([[None]], [1], "prompt 0 has token ids outside"),
        ([[1]], [2**63], "give a signed integer of 64 bits"),
        ([[1]], [1, 2], "1 prompts.*2 seeds"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_sent(prompts: list, seeds: list, message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        wire.encode_generate(GenerateRequest(POLICY, prompts, seeds), epoch=0)


VALID = wire.encode_generate(GenerateRequest(POLICY, [[1, 2, 3], [4]] * 20, list(range(40))), epoch=0)


@settings(max_examples=150)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_a_request(data: st.DataObject) -> None:
    damaged = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        request, _ = wire.decode_generate(bytes(damaged[:cut] if data.draw(st.booleans()) else damaged))
    except BadSpec:
        return
    assert all(isinstance(i, int) for prompt in request.prompts for i in prompt)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadSpec):
        wire.decode_generate(data)


def stream(schema: pa.Schema, *batches: pa.RecordBatch, compression: str | None = "zstd") -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_head(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({b"ostinato": wire.GenerateMetadata(policy=POLICY).model_dump_json().encode()})


def test_a_small_body_that_decodes_to_a_huge_one_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = GenerateRequest(POLICY, [[0] * (1 << 20)], [1])
    bomb = wire.encode_generate(request, epoch=0)
    assert len(bomb) < 4096
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 40 << 20)  # 44 MiB: 1 Mi ids of 4 bytes, list entries and objects
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(BodyTooLarge, match="decodes to over .* 40 MiB"):
        wire.decode_generate(bomb)
    assert pa.default_memory_pool().max_memory() == before  # 4 MiB were never allocated
    with pytest.raises(BodyTooLarge, match="decodes to 44 MiB"):
        wire.encode_generate(request, epoch=0)


def test_the_announced_size_is_what_the_lists_weigh() -> None:
    """By hand: each id has 4 bytes in the buffer, 8 in the list, and an int object of 32 bytes when it is over 256."""
    body = wire.encode_generate(GenerateRequest(POLICY, [[1000] * 100_000], [1]), epoch=0)
    announced = wire.summarize_generate(body)
    assert announced.policy == POLICY
    tracemalloc.start()
    try:
        request, _ = wire.decode_generate(body)
        weight, _ = tracemalloc.get_traced_memory()  # of Python's objects, which Arrow's buffers are not
    finally:
        tracemalloc.stop()
    assert request.prompts == [[1000] * 100_000]
    assert weight <= announced.decoded_bytes - 400_000
    assert announced.decoded_bytes < 1.1 * (weight + 400_000)


def test_a_sequence_longer_than_the_context_is_refused_before_lists_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1] * 10, [2] * 100_000]
    body = wire.encode_generate(GenerateRequest(POLICY, prompts, [1, 2]), epoch=0)
    assert wire.decode_generate(body, context=100_000)[0].prompts == prompts
    tracemalloc.start()
    try:
        with pytest.raises(SampleTooLong, match="100000 tokens exceeds the model's context, 99999 tokens"):
            wire.decode_generate(body, context=99_999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400_000
    monkeypatch.setattr(wire, "MAX_SEQUENCE_TOKENS", 99_998)
    with pytest.raises(SampleTooLong, match="exceeds what one sequence may have, 99998 tokens"):
        wire.decode_generate(body)
    sequences = [TokenSequence([1, 2, 3], [0.0, 1.0, 1.0])]
    scored = wire.encode_logprobs_request(LogprobsRequest(POLICY, sequences), epoch=0)
    assert wire.decode_logprobs_request(scored, context=3)[0].sequences == sequences
    with pytest.raises(SampleTooLong):
        wire.decode_logprobs_request(scored, context=2)


def test_streams_of_other_messages_are_refused() -> None:
    schema, batch = messages(VALID)
    for body, name in (
        (batch + END, "record batch"),
        (schema + schema + END, "schema"),
        (END, "it is empty"),
        (schema, "end-of-stream"),
        (VALID + b"more", "end-of-stream"),
    ):
        with pytest.raises(BadSpec, match=name):
            wire.decode_generate(body)


def test_a_message_that_is_not_aligned_is_refused() -> None:
    """Arrow would read its numbers at odd addresses."""
    schema = with_head(wire.GENERATE)
    batch = pa.RecordBatch.from_pydict({"prompt": [[1, 2]], "seed": [5]}, schema=schema)
    first, second = messages(stream(schema, batch, compression=None))
    length = struct.unpack_from("<i", first, 4)[0]
    longer = first[:4] + struct.pack("<i", length + 3) + first[8:] + bytes(3)
    with pytest.raises(BadSpec, match="multiple of 8"):
        wire.decode_generate(longer + second + END)


def test_a_stream_of_very_many_batches_is_refused() -> None:
    schema = with_head(wire.GENERATE)
    batch = pa.RecordBatch.from_pydict({"prompt": [], "seed": []}, schema=schema)
    with pytest.raises(BodyTooLarge, match="over 1024 record batches"):
        wire.decode_generate(stream(schema, *[batch] * 1025))


def test_a_buffer_that_lies_about_its_size_is_refused() -> None:
    offset = VALID.index(struct.pack("<q", 40 * 8))  # the uncompressed size of the seeds, before their zstd frame
    for lie in (1 << 50, -2, 40 * 8 + 8, 0):
        with pytest.raises(BadSpec):
            wire.decode_generate(VALID[:offset] + struct.pack("<q", lie) + VALID[offset + 8 :])


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_stream, "MAX_ROWS", 40)
    assert len(wire.decode_generate(VALID)[0].prompts) == 40
    monkeypatch.setattr(arrow_stream, "MAX_ROWS", 39)
    with pytest.raises(BodyTooLarge, match="39 rows"):
        wire.decode_generate(VALID)


def test_uncompressed_streams_of_several_batches_are_read() -> None:
    schema = with_head(wire.GENERATE)
    batch = pa.RecordBatch.from_pydict({"prompt": [[1, 2]], "seed": [5]}, schema=schema)
    request, _ = wire.decode_generate(stream(schema, batch, batch, compression=None))
    assert (request.prompts, request.seeds) == ([[1, 2], [1, 2]], [5, 5])


def test_nulls_other_columns_and_missing_heads_are_refused() -> None:
    nullable = pa.schema([pa.field(f.name, f.type) for f in wire.GENERATE], metadata=with_head(wire.GENERATE).metadata)
    with pytest.raises(BadSpec, match="columns are"):
        wire.decode_generate(stream(nullable, pa.RecordBatch.from_pydict({"prompt": [[1]], "seed": [None]}, nullable)))
    schema = with_head(wire.GENERATE)
    inner = pa.RecordBatch.from_arrays([pa.array([[None]], pa.list_(pa.int32())), pa.array([1])], schema=schema)
    with pytest.raises(BadSpec, match="nulls"):
        wire.decode_generate(stream(schema, inner))
    with pytest.raises(BadSpec, match="ostinato"):
        wire.decode_generate(stream(wire.GENERATE))
    wrong = wire.GENERATE.with_metadata({b"ostinato": json.dumps({"policy": 1, "extra": 2}).encode()})
    with pytest.raises(BadSpec, match="policy"):
        wire.decode_generate(stream(wrong))
