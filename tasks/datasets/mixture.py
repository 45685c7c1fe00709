"""Loads a mixture: each part as a dataset of its own, and all of them as one table, one part after the other.

A row of the table has another id than an equal row of an earlier part, so that the two get different random numbers.
The order in which a run reads the table is the job of `tasks.datasets.mixture_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from storage.serialization import digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader, TableWriter
from tasks.datasets.load import ID_CHARACTERS, LoadedDataset, LoadedPart, LoadProgress, Source, load_dataset
from tasks.datasets.registered import pin_version
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.spec import DatasetUse, MixtureDataset, RegisteredDataset

NAME = "mixture"
"""Name of every mixture in the store. Its version is a digest of the versions of its parts."""


def load_training_data(
    store: ObjectStore,
    spec: Source | RegisteredDataset | MixtureDataset,
    *,
    kind: DatasetUse,
    provenance: Provenance,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadedDataset:
    """Commit a dataset or a mixture. A mixture of the same versions is only looked up. Raises as `load_dataset`."""
    if not isinstance(spec, MixtureDataset):
        return load_dataset(store, spec, kind=kind, provenance=provenance, on_progress=on_progress)
    # The parts, each in its own order.
    datasets = []
    for part in spec.parts:
        datasets.append(load_dataset(store, part.dataset, kind=kind, provenance=provenance, on_progress=on_progress))
    parts = []
    for part, data, name in zip(spec.parts, datasets, _part_names(datasets), strict=True):
        order = {"order": data.order, "curriculum_column": data.curriculum_column}
        parts.append(LoadedPart(name=name, ref=data.ref, rows=data.rows, weight=part.weight, **order))

    # Their table.
    version = digest({"layout": 1, "kind": kind, "parts": [data.ref.sha256 for data in datasets]})
    key = keys.dataset(NAME, version[:ID_CHARACTERS])
    known = find_artifact(store, key)
    return LoadedDataset(
        ref=known or _commit(store, key, datasets, kind, provenance),
        rows=sum(data.rows for data in datasets),
        new=known is None,
        skipped=sum(data.skipped for data in datasets),
        skipped_reasons=tuple(reason for data in datasets for reason in data.skipped_reasons),
        parts=tuple(parts),
    )


def pin_versions(
    store: ObjectStore, run: str, source: Source | RegisteredDataset | MixtureDataset, use: DatasetUse,
    data: LoadedDataset,
) -> None:  # fmt: skip
    """Record the versions of the registered datasets that the run uses. The first record is kept."""
    if not isinstance(source, MixtureDataset):
        pin_version(store, run, source, use, data.ref)
        return
    for part, loaded in zip(source.parts, data.parts, strict=True):
        pin_version(store, run, part.dataset, use, loaded.ref)


def _part_names(datasets: list[LoadedDataset]) -> list[str]:
    """The names of the datasets. A name that occurs again has a number."""
    names: list[str] = []
    for data in datasets:
        dataset = name = keys.dataset_of(data.ref.key)[0]
        number = 1
        while name in names:
            number += 1
            name = f"{dataset}-{number}"
        names.append(name)
    return names


def _commit(
    store: ObjectStore, key: str, datasets: list[LoadedDataset], kind: DatasetUse, provenance: Provenance
) -> ArtifactRef:
    """Write the rows of the datasets into one table, one block in memory at a time."""
    with TableWriter(datasets[0].ref.kind) as writer, RepetitionCounter() as counter:
        for data in datasets:
            for block in _blocks(store, data.ref):
                writer.write(_renumbered(block, counter, writer.rows))
        return writer.commit(
            store,
            key,
            parents=[data.ref for data in datasets],
            provenance=provenance,
            extra={"use": kind, "source": NAME, "skipped": sum(data.skipped for data in datasets)},
        )


def _blocks(store: ObjectStore, dataset: ArtifactRef) -> Iterator[pa.Table]:
    reader = RowReader(store, dataset)
    try:
        yield from reader.blocks()
    finally:
        reader.close()


def _renumbered(block: pa.Table, counter: RepetitionCounter, first_index: int) -> pa.Table:
    """The rows with their indices in the mixture, and with `#n` after an id that occurs for the n-th further time."""
    ids = [name.partition("#")[0] for name in block.column("id").to_pylist()]
    for place, times in enumerate(counter.add_all(ids)):
        if times:
            ids[place] += f"#{times}"
    indices = pa.array(range(first_index, first_index + len(ids)), type=pa.int64())
    block = block.set_column(block.column_names.index("index"), block.schema.field("index"), indices)
    return block.set_column(block.column_names.index("id"), block.schema.field("id"), pa.array(ids, type=pa.string()))
