"""Reads how many rows and which columns the training files of a verl config have, if they are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flows.verl.read import Verl


class TrainFile(NamedTuple):
    """What a Parquet file says about its rows."""

    rows: int
    columns: list[str]


def train_files(verl: Verl) -> list[TrainFile | None]:
    """Returns an entry for each file of data.train_files. None: it is not here, or it is not Parquet."""
    files = verl.get("data.train_files")
    return [_read(file) for file in (files if isinstance(files, list) else [files])]


def _read(file: Any) -> TrainFile | None:
    path = Path(str(file)).expanduser()
    if path.suffix != ".parquet" or not path.is_file():
        return None
    # imported here, because only configs whose files are on this machine need it
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        return TrainFile(int(metadata.num_rows), list(metadata.schema.to_arrow_schema().names))
    except (OSError, pa.ArrowException):
        # the run reports what is wrong with the file
        return None
