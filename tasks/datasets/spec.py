"""The kinds of datasets that a config can declare, and mixtures of them.

A new kind of source is its module, and its place in `_Rows` or `_Any` here.

The table of a mixture holds its parts, each loaded as a dataset of its own, one after the other. A row has another id
than an equal row of an earlier part, so that the two get different random numbers. The order in which a run reads the
table is the job of `tasks.datasets.load_order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

import pyarrow as pa
from pydantic import AfterValidator, Field

from storage.serialization import Frozen, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader, TableWriter
from tasks.datasets.gym import ReasoningGymDataset
from tasks.datasets.load import (
    ID_CHARACTERS,
    DatasetUse,
    DeclaredDataset,
    LoadedDataset,
    LoadedPart,
    OnProgress,
    OrderedDataset,
    RowOrder,
    load_dataset,
)
from tasks.datasets.read import ColumnRole, RowsDataset
from tasks.datasets.registered import RegisteredDataset
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.sources.files import FileDataset
from tasks.datasets.sources.hub import HubDataset
from tasks.datasets.sources.inline import InlineDataset, InlinePairs
from tasks.datasets.sources.python import PythonDataset

__all__ = [
    "ColumnRole", "DatasetSource", "DatasetSpec", "DatasetUse", "DeclaredDataset", "FileDataset", "HeldoutRowsSource",
    "HeldoutSource", "HubDataset", "InlineDataset", "InlinePairs", "MixtureDataset", "MixturePart", "OrderedDataset",
    "PythonDataset", "ReasoningGymDataset", "RegisteredDataset", "RowOrder", "RowsDataset", "RowsSource",
    "RowsTrainingSource", "TrainingSource",
]  # fmt: skip

MIXTURE = "mixture"
"""Name of every mixture in the store. Its version is a digest of the versions of its parts."""

_Rows = FileDataset | HubDataset | PythonDataset
"""The sources of rows with columns, which can hold preferences and ratings."""
_Any = _Rows | ReasoningGymDataset | RegisteredDataset
"""All sources that a config can declare."""

DatasetSource = Annotated[_Any, Field(discriminator="kind")]
"""A dataset that a config can declare."""
RowsSource = Annotated[_Rows | RegisteredDataset, Field(discriminator="kind")]
"""A dataset of preferences or ratings that a config can declare."""


class MixturePart(Frozen):
    """A dataset of a mixture and its share."""

    dataset: DatasetSource
    """The dataset. It has its own order, and begins its next epoch when all its rows are read."""
    weight: float = Field(1.0, ge=1e-6, le=1e6, allow_inf_nan=False)
    """Weight of the dataset. Its share of the rows is its weight divided by the sum of the weights, of which six
    decimals count. The size of the dataset has no influence."""


class MixtureDataset(DeclaredDataset):
    """Several datasets, of which every batch has fixed shares."""

    kind: Literal["mixture"] = "mixture"
    parts: tuple[MixturePart, ...] = Field(min_length=2)
    """The datasets and their weights."""

    def check_batch(self, rows: int) -> None:
        """Raise ValueError if a batch of `rows` rows of the mixture is smaller than the number of its parts."""
        if rows < len(self.parts):
            raise ValueError(
                f"a batch has {rows} rows, fewer than the {len(self.parts)} datasets of the mixture, so that a batch "
                "would lack some of them; raise algorithm.samples_per_batch (divided by completions_per_sample where "
                "completions are sampled), or leave datasets out"
            )

    @property
    def title(self) -> str:
        """The first dataset's title, with the number of the others."""
        return f"{self.parts[0].dataset.title} and {len(self.parts) - 1} more"

    def check(self, store: ObjectStore) -> None:
        for part in self.parts:
            part.dataset.check(store)

    def resolved(
        self, store: ObjectStore, use: DatasetUse, *, run: str | None = None, commits: Mapping[str, str] | None = None
    ) -> Self:
        parts = []
        for part in self.parts:
            dataset = part.dataset.resolved(store, use, run=run, commits=commits)
            parts.append(part.model_copy(update={"dataset": dataset}))
        return self.model_copy(update={"parts": tuple(parts)})

    def record_version(self, store: ObjectStore, run: str, use: DatasetUse, data: LoadedDataset) -> None:
        for part, loaded in zip(self.parts, data.parts, strict=True):
            part.dataset.record_version(store, run, use, LoadedDataset(ref=loaded.ref, rows=loaded.rows))

    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        # The parts, each in its own order.
        datasets = []
        for part in self.parts:
            datasets.append(
                load_dataset(store, part.dataset, use=use, provenance=provenance, on_progress=on_progress)
            )
        parts = []
        for part, data, name in zip(self.parts, datasets, _part_names(datasets), strict=True):
            order = {"order": data.order, "curriculum_column": data.curriculum_column}
            parts.append(LoadedPart(name=name, ref=data.ref, rows=data.rows, weight=part.weight, **order))

        # Their table.
        version = digest({"layout": 1, "kind": use, "parts": [data.ref.sha256 for data in datasets]})
        key = keys.dataset(MIXTURE, version[:ID_CHARACTERS])
        known = find_artifact(store, key)
        return LoadedDataset(
            ref=known or _commit(store, key, datasets, use, provenance),
            rows=sum(data.rows for data in datasets),
            new=known is None,
            skipped=sum(data.skipped for data in datasets),
            skipped_reasons=tuple(reason for data in datasets for reason in data.skipped_reasons),
            parts=tuple(parts),
        )


DatasetSpec = Annotated[_Any | InlineDataset | InlinePairs, Field(discriminator="kind")]
TrainingSource = Annotated[_Any | MixtureDataset, Field(discriminator="kind")]
"""A dataset to train on."""
RowsTrainingSource = Annotated[_Rows | RegisteredDataset | MixtureDataset, Field(discriminator="kind")]
"""A dataset of preferences or ratings to train on."""


def _without_order(source: OrderedDataset) -> OrderedDataset:
    if source.order != "shuffled":
        raise ValueError(
            f"given order={source.order!r} for a dataset to evaluate on; leave it out: only training reads the rows in "
            "an order"
        )
    return source


HeldoutSource = Annotated[DatasetSource, AfterValidator(_without_order)]
"""A dataset to evaluate on."""
HeldoutRowsSource = Annotated[RowsSource, AfterValidator(_without_order)]
"""A dataset of preferences or ratings to evaluate on."""


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
    store: ObjectStore, key: str, datasets: list[LoadedDataset], use: DatasetUse, provenance: Provenance
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
            extra={"use": use, "source": MIXTURE, "skipped": sum(data.skipped for data in datasets)},
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
