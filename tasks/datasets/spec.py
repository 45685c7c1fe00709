"""The kinds of datasets that a config can declare, and mixtures of them.

A new kind of source is its module, and its place in `_Rows` or `_Any` here.

The table of a mixture holds its parts, each loaded as a dataset of its own, one after the other. A row has another id
than an equal row of an earlier part, so that the two get different random numbers. The order in which a run reads the
table is the job of `tasks.datasets.load_order`.

A split (`HeldoutSplit`) makes two tables of one dataset: the rows that are held out, and the others to train on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader, TableWriter
from tasks.datasets.errors import DatasetError
from tasks.datasets.gym import ReasoningGymDataset
from tasks.datasets.load import (
    ID_CHARACTERS,
    THREAD_COLUMNS,
    DatasetUse,
    DeclaredDataset,
    KeptRows,
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
from tasks.datasets.stored import prompt_turns_of

__all__ = [
    "ColumnRole", "DatasetSource", "DatasetSpec", "DatasetUse", "DeclaredDataset", "FileDataset", "HeldoutPairs",
    "HeldoutRows", "HeldoutSource", "HeldoutSplit", "HubDataset", "InlineDataset", "InlinePairs", "KeptRows",
    "MixtureDataset", "MixturePart", "OrderedDataset", "PythonDataset", "ReasoningGymDataset", "RegisteredDataset",
    "RowOrder", "RowsDataset", "RowsSource", "RowsTrainingSource", "SplitPart", "TrainingSource",
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

    @model_validator(mode="after")
    def _has_no_pools(self) -> Self:
        if self.dataset.order == "pools":
            raise ValueError(
                "order='pools' in a mixture; a mixture has fixed shares of its datasets, so leave it out, or train on "
                "one dataset"
            )
        return self


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
            parts.append(
                LoadedPart(name=name, ref=data.ref, rows=data.rows, weight=part.weight, **data.order_settings)
            )

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


TrainingSource = Annotated[_Any | MixtureDataset, Field(discriminator="kind")]
"""A dataset to train on."""


class HeldoutSplit(Frozen):
    """Rows of the dataset to train on that are held out of the training."""

    kind: Literal["split"] = "split"
    split: float = Field(gt=0, lt=1)
    """Fraction of the rows of the dataset to train on that are held out. A digest of a row's prompt decides, so that
    the choice does not depend on the seed or the order, and rows with equal prompts are all held out or all trained
    on."""

    def part(self, source: TrainingSource, part: Literal["train", "heldout"]) -> SplitPart:
        """The rows of the source that are trained on, or those that are held out."""
        return SplitPart(dataset=source, split=self.split, part=part)


class SplitPart(DeclaredDataset):
    """The rows of a dataset that a split leaves to training, or those that it holds out.

    The table is made of the table of the whole dataset. Its version is a digest of that one's version and of the
    split, and its manifest has both."""

    dataset: TrainingSource
    split: float
    part: Literal["train", "heldout"]

    @property
    def source(self) -> str:
        return self.dataset.source

    @property
    def title(self) -> str:
        return self.dataset.title

    def check(self, store: ObjectStore) -> None:
        self.dataset.check(store)

    def resolved(
        self, store: ObjectStore, use: DatasetUse, *, run: str | None = None, commits: Mapping[str, str] | None = None
    ) -> Self:
        dataset = self.dataset.resolved(store, use, run=run, commits=commits)
        return self.model_copy(update={"dataset": dataset})

    def record_version(self, store: ObjectStore, run: str, use: DatasetUse, data: LoadedDataset) -> None:
        whole = data.ref.model_copy(update={"key": data.ref.parents[0].partition("#")[0]})
        self.dataset.record_version(store, run, use, data.model_copy(update={"ref": whole}))

    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        whole = load_dataset(store, self.dataset, use=use, provenance=provenance, on_progress=on_progress)
        split = {"split": self.split, "part": self.part}
        version = digest({"layout": 1, "kind": use, "of": whole.ref.sha256, **split})
        key = keys.dataset(f"{keys.dataset_of(whole.ref.key)[0][:100]}-{self.part}", version[:ID_CHARACTERS])
        known = find_artifact(store, key)
        ref = known or self._commit(store, key, whole, use, provenance, split)
        changes: dict[str, Any] = {"ref": ref, "rows": ref.rows or 0, "new": known is None}
        if self.part == "heldout":
            # only training reads the rows in an order, and leaves some out
            changes |= {"order": "shuffled", "curriculum_column": None, "keep": None, "parts": ()}
        elif whole.parts:
            changes["parts"] = self._train_parts(store, whole)
        return whole.model_copy(update=changes)

    def _train_parts(self, store: ObjectStore, whole: LoadedDataset) -> tuple[LoadedPart, ...]:
        """The parts of a mixture with the number of their rows that are trained on. Raises DatasetError for none."""
        held_out = _held_out_rows(store, whole.ref, self.split)
        parts, first = [], 0
        for part in whole.parts:
            rows = int((~held_out[first : first + part.rows]).sum())
            first += part.rows
            if rows == 0:
                raise DatasetError(f"{part.name}: {self._no_rows(part.rows)}")
            parts.append(part.model_copy(update={"rows": rows}))
        return tuple(parts)

    def _no_rows(self, rows: int) -> str:
        return (
            f"given {rows} rows, and a split of {self.split} would hold all of them out, since rows with the same "
            "prompt stay together; expected at least one other prompt to train on. Name a dataset of its own in "
            "data.heldout, or lower the split"
        )

    def _commit(
        self,
        store: ObjectStore,
        key: str,
        whole: LoadedDataset,
        use: DatasetUse,
        provenance: Provenance,
        split: dict[str, Any],
    ) -> ArtifactRef:
        """Write the rows of this part into a table, one block in memory at a time. Raises DatasetError if one of the
        parts has no rows."""
        held_out = _held_out_rows(store, whole.ref, self.split)
        if held_out.all():
            raise DatasetError(f"{self.dataset.source}: {self._no_rows(len(held_out))}")
        chosen = held_out if self.part == "heldout" else ~held_out
        with TableWriter(whole.ref.kind) as writer:
            start = 0
            for block in _blocks(store, whole.ref):
                rows = block.filter(pa.array(chosen[start : start + len(block)]))
                start += len(block)
                writer.write(_with_indices(rows, writer.rows))
            extra = {"use": use, "source": self.dataset.source, "skipped": whole.skipped, **split}
            return writer.commit(store, key, parents=[whole.ref], provenance=provenance, extra=extra)


@lru_cache(maxsize=4)
def _held_out_rows(store: ObjectStore, dataset: ArtifactRef, split: float) -> np.ndarray:
    """Which rows of a table are held out: bool, one per row. A row is, if its prompt's digest as a number from 0 to 1
    is below `split`. The prompt with the smallest digest always is."""
    numbers = []
    columns = THREAD_COLUMNS[dataset.kind]
    for block in _blocks(store, dataset):
        for conversations in zip(*(block.column(name).to_pylist() for name in columns), strict=True):
            numbers.append(_prompt_number(conversations))
    values = np.array(numbers, dtype=np.uint64)
    # Of a few rows, none may be below the split.
    limit = max(int(split * 2**64), int(values.min()) + 1)
    return values < np.uint64(limit)


def _prompt_number(conversations: tuple[str, ...]) -> int:
    """The digest of a row's prompt as a number of 64 bits."""
    prompt = [[turn["role"], turn["content"]] for turn in prompt_turns_of(conversations)]
    return int.from_bytes(hashlib.sha256(canonical_json(prompt)).digest()[:8], "big")


DatasetSpec = Annotated[_Any | InlineDataset | InlinePairs, Field(discriminator="kind")]
RowsTrainingSource = Annotated[_Rows | RegisteredDataset | MixtureDataset, Field(discriminator="kind")]
"""A dataset of preferences or ratings to train on."""


def _without_order(source: OrderedDataset | HeldoutSplit) -> OrderedDataset | HeldoutSplit:
    if isinstance(source, HeldoutSplit):
        return source
    if source.order != "shuffled":
        raise ValueError(
            f"given order={source.order!r} for a dataset to evaluate on; leave it out: only training reads the rows in "
            "an order"
        )
    if source.keep is not None:
        raise ValueError("given keep for a dataset to evaluate on, of which all rows are read; leave it out")
    return source


def _named_split(value: Any) -> Any:
    """`{split: 0.1}` with its kind. No other kind of dataset has a number as its split."""
    if isinstance(value, dict) and "kind" not in value and "split" in value:
        return {"kind": "split"} | value
    return value


HeldoutSource = Annotated[DatasetSource, AfterValidator(_without_order)]
"""A dataset to evaluate on."""
HeldoutRows = Annotated[
    _Any | HeldoutSplit, Field(discriminator="kind"), AfterValidator(_without_order), BeforeValidator(_named_split)
]
"""The held-out rows of a run: a dataset, or a split of the rows to train on."""
HeldoutPairs = Annotated[
    _Rows | RegisteredDataset | HeldoutSplit,
    Field(discriminator="kind"),
    AfterValidator(_without_order),
    BeforeValidator(_named_split),
]
"""The held-out preferences or ratings of a run: a dataset, or a split of the rows to train on."""


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
    block = _with_indices(block, first_index)
    return block.set_column(block.column_names.index("id"), block.schema.field("id"), pa.array(ids, type=pa.string()))


def _with_indices(block: pa.Table, first_index: int) -> pa.Table:
    """The rows, numbered from `first_index`."""
    indices = pa.array(range(first_index, first_index + len(block)), type=pa.int64())
    return block.set_column(block.column_names.index("index"), block.schema.field("index"), indices)
