"""Tests of Parquet files that are damaged, that hold odd types, or that are small and hold rows of gigabytes."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.sources import file_formats
from tasks.datasets.sources.file_formats import TableColumns, column_names, parquet_rows
from tasks.datasets.spec import FileDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


def every_column(names: set[str]) -> TableColumns:
    return TableColumns(names, set(), set())


def written(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    file = folder / "x.parquet"
    pq.write_table(pa.table(columns), file, **options)
    return file


def memory_of_rows(file: Path) -> tuple[int, BaseException | None]:
    """(most bytes that Arrow held while the rows were read, what the read raised)."""
    before, most = pa.total_allocated_bytes(), 0
    try:
        for _ in parquet_rows(file, every_column):
            most = max(most, pa.total_allocated_bytes() - before)
    except DatasetError as error:
        return max(most, pa.total_allocated_bytes() - before), error
    return most, None


@pytest.mark.parametrize("damage", ["thrift", "schema", "truncated", "page"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
    file = written(tmp_path, {"prompt": [f"{number}+1" for number in range(300)]}, compression="snappy")
    data = bytearray(file.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    match damage:
        case "thrift":
            data[footer : footer + 4] = b"\xff\xff\xff\xff"
        case "schema":
            data[footer + 6 : footer + 30] = bytes(24)
        case "truncated":
            del data[footer - 20 : footer]
        case _:
            data[4:60] = b"\xff" * 56
    file.write_bytes(data)
    with pytest.raises(DatasetError, match=r"x.parquet: .*(is damaged|not Parquet)") as refusal:
        load_dataset(open_store(tmp_path / "store"), FileDataset(path=str(file)), provenance=PROVENANCE)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([datetime.timedelta(days=1)]),
        pa.array([2**62], pa.duration("s")),
        pa.array([2**31 - 1], pa.date32()),
        pa.array([0], pa.timestamp("us", tz="Mars/Olympus")),
        pa.array([b"\xff"]),
    ],
    ids=["timedelta", "duration", "date", "zone", "bytes"],
)
def test_a_column_of_another_type_is_a_sentence(tmp_path: Path, column: pa.Array) -> None:
    for name in ("prompt", "extra"):
        columns = {"prompt": pa.array(["1+1"]), name: column}
        source = FileDataset(path=str(written(tmp_path, columns)), metadata_columns=(name,) if name == "extra" else ())
        with pytest.raises(DatasetError, match=r"x.parquet"):
            load_dataset(open_store(tmp_path / "store"), source, provenance=PROVENANCE)


def test_rows_that_repeat_one_large_value_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    value = "a" * (15 << 20)
    indices = pa.array([0] * 40, pa.int32())
    file = written(tmp_path, {"prompt": pa.DictionaryArray.from_arrays(indices, [value]).cast(pa.string())})
    assert file.stat().st_size < 2 << 20  # 600 MB of rows
    most, error = memory_of_rows(file)
    assert error is None and most < 2 * file_formats.PARQUET_BATCH_BYTES


def test_a_row_of_a_list_of_large_values_is_a_bad_row(tmp_path: Path) -> None:
    value = "a" * (8 << 20)
    turns = [{"role": "user", "content": value}] * 100
    most, error = memory_of_rows(written(tmp_path, {"messages": [turns]}))
    assert isinstance(error, BadRow) and "given a row of 838,8" in str(error) and "at most 67,108,864" in str(error)
    assert most < 100 << 20


def test_a_large_value_in_a_list_is_not_repeated_whatever_the_size_of_its_group(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a" * (70 << 20)}] * 9
    file = written(tmp_path, {"messages": [turns, [{"role": "user", "content": "1+1"}]]})
    most, error = memory_of_rows(file)
    assert isinstance(error, BadRow) and "given a row of 660,6" in str(error)
    assert most < 400 << 20


def test_rows_next_to_lists_that_repeat_a_large_value_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    indices = pa.array([0] * 40, pa.int32())
    repeated = pa.DictionaryArray.from_arrays(indices, ["a" * (15 << 20)]).cast(pa.string())
    file = written(tmp_path, {"prompt": repeated, "messages": [[{"role": "user", "content": "1+1"}]] * 40})
    most, error = memory_of_rows(file)
    assert error is None and most < 2 * file_formats.PARQUET_BATCH_BYTES


def test_large_values_within_lists_are_read_as_they_are(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": letter * 10}], "n": {"a": [letter, None]}} for letter in "abc"]
    file = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([*rows, {"messages": None, "n": None}]), file, row_group_size=2)
    assert [values for _, _, values in parquet_rows(file, every_column)] == [*rows, {"messages": None, "n": None}]


@pytest.mark.parametrize("depth", [20, 90, 250])
def test_deep_lists_are_read_or_refused(tmp_path: Path, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    file = written(tmp_path, {"prompt": pa.array(["1+1"]), "deep": pa.array([value])})
    source = FileDataset(path=str(file), metadata_columns=("deep",))
    store = open_store(tmp_path / "store")
    if depth == 20:
        assert load_dataset(store, source, provenance=PROVENANCE).rows == 1
        return
    with pytest.raises(DatasetError, match="x.parquet"):
        load_dataset(store, source, provenance=PROVENANCE)


def test_a_table_without_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({}), file)
    assert column_names(file, "parquet") == set()
    for use in ("prompt", "completion", "preference"):
        with pytest.raises(DatasetError, match="no column .*the file has none"):
            load_dataset(open_store(tmp_path / "s"), FileDataset(path=str(file)), use=use, provenance=PROVENANCE)


def test_a_group_of_rows_over_the_limit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 1000)
    path = written(tmp_path, {"prompt": ["x" * 5000]})
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_: pytest.fail("the rows were read"))
    with pytest.raises(BadRow, match="row 1: given a row group of 1 rows and .* bytes; expected rows of at most 1,000"):
        list(parquet_rows(path, every_column))


def test_a_large_column_that_is_not_chosen_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 1000)
    path = written(tmp_path, {"prompt": ["1+1"], "video": ["x" * 5000]})
    chosen = TableColumns({"prompt"}, {"prompt"}, set())
    assert list(parquet_rows(path, lambda _: chosen)) == [(1, 1, {"prompt": "1+1"})]
