"""Tests of the sizes that Parquet files announce for their pages: read as pyarrow writes them, and bounded."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.sources.file_formats import PARQUET_PAGES_BYTES, TableColumns, parquet_rows
from tasks.datasets.sources.parquet_pages import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DICTIONARY_PAGE,
    ColumnChunk,
    page_headers,
    row_groups,
)
from tasks.datasets.spec import FileDataset
from tests.tasks.datasets.test_hostile_parquet import memory_of_rows, written

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
MOST_GROWTH = 100 << 20


def varint(number: int) -> bytes:
    """A signed number as Thrift's compact protocol writes it."""
    number = (number << 1) ^ (number >> 63)
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def with_page_header(file: Path, place: int, *, compressed: int | None = None, uncompressed: int | None = None) -> None:
    """Writes other sizes into the header of the page at `place`."""
    data = file.read_bytes()
    # the header begins with the fields 1 to 3: the type of the page, and its uncompressed and compressed size
    [header, *_] = page_headers(io.BytesIO(data), ColumnChunk(place, len(data), 1))
    sizes = [header.kind, header.uncompressed, header.compressed]
    old = b"".join(b"\x15" + varint(size) for size in sizes)
    assert data[place:].startswith(old)
    sizes = [header.kind, uncompressed or header.uncompressed, compressed or header.compressed]
    new = b"".join(b"\x15" + varint(size) for size in sizes)
    file.write_bytes(data[:place] + new + data[place + len(old) :])


def every_column(names: set[str]) -> TableColumns:
    return TableColumns(names, set(), set())


def refusal(file: Path, kind: Any = "prompt") -> str:
    """What the load of the file as a dataset says. It must not need much memory."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with pytest.raises(DatasetError, match="x.parquet") as error:
        load_dataset(open_store(file.parent / "store"), FileDataset(path=str(file)), use=kind, provenance=PROVENANCE)
    assert peak_memory() - before < MOST_GROWTH
    assert "\n" not in str(error.value)
    return str(error.value)


def peak_memory() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("kind", ["prompt", "completion"])
@pytest.mark.parametrize("page", ["data", "dictionary"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_that_announces_two_gigabytes_is_refused(
    tmp_path: Path, compression: str, kind: Any, page: str, version: str
) -> None:
    columns = {name: [name * 30] * 20 for name in ("prompt", "completion")[: 1 + (kind == "completion")]}
    file = written(
        tmp_path, columns, compression=compression, data_page_version=version, use_dictionary=page == "dictionary"
    )
    # the last column, because the header becomes longer
    column = pq.ParquetFile(file).metadata.row_group(0).column(len(columns) - 1)
    place = column.data_page_offset if page == "data" else column.dictionary_page_offset
    with_page_header(file, place, uncompressed=(1 << 31) - 1)
    needed = "2,147,48" if page == "data" else "4,294,96"  # the texts of a dictionary are copied
    assert f"given pages that need {needed}" in refusal(file, kind)


def test_a_page_that_announces_more_bytes_than_the_file_has_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": ["1+1"] * 20}, compression="none", use_dictionary=False)
    with_page_header(file, 4, compressed=(1 << 31) - 1)
    assert "given pages that need 2,147,48" in refusal(file)


def test_a_dictionary_that_announces_two_milliards_of_values_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": ["1+1"] * 20}, compression="none")
    data = file.read_bytes()
    [dictionary, _] = page_headers(io.BytesIO(data), next(row_groups(io.BytesIO(data)))[0])
    assert dictionary == (DICTIONARY_PAGE, 7, 7, 1)
    # the field 7 of the header is a struct whose field 1 is the number of values
    place = data.index(b"\x4c\x15" + varint(1))
    file.write_bytes(data[: place + 2] + varint((1 << 31) - 1) + data[place + 3 :])
    assert "given pages that need 34,359,738," in refusal(file)


@pytest.mark.parametrize("damage", [b"\xff" * 40, b"\x15\x00\x15\x01\x15\x01", b"\x1c" * 200, b"\x15\x00\x00"])
def test_a_header_that_is_no_thrift_is_refused(tmp_path: Path, damage: bytes) -> None:
    file = written(tmp_path, {"prompt": [f"{number}+1" for number in range(300)]}, compression="snappy")
    data = bytearray(file.read_bytes())
    data[4 : 4 + len(damage)] = damage
    file.write_bytes(data)
    assert "page" in refusal(file)


def test_a_list_of_equal_numbers_in_a_small_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    count = 20_000_000
    numbers = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int64)))
    file = written(tmp_path, {"prompt": pa.array(["1+1"]), "metadata": numbers})
    assert file.stat().st_size < 2_000
    most, error = memory_of_rows(file)
    assert isinstance(error, BadRow) and "given a row group of 1 rows and 160,000,000 bytes" in str(error)
    assert most < 1 << 20


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("seed", range(4))
def test_the_columns_and_pages_are_those_that_pyarrow_wrote(tmp_path: Path, version: str, seed: int) -> None:
    draw = random.Random(seed)
    rows = 5_000
    columns = {
        "text": [draw.choice("ab") * draw.randrange(50) for _ in range(rows)],
        "number": pa.array([draw.randrange(1 << 62) for _ in range(rows)]),
        "lists": [[{"role": "user", "content": str(row)}] * draw.randrange(4) for row in range(rows)],
        "nothing": pa.array([None] * rows, pa.string()),
        "true": [draw.random() < 0.5 for _ in range(rows)],
    }
    file = written(
        tmp_path, columns, data_page_version=version, data_page_size=draw.choice((1, 500, 1 << 20)),
        row_group_size=draw.choice((700, rows)), write_page_index=draw.random() < 0.5, use_dictionary=seed % 2 == 0,
        write_page_checksum=draw.random() < 0.5, compression=draw.choice(("none", "zstd")), write_batch_size=64,
    )  # fmt: skip
    metadata = pq.ParquetFile(file).metadata
    with file.open("rb") as stream:
        groups = list(row_groups(stream))
        assert len(groups) == metadata.num_row_groups
        for group, chunks in enumerate(groups):
            assert len(chunks) == metadata.num_columns
            for index, chunk in enumerate(chunks):
                column = metadata.row_group(group).column(index)
                start = column.dictionary_page_offset or column.data_page_offset
                assert tuple(chunk) == (start, column.total_compressed_size, column.num_values)
                pages = list(page_headers(stream, chunk))
                data_pages = [page for page in pages if page.kind in (DATA_PAGE, DATA_PAGE_V2)]
                assert sum(page.values for page in data_pages) == column.num_values
                assert len(pages) - len(data_pages) == bool(column.has_dictionary_page)
                assert sum(page.compressed for page in pages) < chunk.size
                assert sum(page.uncompressed for page in pages) < column.total_uncompressed_size


def test_large_pages_within_the_limit_are_read(tmp_path: Path) -> None:
    texts = [letter * (1 << 20) for letter in "abcdefgh" * 8]
    file = written(tmp_path, {"prompt": texts}, compression="snappy", use_dictionary=False)
    assert PARQUET_PAGES_BYTES > 64 << 20
    assert [values["prompt"] for _, _, values in parquet_rows(file, every_column)] == texts


def test_a_footer_with_two_lists_of_row_groups_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": ["1+1"]})
    data = file.read_bytes()
    size = struct.unpack_from("<I", data, len(data) - 8)[0]
    footer = data[-8 - size : -8]
    # Field 4 once more, before the end of the struct: pyarrow uses the last list.
    twice = footer[:-1] + b"\x09\x08\x0c" + footer[-1:]
    file.write_bytes(data[: -8 - size] + twice + struct.pack("<I", len(twice)) + b"PAR1")
    with pytest.raises(DatasetError, match="occurs twice|damaged|no usable row|row"):
        load_dataset(open_store(tmp_path / "store"), FileDataset(path=str(file)), provenance=PROVENANCE)
