"""The dataset of files: JSON lines, JSON, CSV and Parquet. How their rows are read is the job of file_formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from storage.store.objects import ObjectStore
from tasks.datasets import known_files
from tasks.datasets.convert import RowLocation, column_of
from tasks.datasets.load import DatasetUse, ReadPosition
from tasks.datasets.read import RowsDataset, allowed_name
from tasks.datasets.sources.file_formats import column_names, find_files, format_of, parquet_rows, text_rows


class FileDataset(RowsDataset):
    """Rows of files: JSON lines, JSON arrays, CSV or Parquet."""

    location_fields: ClassVar = frozenset({"path", "further_paths", "format"})

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """A file, or a pattern such as data/*.parquet. The files of a pattern are read in sorted order."""
    further_paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), exclude_if=lambda paths: not paths)
    """More files or patterns, read after the first one in this order."""
    format: Literal["auto", "jsonl", "parquet", "csv", "json"] = "auto"
    """Format of the files. auto: each file's suffix decides (.jsonl, .ndjson, .parquet, .pq, .csv, .json)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files and patterns, in reading order."""
        return self.path, *self.further_paths

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return ", ".join(self.paths)

    @property
    def store_name(self) -> str:
        return allowed_name(Path(self.path).stem)

    @property
    def title(self) -> str:
        """The name of the file without folder and ending or, for a pattern, of the folder. For several files it is the
        first one's, with the number of the others."""
        path = Path(self.path)
        of_folder = any(letter in path.name for letter in "*?[") and path.parent.name
        name = path.parent.name if of_folder else path.stem
        return f"{name} and {len(self.further_paths)} more" if self.further_paths else name

    def check(self, store: ObjectStore) -> None:
        self._formats(self.files())

    def files(self) -> list[Path]:
        """The files, in reading order. Raises DatasetNotFound."""
        files: list[Path] = []
        for path in self.paths:
            files.extend(find_files(path))
        return files

    def _formats(self, files: list[Path]) -> list[str]:
        return [format_of(file, self.format) for file in files]

    def fingerprint(self, store: ObjectStore, use: DatasetUse) -> str | None:
        files = self.files()
        return known_files.fingerprint(store, files, self._formats(files), [self.store_name, use, self.selection()])

    def unread_columns(self, use: DatasetUse) -> list[str]:
        """The columns of the first file that this use of the dataset does not read, sorted. Raises DatasetError."""
        file = self.files()[0]
        return sorted(column_names(file, format_of(file, self.format)) - self.columns_to_read(use))

    def raw_rows(self, use: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
        # Find all files before the first is read, so that a missing file is reported at once.
        files = self.files()
        sizes = [file.stat().st_size for file in files]
        position.total = sum(sizes)
        for file, size in zip(files, sizes, strict=True):
            name, start = str(file), position.read
            if format_of(file, self.format) == "parquet":
                for row, rows, values in parquet_rows(file, partial(self.columns_of_table, use)):
                    position.read = start + size * row // rows
                    yield RowLocation(name, row), values
            else:
                file_format = format_of(file, self.format)
                for row, size_of_row, values in text_rows(file, file_format):
                    position.read += size_of_row
                    if file_format == "csv" and use == "rating":
                        for column in {column_of("label", self), *self.metadata_columns} & set(values):
                            values[column] = _number_in(values[column])
                    yield RowLocation(name, row), values
            position.read = start + size


def _number_in(text: str | None) -> Any:
    """A number, or true or false, that a cell of CSV holds. Any other text stays as it is."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text
