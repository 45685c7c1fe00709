"""Parquet tables: schemas, determinism, streaming, random access."""

from __future__ import annotations

import errno
import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import CorruptArtifact, SchemaMismatch, StorageUnavailable
from storage.store import tables
from storage.store.artifacts import Provenance, read_bytes, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import ROW_GROUP, SCHEMAS, RowReader, TableWriter, commit_table, read_table, table_schema

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
VALUES: dict[Any, Any] = {
    pa.int64(): -3, pa.int32(): 4, pa.uint64(): 2**64 - 1, pa.string(): "ü", pa.float64(): 0.1,
    pa.bool_(): True, pa.list_(pa.int32()): [1, 2], pa.list_(pa.float32()): [0.5, -1.0], pa.list_(pa.float64()): [0.1],
    pa.list_(pa.bool_()): [False, True], pa.list_(pa.string()): ["eos", "ü"],
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def threads(count: int) -> list[dict[str, Any]]:
    return [
        {"index": i, "id": f"p{i}", "thread": f'[{"x" * (i % 50)}]', "metadata": None if i % 3 else "{}"}
        for i in range(count)
    ]


def as_table(rows: list[dict[str, Any]], kind: str = "threads") -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMAS[kind])


def commit(store: ObjectStore, rows: list[dict[str, Any]], key: str = "t") -> Any:
    return commit_table(store, key, as_table(rows), kind="threads", provenance=PROVENANCE)


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_every_kind_comes_back_as_it_was(store: ObjectStore, kind: str) -> None:
    full = {field.name: VALUES[field.type] for field in SCHEMAS[kind]}
    bare = full | {field.name: None for field in SCHEMAS[kind] if field.nullable}
    table = as_table([full, bare], kind)
    ref = commit_table(store, "t", table, kind=kind, parents=("x",), provenance=PROVENANCE, extra={"a": 1})
    assert (ref.kind, ref.rows, ref.parents) == (kind, 2, ("x",))
    assert read_table(store, ref).to_pylist() == [full, bare]
    assert read_manifest(store, "t").extra == {"a": 1}
    path = store.local_path(read_manifest(store, "t").files[0].key)
    assert pq.read_table(path).to_pylist() == [full, bare]  # any Parquet reader opens it


def test_names_have_dictionaries_and_tokens_have_none(store: ObjectStore) -> None:
    """The dictionaries of random numbers took three quarters of the time of writing a batch, and made it larger."""
    row = {name: None for name in SCHEMAS["batch"].names} | {
        "group": "a", "completion": 0, "token_ids": [1, 2], "loss_mask": [False, True], "old_logprobs": [-0.5],
    }  # fmt: skip
    commit_table(store, "t", as_table([row] * 9, "batch"), kind="batch", provenance=PROVENANCE)
    path = store.local_path(read_manifest(store, "t").files[0].key)
    group = pq.ParquetFile(path).metadata.row_group(0)
    dictionaries = set()
    for number in range(group.num_columns):
        column = group.column(number)
        if column.has_dictionary_page:
            dictionaries.add(column.path_in_schema.partition(".")[0])
    assert "group" in dictionaries
    assert not dictionaries & {"token_ids", "loss_mask", "old_logprobs", "completion"}


IMAGES = [{"start": 2, "tokens": 4, "data": b"png"}]


def test_optional_columns_are_there_where_they_are_given(store: ObjectStore) -> None:
    row = {name: None for name in SCHEMAS["batch"].names} | {
        "group": "a", "completion": 0, "token_ids": [1, 2], "loss_mask": [False, True]
    }  # fmt: skip
    with TableWriter("batch") as writer:
        writer.write([row])
        bare = writer.digest()
    with_images = pa.Table.from_pylist([row | {"images": IMAGES}, row], schema=table_schema("batch", ["images"]))
    ref = commit_table(store, "t", with_images, kind="batch", provenance=PROVENANCE)
    assert [found["images"] for found in read_table(store, ref).to_pylist()] == [IMAGES, None]
    assert read_table(store, ref, ["group", "images"]).column_names == ["group", "images"]
    text = commit_table(store, "u", as_table([row], "batch"), kind="batch", provenance=PROVENANCE)
    assert text.sha256 == bare and read_table(store, text).column_names == SCHEMAS["batch"].names
    assert read_table(store, text, ["group", "images"]).column_names == ["group"]
    elsewhere = as_table(threads(1)).append_column("images", with_images["images"][:1])
    with pytest.raises(SchemaMismatch, match="images"):
        commit_table(store, "v", elsewhere, kind="threads", provenance=PROVENANCE)


def test_the_first_rows_say_which_optional_columns_a_streamed_table_has(store: ObjectStore) -> None:
    row = {name: None for name in SCHEMAS["batch"].names} | {
        "group": "a", "completion": 0, "token_ids": [1, 2], "loss_mask": [False, True]
    }  # fmt: skip
    with TableWriter("batch") as writer:
        writer.write([])
        writer.write([row | {"images": IMAGES}])
        writer.write([row])
        ref = writer.commit(store, "t", provenance=PROVENANCE)
    assert [found["images"] for found in read_table(store, ref).to_pylist()] == [IMAGES, None]
    with TableWriter("batch") as writer:
        writer.write([row])
        with pytest.raises(SchemaMismatch, match="those before them"):
            writer.write([row | {"images": IMAGES}])


def test_some_columns(store: ObjectStore) -> None:
    ref = commit(store, threads(5))
    assert read_table(store, ref, columns=["id", "index"]).column_names == ["id", "index"]
    with pytest.raises(SchemaMismatch, match=r"t has no column .'nope'.; it has"):
        read_table(store, ref, columns=["id", "nope"])


def test_an_empty_table(store: ObjectStore) -> None:
    ref = commit(store, [])
    assert ref.rows == 0
    assert read_table(store, ref).to_pylist() == []
    assert len(RowReader(store, ref)) == 0 and RowReader(store, ref).rows([]) == []


def test_equal_tables_are_equal_bytes_however_they_were_made(store: ObjectStore) -> None:
    rows = threads(3 * ROW_GROUP + 17)
    table = as_table(rows)
    expected = commit(store, rows, "a").sha256
    chunked = pa.concat_tables([table.slice(0, 5), table.slice(5, 600), table.slice(605)])
    shuffled_columns = table.select(["thread", "metadata", "id", "index"]).replace_schema_metadata({"made": "by hand"})
    sliced = pa.concat_tables([table, table]).slice(table.num_rows)
    for number, same in enumerate((chunked, shuffled_columns, sliced)):
        ref = commit_table(store, f"b{number}", same, kind="threads", provenance=PROVENANCE)
        assert ref.sha256 == expected
    for size in (1, 7, ROW_GROUP, 1000):
        with TableWriter("threads") as writer:
            for start in range(0, len(rows), size):
                writer.write(rows[start : start + size])
            assert writer.digest() == expected
    assert commit(store, rows[:-1], "c").sha256 != expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["thread"]), "column 'thread' .string. of a threads table is missing"),
        (lambda t: t.append_column("extra", t["id"]), "column 'extra' does not belong in a threads table"),
        (lambda t: t.append_column("id", t["id"]), "column 'id' does not belong"),
        (
            lambda t: t.set_column(0, "index", t["index"].cast(pa.int32())),
            "column 'index' of a threads table is int32, expected int64",
        ),
        (
            lambda t: t.set_column(1, "id", pa.array(["a", None], pa.string())),
            "column 'id' of a threads table has nulls, expected none",
        ),
    ],
)
def test_a_table_of_another_schema_is_refused(store: ObjectStore, change: Any, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        commit_table(store, "t", change(as_table(threads(2))), kind="threads", provenance=PROVENANCE)
    assert list(store.list()) == []


def test_nulls_within_lists_are_refused(store: ObjectStore) -> None:
    row = {field.name: VALUES[field.type] for field in SCHEMAS["batch"]}
    table = as_table([row | {"token_ids": [1, None]}], "batch")
    with pytest.raises(SchemaMismatch, match="column 'token_ids' of a batch table has nulls within its lists"):
        commit_table(store, "t", table, kind="batch", provenance=PROVENANCE)


def test_an_unknown_kind(store: ObjectStore) -> None:
    with pytest.raises(SchemaMismatch, match=r"no table is called 'rollout'; there are .*'rollouts'"):
        commit_table(store, "t", as_table(threads(1)), kind="rollout", provenance=PROVENANCE)


def test_a_writer_streams_and_cleans_up(store: ObjectStore) -> None:
    rows = threads(1000)
    with TableWriter("threads") as writer:
        for start in range(0, 1000, 100):
            writer.write(rows[start : start + 100])
            assert writer._pending_rows < ROW_GROUP
        assert writer.rows == 1000
        ref = writer.commit(store, "t", parents=("x",), provenance=PROVENANCE, extra={"a": 1})
        with pytest.raises(ValueError, match="finished"):
            writer.write(rows[:1])
    assert (ref.rows, ref.parents) == (1000, ("x",))
    assert read_table(store, ref).to_pylist() == rows
    with pytest.raises(RuntimeError), TableWriter("threads") as writer:
        writer.write(rows)
        raise RuntimeError("the reader of the dataset failed")
    assert not writer.path.parent.exists()


def test_a_writer_names_the_column_of_a_bad_row() -> None:
    with TableWriter("threads") as writer:
        with pytest.raises(SchemaMismatch, match="column 'index' of a threads table, int64"):
            writer.write([threads(1)[0] | {"index": "one"}])
        with pytest.raises(SchemaMismatch, match=r"'oops'. differ"):
            writer.write([threads(1)[0] | {"oops": 1}])
        with pytest.raises(SchemaMismatch, match="'id' of a threads table has nulls"):
            writer.write([threads(1)[0] | {"id": None}])
        assert writer.rows == 0


def test_rows_by_number(store: ObjectStore) -> None:
    rows = threads(2 * ROW_GROUP + 10)
    reader = RowReader(store, commit(store, rows))
    assert len(reader) == len(rows)
    indices = random.Random(0).choices(range(len(rows)), k=300)
    assert reader.rows(indices) == [rows[i] for i in indices]
    assert reader.rows((5, 5, len(rows) - 1, 0)) == [rows[5], rows[5], rows[-1], rows[0]]
    for index in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"t has 522 rows, and none with index {index}"):
            reader.rows([index])


def test_only_the_row_groups_that_are_needed_are_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RowReader(store, commit(store, threads(20 * ROW_GROUP)))
    read: list[int] = []
    real = reader._read_group
    monkeypatch.setattr(reader, "_read_group", lambda group: (read.append(group), real(group))[1])
    reader.rows([ROW_GROUP * 7, 3, ROW_GROUP * 7 + 1, 4])
    reader.rows([5, ROW_GROUP * 8 - 1])
    assert read == [0, 7]
    reader.rows(range(0, 20 * ROW_GROUP, ROW_GROUP))
    assert len(reader._groups) == tables.CACHED_GROUPS


def test_the_values_of_one_column(store: ObjectStore) -> None:
    rows = threads(2 * ROW_GROUP + 10)
    ref = commit(store, rows)
    assert list(RowReader(store, ref).column("metadata")) == [row["metadata"] for row in rows]


def test_a_reader_in_several_threads(store: ObjectStore) -> None:
    rows = threads(12 * ROW_GROUP)
    reader = RowReader(store, commit(store, rows))

    def read(seed: int) -> bool:
        indices = random.Random(seed).sample(range(len(rows)), 40)
        return reader.rows(indices) == [rows[i] for i in indices]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(12)))


def silently_damaged(data: bytes, *, group: int, column: int) -> bytes:
    """Changes one bit of a value. Without page checksums, Parquet would read another value."""
    chunk = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(group).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    for place in range(start + 40, start + chunk.total_compressed_size):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        try:
            pq.ParquetFile(pa.BufferReader(damaged)).read_row_group(group)
        except (pa.ArrowException, OSError):
            continue
        return damaged
    raise AssertionError("every change was noticed")


def test_a_damaged_table_is_corrupt(store: ObjectStore) -> None:
    noise = random.Random(0)
    rows = [row | {"thread": noise.randbytes(40).hex()} for row in threads(4 * ROW_GROUP)]
    ref = commit(store, rows)
    key = read_manifest(store, "t").files[0].key
    data = store.get(key)
    store.put(key, silently_damaged(data, group=2, column=2))
    with pytest.raises(CorruptArtifact):
        read_table(store, ref)
    reader = RowReader(store, ref)
    assert reader.rows([0]) == rows[:1]  # the damage is in another row group
    with pytest.raises(CorruptArtifact, match="row group 2 of t is torn"):
        reader.rows([2 * ROW_GROUP])
    store.put(key, data[:-100])
    with pytest.raises(CorruptArtifact, match="does not have the"):
        RowReader(store, ref)
    store.put(key, b"x" * len(data))
    with pytest.raises(CorruptArtifact, match="no readable Parquet file"):
        RowReader(store, ref)


def test_a_failing_disk_is_not_blamed_on_the_table(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = commit(store, threads(2 * ROW_GROUP))

    class Failing(io.BytesIO):
        left = 10**9

        def read(self, size: int | None = -1, /) -> bytes:
            if self.left <= 0:
                raise OSError(errno.EIO, "injected")
            return super().read(size)

    source = Failing(read_bytes(store, ref))
    monkeypatch.setattr(store, "open", lambda key: source)
    reader = RowReader(store, ref)
    source.left = 0
    for ask in (lambda: reader.rows([0]), lambda: RowReader(store, ref)):
        with pytest.raises(StorageUnavailable, match=f"'{ref.key}' in file://.*injected"):
            ask()
