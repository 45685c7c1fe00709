"""Adds the pass rate of each prompt to a dataset as a column, for `keep` and order='curriculum'."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from storage.serialization import canonical_text, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader, TableWriter, read_column
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import ID_CHARACTERS, thread_id
from tasks.datasets.naming import row_name
from tasks.datasets.repetition_counter import RepetitionCounter


def check_new_column(store: ObjectStore, dataset: ArtifactRef, column: str) -> None:
    """Raises DatasetError if a row of the dataset has the column in its metadata already."""
    for index, metadata in enumerate(read_column(store, dataset, "metadata")):
        if column in json.loads(metadata or "{}"):
            raise DatasetError(
                f"{row_name(store, dataset, index)} has {column!r} in its metadata already, and a column is never "
                "overwritten; give another --column"
            )


def add_column(
    store: ObjectStore,
    dataset: ArtifactRef,
    column: str,
    values: Mapping[int, float | None],
    *,
    measured_in: ArtifactRef,
    provenance: Provenance,
) -> ArtifactRef:
    """Commits the rows of a dataset of prompts, with a number in their metadata, as a version of the same name.

    `values` has the number of each row, None for one without. The parents are the dataset and `measured_in`, the table
    that the numbers come from. Raises DatasetError if a row has the column already.
    """
    check_new_column(store, dataset, column)
    name = keys.dataset_of(dataset.key)[0]
    numbers = [values.get(row) for row in range(dataset.rows or 0)]
    version = digest({"layout": 1, "dataset": dataset.sha256, "column": column, "values": numbers})
    key = keys.dataset(name, version[:ID_CHARACTERS])
    known = find_artifact(store, key)
    if known is not None:
        return known
    manifest = read_manifest(store, dataset.key)
    reader = RowReader(store, dataset)
    with TableWriter("threads") as writer, RepetitionCounter() as counter:
        try:
            for block in reader.blocks():
                first = writer.rows
                writer.write(_with_numbers(block, column, numbers[first : first + len(block)], counter))
        finally:
            reader.close()
        return writer.commit(
            store,
            key,
            parents=[dataset, measured_in],
            provenance=provenance,
            extra={
                "use": manifest.extra.get("use"), "source": manifest.extra["source"], "added_column": column,
                "skipped": manifest.extra.get("skipped", 0),
            },
        )  # fmt: skip


def _with_numbers(
    block: pa.Table, column: str, numbers: Sequence[float | None], counter: RepetitionCounter
) -> pa.Table:
    """The rows with their numbers. Their ids, from which seeds are derived, are digests of the new threads."""
    rows = block.to_pylist()
    for row, number in zip(rows, numbers, strict=True):
        thread = json.loads(row["thread"])
        thread["metadata"][column] = number
        row["thread"], row["metadata"] = canonical_text(thread), canonical_text(thread["metadata"])
        row["id"] = thread_id(row["thread"])
    for row, times in zip(rows, counter.add_all([row["id"] for row in rows]), strict=True):
        row["id"] += f"#{times}" if times else ""
    return pa.Table.from_pylist(rows, schema=block.schema)
