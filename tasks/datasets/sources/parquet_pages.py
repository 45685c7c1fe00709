"""Reads the sizes that a Parquet file announces for its pages, before pyarrow reserves memory for them.

pyarrow reserves what the header of a page announces, up to 2 GiB, and what a dictionary needs for the number of values
it announces, before it finds out whether the page has so much. pyarrow has no limit for this, and it ends the process
when it is asked where a column of a damaged footer begins. So the footer and the headers of the pages are parsed here,
as pyarrow's C++ parses them; the pages themselves are skipped. Both are in Thrift's compact protocol.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

HEADER_BYTES = (1 << 10, 1 << 16, 16 << 20)
"""Bytes that are read for the header of a page, one after the other until it is whole. pyarrow reads 16 MiB at most."""
CHUNK_PADDING_BYTES = 100
"""Old writers counted a column up to so many bytes too short."""
MAX_DEPTH = 64
"""Deepest nesting of structs and containers, as in Thrift."""
DICTIONARY_VALUE_BYTES = 16
"""Memory of a value of a dictionary, next to the bytes of its text."""

# Thrift's types
STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(14)
FIXED_SIZES = {BYTE: 1, DOUBLE: 8, UUID: 16}

# Parquet's types of pages, and the field of a page's header that describes a page of this type
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
DESCRIPTION_FIELDS = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}


class ColumnChunk(NamedTuple):
    """Where the pages of a column in a row group are."""

    start: int
    """Offset of the first page in the file."""
    size: int
    """Bytes of all pages and their headers."""
    values: int
    """Number of values, those of lists counted one by one."""


class PageHeader(NamedTuple):
    """The header of a page."""

    kind: int
    compressed: int
    """Bytes of the page in the file."""
    uncompressed: int
    """Bytes of the page in memory."""
    values: int


class PageBytes(NamedTuple):
    """Sizes of the pages of a column in a row group."""

    at_a_time: int
    """Most that pyarrow reserves at a time: for the dictionary and the largest page."""
    stored: int
    """All pages without compression. A value, which may be repeated any number of times, has at most as many."""


class _Truncated(ValueError):
    """Raised when the data end within a Thrift struct."""


class _Thrift:
    """Parses Thrift's compact protocol. Raises ValueError for what Thrift refuses, and for a field that occurs twice.

    Numbers and the ids of fields wrap around as in Thrift's C++, which pyarrow uses.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def byte(self) -> int:
        if self.position >= len(self.data):
            raise _Truncated("the data end within a Thrift struct")
        self.position += 1
        return self.data[self.position - 1]

    def varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("a number in Thrift has more than 10 bytes")

    def integer(self, bits: int) -> int:
        """A signed number of 16, 32 or 64 bits."""
        value = self.varint() & ((1 << min(max(bits, 32), 64)) - 1)
        value = (value >> 1) ^ -(value & 1)
        return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yields (id, type) of each field of a struct. The caller reads or skips the field before the next one."""
        last, seen = 0, set()
        while (byte := self.byte()) & 0x0F != STOP:
            field = last + (byte >> 4) if byte >> 4 else self.integer(16)
            last = (field + (1 << 15)) % (1 << 16) - (1 << 15)
            if last in seen:
                raise ValueError(f"the Thrift field {last} occurs twice in a struct")
            seen.add(last)
            yield last, byte & 0x0F

    def elements(self) -> tuple[int, int]:
        """(number of elements, their type) of a list or set."""
        byte = self.byte()
        count = byte >> 4 if byte >> 4 != 15 else self.varint() & 0xFFFFFFFF
        return count, byte & 0x0F

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skips a value of this type."""
        if depth > MAX_DEPTH:
            raise ValueError(f"Thrift structs are nested more than {MAX_DEPTH} deep")
        if kind in (TRUE, FALSE):
            return  # the type of a field is its value
        if kind in (I16, I32, I64):
            self.varint()
        elif kind in FIXED_SIZES:
            self._advance(FIXED_SIZES[kind])
        elif kind == BINARY:
            self._advance(self.varint() & 0xFFFFFFFF)
        elif kind in (LIST, SET):
            count, element = self.elements()
            for _ in range(count):
                self._skip_element(element, depth + 1)
        elif kind == MAP:
            count = self.varint() & 0xFFFFFFFF
            kinds = self.byte() if count else 0
            for _ in range(count):
                self._skip_element(kinds >> 4, depth + 1)
                self._skip_element(kinds & 0x0F, depth + 1)
        elif kind == STRUCT:
            for _, field_kind in self.fields():
                self.skip(field_kind, depth + 1)
        else:
            raise ValueError(f"Thrift has no type {kind}")

    def _skip_element(self, kind: int, depth: int) -> None:
        """Skips an element of a container, in which a truth value is a byte."""
        self.skip(BYTE if kind in (TRUE, FALSE) else kind, depth)

    def _advance(self, count: int) -> None:
        self.position += count
        if self.position > len(self.data):
            raise _Truncated("the data end within a Thrift struct")

    def numbers(self, *, i32: tuple[int, ...] = (), i64: tuple[int, ...] = ()) -> dict[int, int]:
        """The numbers of a struct in the fields with these ids. As in Thrift, a field of another type is skipped."""
        found = {}
        for field, kind in self.fields():
            if field in i32 and kind == I32:
                found[field] = self.integer(32)
            elif field in i64 and kind == I64:
                found[field] = self.integer(64)
            else:
                self.skip(kind)
        return found


def row_groups(stream: BinaryIO) -> Iterator[list[ColumnChunk]]:
    """Yields the columns of each row group of a Parquet file, in the order of the leaves of its schema.

    Raises ValueError if the footer is damaged.
    """
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(end - 8, 0))
    size = struct.unpack("<I", stream.read(4).rjust(4, b"\0"))[0]
    if size + 8 > end:
        raise ValueError(f"the footer announces {size:,} bytes, and the file has {end:,}")
    stream.seek(end - 8 - size)
    thrift = _Thrift(stream.read(size))
    for field, kind in thrift.fields():
        # FileMetaData.row_groups
        if field == 4 and kind == LIST:
            for _ in range(thrift.elements()[0]):
                yield _row_group(thrift)
        else:
            thrift.skip(kind)


def _row_group(thrift: _Thrift) -> list[ColumnChunk]:
    chunks = []
    for field, kind in thrift.fields():
        # RowGroup.columns
        if field == 1 and kind == LIST:
            for _ in range(thrift.elements()[0]):
                chunks.append(_column_chunk(thrift))
        else:
            thrift.skip(kind)
    return chunks


def _column_chunk(thrift: _Thrift) -> ColumnChunk:
    numbers: dict[int, int] = {}
    for field, kind in thrift.fields():
        # ColumnChunk.meta_data: 5 is num_values, 7 total_compressed_size, 9 and 11 the offsets of the first data page
        # and of the dictionary
        if field == 3 and kind == STRUCT:
            numbers = thrift.numbers(i64=(5, 7, 9, 11))
        else:
            thrift.skip(kind)
    start, dictionary = numbers.get(9, 0), numbers.get(11, 0)
    if 0 < dictionary < start:
        start = dictionary
    return ColumnChunk(start, numbers.get(7, 0), numbers.get(5, 0))


def page_headers(stream: BinaryIO, chunk: ColumnChunk) -> Iterator[PageHeader]:
    """Yields the headers of the pages of a column that pyarrow reads: until it has as many values as the footer says.

    Raises ValueError for a header that is damaged.
    """
    if chunk.start < 0 or chunk.size < 0:
        raise ValueError(f"the footer announces a column of {chunk.size:,} bytes at byte {chunk.start:,}")
    file_end = stream.seek(0, os.SEEK_END)
    place, end = chunk.start, min(chunk.start + chunk.size + CHUNK_PADDING_BYTES, file_end)
    values = 0
    while values < chunk.values and place < end:
        header, size = _page_header(stream, place)
        if min(header.compressed, header.uncompressed, header.values) < 0:
            raise ValueError(f"the header of the page at byte {place:,} has negative sizes")
        yield header
        if header.kind in (DATA_PAGE, DATA_PAGE_V2):
            values += header.values
        place += size + header.compressed


def _page_header(stream: BinaryIO, place: int) -> tuple[PageHeader, int]:
    """(the header of the page at this place, its size in bytes)."""
    for count in HEADER_BYTES:
        stream.seek(place)
        thrift = _Thrift(stream.read(count))
        try:
            return _parsed_page_header(thrift), thrift.position
        except _Truncated:
            # the header may be longer
            if len(thrift.data) < count:
                break
        except ValueError as error:
            raise ValueError(f"the header of the page at byte {place:,} is damaged ({error})") from error
    raise ValueError(f"the header of the page at byte {place:,} has no end")


def _parsed_page_header(thrift: _Thrift) -> PageHeader:
    numbers: dict[int, int] = {}
    values: dict[int, int] = {}
    for field, kind in thrift.fields():
        # 1 is the type of the page, 2 its uncompressed size, 3 its compressed size
        if field in (1, 2, 3) and kind == I32:
            numbers[field] = thrift.integer(32)
        elif field in DESCRIPTION_FIELDS.values() and kind == STRUCT:
            values[field] = thrift.numbers(i32=(1,)).get(1, 0)
        else:
            thrift.skip(kind)
    if len(numbers) < 3:
        raise ValueError("it has no type or no size")
    return PageHeader(numbers[1], numbers[3], numbers[2], values.get(DESCRIPTION_FIELDS.get(numbers[1], 0), 0))


def page_bytes(stream: BinaryIO, chunk: ColumnChunk) -> PageBytes:
    """Sizes of the pages of a column, by their headers."""
    largest = dictionary = total = 0
    for page in page_headers(stream, chunk):
        size = page.compressed + page.uncompressed
        total += page.uncompressed
        if page.kind == DICTIONARY_PAGE:
            # the texts are copied from the page
            dictionary = max(dictionary, size + page.uncompressed + DICTIONARY_VALUE_BYTES * page.values)
        else:
            largest = max(largest, size)
    return PageBytes(largest + dictionary, total)
