"""What every declared dataset can do, and loading one into a committed table whose version is a digest of its content.

A new source is a module with a subclass of `ReadDataset`, or of `RowsDataset` (tasks.datasets.read), and its place in
the union of tasks.datasets.spec. Loading streams: one block of rows is in memory, and the digests of earlier rows spill
to disk. The table becomes visible as a whole at the end. Loading the same rows again returns the existing artifact.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pyarrow as pa
from pydantic import ConfigDict, Field, ValidationError, model_validator

from storage.errors import CorruptArtifact, InvalidKey
from storage.registry.hub import HubRepo
from storage.secrets import refuse_secrets
from storage.serialization import Frozen, canonical_json, canonical_text
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import TableWriter, table_schema
from tasks.datasets import known_files
from tasks.datasets.errors import BadRow, DatasetError, EmptyDataset
from tasks.datasets.pools import PromptPools
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.stored import StoredItem

DatasetUse = Literal["prompt", "completion", "preference", "rating"]
"""prompt: the model continues the thread. completion: the thread ends with the assistant's turn that is trained.
preference: two threads with a common prompt, of which one is preferred. rating: a completion with a number, `res`, in
its metadata."""

RowOrder = Literal["shuffled", "file", "curriculum", "pools"]
"""The order of the rows in an epoch: see OrderedDataset."""

BLOCK_ROWS = 4096
BLOCK_CHARACTERS = 1 << 20
"""Rows and characters of conversations that are in memory at a time. A block ends with the row that reaches one."""
THREAD_COLUMNS = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Name of a table -> its columns that hold a conversation."""
ID_CHARACTERS = 32
"""Hex digits of an id: 128 bits of sha256."""


MAX_REASONS = 10
"""Number of skipped rows whose errors are remembered."""


def order_last(schema: dict[str, Any]) -> None:
    """Move the fields of the order to the end of a form."""
    fields = schema["properties"]
    fields.update({name: fields.pop(name) for name in OrderedDataset.model_fields})


class KeptRows(Frozen):
    """Limits of a number of the rows. Rows outside of them, and rows whose number is null, are left out."""

    column: str = Field(min_length=1)
    """Column with a number per row, such as the pass rate that ostinato data grade-difficulty adds. It must be in the
    metadata of the rows: in the object metadata, or named in metadata_columns."""
    min: float | None = None
    """Smallest value that is kept. None: no limit."""
    max: float | None = None
    """Largest value that is kept. None: no limit."""


class OrderedDataset(Frozen):
    """The settings of the order in which a run reads the rows of a dataset. They do not change which rows it has."""

    model_config = ConfigDict(json_schema_extra=order_last)

    order: RowOrder = Field("shuffled", exclude_if=lambda order: order == "shuffled")
    """Order in which training reads the rows. shuffled: at random, differently in each epoch, by the run's seed. file:
    as they are in the source. curriculum: from the smallest to the largest value of curriculum_column. pools: by the
    pass rates of the prompts in the run, where completions are graded."""
    curriculum_column: str | None = Field(None, min_length=1, exclude_if=lambda column: column is None)
    """Column with a number per row, for order=curriculum. It must be in the metadata of the rows: in the object
    metadata, or named in metadata_columns. Rows with equal numbers stay in the order of the source."""
    pools: PromptPools = Field(PromptPools(), exclude_if=lambda pools: pools == PromptPools())
    """Shares of easy, hard and unsolved prompts, for order=pools."""
    keep: KeptRows | None = Field(None, exclude_if=lambda keep: keep is None)
    """Which rows are trained on, by a number of each row. None: all. The held-out rows of a split are not affected: all
    of them are evaluated, so that runs with other limits are compared on the same rows."""

    @model_validator(mode="after")
    def _column_of_the_curriculum(self) -> Self:
        if (self.order == "curriculum") != (self.curriculum_column is not None):
            raise ValueError(
                f"given order={self.order!r} and curriculum_column={self.curriculum_column!r}; expected a "
                "curriculum_column with order='curriculum', and with no other order"
            )
        if self.order != "pools" and self.pools != PromptPools():
            problem = f"pools act only with order='pools', and that is {self.order!r}"
            raise ValueError(f"{problem}; set it, or leave pools out")
        return self

    @property
    def order_settings(self) -> dict[str, Any]:
        """These settings by name."""
        return {name: getattr(self, name) for name in OrderedDataset.model_fields}


class LoadedPart(OrderedDataset):
    """A part of a mixture. The table of the mixture holds the rows of its parts, one part after the other."""

    name: str
    """Name of the part in metrics."""
    ref: ArtifactRef
    """The part as a dataset of its own."""
    rows: int
    weight: float


class LoadedDataset(OrderedDataset):
    """A dataset in the store, and the order in which training reads it."""

    ref: ArtifactRef
    rows: int
    new: bool = False
    """Whether the store did not have this version before."""
    skipped: int = 0
    """Number of rows that were left out because they cannot be used."""
    skipped_reasons: tuple[str, ...] = ()
    """Errors of the first few skipped rows."""
    parts: tuple[LoadedPart, ...] = Field((), exclude_if=lambda parts: not parts)
    """The parts of a mixture. Empty for any other dataset."""


class LoadProgress(NamedTuple):
    """How far a load has come."""

    rows: int
    """Number of rows that are converted."""
    fraction: float | None
    """Share of the source that is read. None if its size is unknown."""


@dataclass
class SkippedRows:
    """Counts the rows that on_bad_row='skip' left out, and remembers the errors of the first ten."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: BadRow) -> None:
        self.count += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(str(error))


@dataclass
class ReadPosition:
    """How much of the files of a dataset has been read, in bytes of files, or in rows of a dataset of the hub."""

    read: int = 0
    total: int | None = None
    """None if it is unknown, as for a user's own code."""

    @property
    def fraction(self) -> float | None:
        return self.read / self.total if self.total else None


OnProgress = Callable[[LoadProgress], None]


class DeclaredDataset(Frozen):
    """What every declared dataset can do: one source, or a mixture of several."""

    imports_code: ClassVar[bool] = False
    """Whether `check` imports code, which may take seconds."""

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance. The kind, where it is no file and no code."""
        return str(type(self).model_fields["kind"].default)

    @property
    @abstractmethod
    def title(self) -> str:
        """A short name, for the names of flow runs."""

    def check(self, store: ObjectStore) -> None:
        """Raise DatasetError or another permanent error if something that the spec names is not there. No row is
        read, and the hub is not asked."""

    def hub_repo(self) -> HubRepo | None:
        """The repository of the hub that the spec names. None: it names none. Raises DatasetError, HubError."""
        return None

    def resolved(
        self, store: ObjectStore, use: DatasetUse, *, run: str | None = None, commits: Mapping[str, str] | None = None
    ) -> Self:
        """The spec with its full version if it is a registered dataset, with its commit if it is one of the hub, and
        unchanged otherwise. The parts of a mixture are resolved alike.

        With `run`, the version that the run has recorded is used, if there is one. `commits` are those that the run
        uses of the hub's branches. Raises DatasetNotFound for an unknown name or version, DatasetError for a dataset of
        another use, and HubError.
        """
        return self

    def record_version(self, store: ObjectStore, run: str, use: DatasetUse, data: LoadedDataset) -> None:
        """Record which version the run uses, if the spec does not decide it. The first record is kept."""

    @abstractmethod
    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        """Commit the rows, in the default order. Called by `load_dataset`."""


class ReadDataset(DeclaredDataset):
    """A dataset whose rows are read, and not only looked up in the store."""

    location_fields: ClassVar[frozenset[str]] = frozenset()
    """The fields that say where the rows are, and do not change which rows they are. A dataset stays the same if its
    files are moved, written as Parquet, or cut into parts that are read in order."""
    images_may_change: ClassVar[bool] = True
    """Whether equal rows may mean other images later, because they name files of this machine."""

    @property
    @abstractmethod
    def store_name(self) -> str:
        """The name of the folder of the dataset's versions in the store."""

    @abstractmethod
    def items(self, use: DatasetUse, skipped: SkippedRows, position: ReadPosition) -> Iterator[StoredItem]:
        """Yield the threads, or pairs of threads, in order. Raises DatasetError if there are none for this use."""

    def selection(self) -> dict[str, Any]:
        """The fields that change which rows the dataset has."""
        return self.model_dump(mode="json", exclude={*self.location_fields, *OrderedDataset.model_fields})

    def fingerprint(self, store: ObjectStore, use: DatasetUse) -> str | None:
        """A digest of everything that decides the rows, found without reading them. None: the rows are always read."""
        return None

    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        # Use the dataset that was made of the same rows before.
        fingerprint = self.fingerprint(store, use)
        known = _find_known(store, fingerprint)
        if known is not None:
            return known
        data, has_images = _read_and_commit(store, self, use, provenance, on_progress)
        # Record it, unless a file changed meanwhile, or the rows hold images, which may be files themselves.
        lasts = not (has_images and self.images_may_change)
        if fingerprint is not None and lasts and self.fingerprint(store, use) == fingerprint:
            known_files.record_loaded(store, fingerprint, data.model_dump(mode="json") | {"new": False})
        return data


def load_dataset(
    store: ObjectStore,
    spec: DeclaredDataset,
    *,
    use: DatasetUse = "prompt",
    provenance: Provenance,
    on_progress: OnProgress = lambda progress: None,
) -> LoadedDataset:
    """Commit the threads of `spec` (for preferences, pairs of threads) under keys.dataset(name, version).

    The version is a digest of the rows in their order, of `use`, and of the fields of the spec that select rows (not
    of the path or encoding of a file). A registered dataset is only looked up, and so are a file that was loaded before
    and has not changed, and a mixture of the same versions. Raises DatasetError and its subclasses before anything is
    visible in the store, and SecretInURL for an address with a password.
    """
    refuse_secrets(spec.model_dump())
    data = spec.load(store, use, provenance, on_progress)
    if not isinstance(spec, OrderedDataset):
        return data
    if spec.order == "pools" and use != "prompt":
        raise DatasetError(
            f"{spec.source}: order='pools' goes by the grades of completions, and nothing is sampled from rows of the "
            f"use {use!r}; use it to train on graded rollouts, or take order='curriculum'"
        )
    return data.model_copy(update=spec.order_settings)


def _find_known(store: ObjectStore, fingerprint: str | None) -> LoadedDataset | None:
    """The dataset that was made of the same files before, if the store still has it."""
    body = None if fingerprint is None else known_files.find_loaded(store, fingerprint)
    if body is None:
        return None
    try:
        data = LoadedDataset.model_validate(body)
        return data if find_artifact(store, data.ref.key) == data.ref else None
    except (ValidationError, CorruptArtifact, InvalidKey):
        return None


def _read_and_commit(
    store: ObjectStore,
    spec: ReadDataset,
    use: DatasetUse,
    provenance: Provenance,
    on_progress: OnProgress,
) -> tuple[LoadedDataset, bool]:
    """Read the rows of a spec and commit them as a table. Return the dataset and whether it has images."""
    # The digest begins with what selects the rows.
    skipped, position = SkippedRows(), ReadPosition()
    row_selection = spec.selection()
    content = hashlib.sha256(canonical_json({"layout": 1, "kind": use, "spec": row_selection}))
    table = "pairs" if use == "preference" else "threads"
    items = spec.items(use, skipped, position)
    has_images = False
    with TableWriter(table) as writer, RepetitionCounter() as counter:
        # Write the rows block by block, and add each row to the digest.
        for block in _blocks(items):
            has_images = has_images or any(map(_has_image, block))
            rows = table_rows(block, counter, writer.rows, table)
            content.update(_digested(rows, table))
            writer.write(rows)
            on_progress(LoadProgress(writer.rows, position.fraction))
        if writer.rows == 0:
            raise EmptyDataset(_why_empty(spec, skipped))

        # Commit the table under its digest.
        key = keys.dataset(spec.store_name, content.hexdigest()[:ID_CHARACTERS])
        new = find_artifact(store, key) is None
        ref = writer.commit(
            store,
            key,
            provenance=provenance,
            extra={
                "use": use,
                "spec": row_selection,
                "source": spec.source,
                "skipped": skipped.count,
                "skipped_reasons": list(skipped.reasons),
            },
        )
    data = LoadedDataset(
        ref=ref, rows=writer.rows, new=new, skipped=skipped.count, skipped_reasons=tuple(skipped.reasons)
    )
    return data, has_images


def _blocks(items: Iterator[StoredItem]) -> Iterator[list[StoredItem]]:
    """Cut the items into blocks that fit into memory."""
    block: list[StoredItem] = []
    characters = 0
    for item in items:
        block.append(item)
        characters += sum(map(len, item.conversations))
        if len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def table_rows(items: list[StoredItem], counter: RepetitionCounter, first_index: int, table: str) -> pa.Table:
    """The rows of the table. The n-th repetition of a row (from 1) has `#n` after its id."""
    # Seeds are derived from the id, so two equal rows need different ones.
    ids = [_item_id(item) for item in items]
    for place, times in enumerate(counter.add_all(ids)):
        if times:
            ids[place] += f"#{times}"
    conversations = zip(*(item.conversations for item in items), strict=True)
    columns = [range(first_index, first_index + len(items)), ids, *conversations, [item.metadata for item in items]]
    schema = table_schema(table)
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def thread_id(thread_json: str) -> str:
    """The id of a thread in a dataset's table: a digest of its canonical JSON."""
    return hashlib.sha256(thread_json.encode()).hexdigest()[:ID_CHARACTERS]


def _item_id(item: StoredItem) -> str:
    """A digest of the item with its metadata. Seeds are derived from it, so the order of the rows has no effect."""
    if len(item.conversations) == 1:
        return thread_id(item.conversations[0])
    return hashlib.sha256(canonical_json(list(item.conversations))).hexdigest()[:ID_CHARACTERS]


def _has_image(item: StoredItem) -> bool:
    # quotation marks within a text are escaped in JSON, so that no text looks like this
    return any('"kind":"image"' in conversation for conversation in item.conversations)


def _digested(rows: pa.Table, table: str) -> bytes:
    """The bytes of some rows that the version is a digest of: the canonical JSON of [id, conversation, …] of each."""
    columns = [rows.column(name).to_pylist() for name in ("id", *THREAD_COLUMNS[table])]
    return "".join(f"[{','.join(map(canonical_text, row))}]" for row in zip(*columns, strict=True)).encode()


def _why_empty(spec: ReadDataset, skipped: SkippedRows) -> str:
    source = spec.source
    if skipped.count:
        return (
            f"{source}: all {skipped.count} rows were skipped; expected at least one usable row. {skipped.reasons[0]}"
        )
    return f"{source}: given no rows; expected at least one"
