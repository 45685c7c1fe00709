"""Loads a declared dataset into a committed table of threads whose version is a digest of its content.

Loading streams: one block of rows is in memory, and the digests of earlier rows spill to disk. The table becomes
visible as a whole at the end. Loading the same rows again returns the existing artifact.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import Field, ValidationError

from engine.text.threads import StringThread
from storage.errors import CorruptArtifact, InvalidKey
from storage.secrets import refuse_secrets
from storage.serialization import canonical_json, canonical_text
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import TableWriter, table_schema
from tasks.datasets import known_files
from tasks.datasets.convert import RowLocation, check_rating
from tasks.datasets.errors import BadRow, DatasetError, EmptyDataset
from tasks.datasets.gym import generate_threads
from tasks.datasets.preferences import Pair, checked_pair
from tasks.datasets.read import ReadPosition, RowsSpec, SkippedRows, files_of, read_stored
from tasks.datasets.registered import select_version
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.sources.file_formats import format_of
from tasks.datasets.sources.hub import hub_repo_of_dataset, pin_hub_dataset
from tasks.datasets.spec import (
    DatasetUse,
    FileDataset,
    HubDataset,
    InlineDataset,
    InlinePairs,
    OrderedDataset,
    PythonDataset,
    ReasoningGymDataset,
    RegisteredDataset,
)
from tasks.datasets.stored import StoredItem, stored_item
from tasks.import_paths import source_digest

Source = FileDataset | HubDataset | PythonDataset | ReasoningGymDataset | InlineDataset | InlinePairs

BLOCK_ROWS = 4096
BLOCK_CHARACTERS = 1 << 20
"""Rows and characters of conversations that are in memory at a time. A block ends with the row that reaches one."""
THREAD_COLUMNS = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Name of a table -> its columns that hold a conversation."""
ID_CHARACTERS = 32
"""Hex digits of an id: 128 bits of sha256."""


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


def load_dataset(
    store: ObjectStore,
    spec: Source | RegisteredDataset,
    *,
    kind: DatasetUse = "prompt",
    provenance: Provenance,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadedDataset:
    """Commit the threads of `spec` (for preferences, pairs of threads) under keys.dataset(name, version).

    The version is a digest of the rows in their order, of `kind`, and of the fields of the spec that select rows (not
    of the path or encoding of a file). A registered dataset is only looked up, and so is a file that was loaded before
    and has not changed. Raises DatasetError and its subclasses before anything is visible in the store, and SecretInURL
    for an address with a password.
    """
    refuse_secrets(spec.model_dump())
    data = _load(store, spec, kind, provenance, on_progress)
    if isinstance(spec, OrderedDataset):
        return data.model_copy(update={"order": spec.order, "curriculum_column": spec.curriculum_column})
    return data


def _load(
    store: ObjectStore,
    spec: Source | RegisteredDataset,
    kind: DatasetUse,
    provenance: Provenance,
    on_progress: Callable[[LoadProgress], None],
) -> LoadedDataset:
    """The dataset of the spec, in the default order."""
    if isinstance(spec, RegisteredDataset):
        version = select_version(store, spec, kind)
        return LoadedDataset(ref=version.ref, rows=version.ref.rows or 0, skipped=version.skipped)
    if isinstance(spec, HubDataset):
        return _load_hub(store, spec, kind, provenance, on_progress)
    if not isinstance(spec, FileDataset):
        return _read_and_commit(store, spec, kind, provenance, on_progress)[0]

    # Use the dataset that was made of these files before.
    fingerprint = _identify(store, spec, kind)
    known = _find_known(store, fingerprint)
    if known is not None:
        return known
    data, has_images = _read_and_commit(store, spec, kind, provenance, on_progress)
    # Record it, unless a file changed meanwhile, or the rows hold images, which may be files themselves.
    if fingerprint is not None and not has_images and _identify(store, spec, kind) == fingerprint:
        known_files.record_loaded(store, fingerprint, data.model_dump(mode="json") | {"new": False})
    return data


def _load_hub(
    store: ObjectStore,
    spec: HubDataset,
    kind: DatasetUse,
    provenance: Provenance,
    on_progress: Callable[[LoadProgress], None],
) -> LoadedDataset:
    """The dataset that was made of this commit before, also without the hub, or else one that is loaded now."""
    spec = pin_hub_dataset(spec, {})
    # the rows of a folder may change, and so may a function without a source file
    function = None if spec.row_function is None else source_digest(spec.row_function)
    fingerprint = None
    if hub_repo_of_dataset(spec) is not None and (spec.row_function is None or function is not None):
        rows = spec.model_dump(mode="json", exclude=set(OrderedDataset.model_fields))
        body = {"reader": known_files.READER_VERSION, "use": kind, "hub": rows, "function": function}
        fingerprint = hashlib.sha256(canonical_json(body)).hexdigest()
    known = _find_known(store, fingerprint)
    if known is not None:
        return known
    data, _ = _read_and_commit(store, spec, kind, provenance, on_progress)
    if fingerprint is not None:
        known_files.record_loaded(store, fingerprint, data.model_dump(mode="json") | {"new": False})
    return data


def _identify(store: ObjectStore, spec: FileDataset, kind: DatasetUse) -> str | None:
    """A digest of everything that decides the dataset: the content of the files, name, use and selection of rows."""
    files = files_of(spec)
    formats = [format_of(file, spec.format) for file in files]
    return known_files.fingerprint(store, files, formats, [dataset_name(spec), kind, selection_fields(spec)])


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
    spec: Source,
    kind: DatasetUse,
    provenance: Provenance,
    on_progress: Callable[[LoadProgress], None],
) -> tuple[LoadedDataset, bool]:
    """Read the rows of a spec and commit them as a table. Return the dataset and whether it has images."""
    # The digest begins with what selects the rows.
    skipped, position = SkippedRows(), ReadPosition()
    row_selection = selection_fields(spec)
    content = hashlib.sha256(canonical_json({"layout": 1, "kind": kind, "spec": row_selection}))
    table = "pairs" if kind == "preference" else "threads"
    items = dataset_items(spec, kind=kind, skipped=skipped, position=position)
    has_images = False
    with TableWriter(table) as writer, RepetitionCounter() as counter:
        # Write the rows block by block, and add each row to the digest.
        for block in _blocks(items):
            has_images = has_images or any(map(_has_image, block))
            rows = _table_rows(block, counter, writer.rows, table)
            content.update(_digested(rows, table))
            writer.write(rows)
            on_progress(LoadProgress(writer.rows, position.fraction))
        if writer.rows == 0:
            raise EmptyDataset(_why_empty(spec, skipped))

        # Commit the table under its digest.
        key = keys.dataset(dataset_name(spec), content.hexdigest()[:ID_CHARACTERS])
        new = find_artifact(store, key) is None
        ref = writer.commit(
            store,
            key,
            provenance=provenance,
            extra={
                "use": kind,
                "spec": row_selection,
                "source": spec.source if isinstance(spec, RowsSpec) else spec.kind,
                "skipped": skipped.count,
                "skipped_reasons": list(skipped.reasons),
            },
        )
    data = LoadedDataset(
        ref=ref, rows=writer.rows, new=new, skipped=skipped.count, skipped_reasons=tuple(skipped.reasons)
    )
    return data, has_images


def dataset_items(
    spec: Source, *, kind: DatasetUse, skipped: SkippedRows, position: ReadPosition | None = None
) -> Iterator[StoredItem]:
    """Yield the threads, or pairs of threads, of a spec, in order. Raises DatasetError if it has none of this kind."""
    if isinstance(spec, RowsSpec):
        return read_stored(spec, kind=kind, skipped=skipped, position=position)
    if isinstance(spec, InlinePairs):
        if kind != "preference":
            raise DatasetError(f"given pairs, for a dataset of {kind}s; expected {kind}s")
        return map(stored_item, _inline_pairs(spec))
    if kind == "preference":
        raise DatasetError(f"given {dataset_name(spec)!r}, which has none, for a dataset of {kind}s; expected {kind}s")
    if isinstance(spec, ReasoningGymDataset):
        if kind == "rating":
            raise DatasetError(f"given {dataset_name(spec)!r}, whose answers have no rating; expected a file")
        return map(stored_item, generate_threads(spec, kind=kind))
    return map(stored_item, _inline_threads(spec, kind))


def selection_fields(spec: Source) -> dict[str, Any]:
    """The fields of a spec that change which rows it has. A dataset stays the same if its files are moved, written as
    Parquet, or cut into parts that are read in order. Where the rows of a dataset of the hub are does not count."""
    other = {"path", "further_paths", "arguments", "format", "threads", "pairs", *OrderedDataset.model_fields}
    if isinstance(spec, HubDataset):
        other |= {"name", "split", "revision"}
    return spec.model_dump(mode="json", exclude=other)


def dataset_name(spec: Source) -> str:
    """The name of the folder of the dataset's versions: that of the first file, or of reasoning-gym's dataset."""
    if isinstance(spec, RowsSpec):
        name = Path(spec.path).stem if isinstance(spec, FileDataset) else spec.path
        if isinstance(spec, HubDataset):
            name = name.removeprefix("hf://datasets/").replace("/", "--")
        # Keep only characters that are allowed in a key of the store. A name without any gets a digest, so that two
        # files do not become one dataset.
        allowed = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100]
        return allowed or f"file-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    if isinstance(spec, ReasoningGymDataset):
        return f"reasoning_gym-{spec.name}"
    return "inline"


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


def _table_rows(items: list[StoredItem], counter: RepetitionCounter, first_index: int, table: str) -> pa.Table:
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


def _inline_threads(spec: InlineDataset, kind: DatasetUse) -> Iterator[StringThread]:
    for row, thread in enumerate(spec.threads, start=1):
        expected_end = "a user or tool turn" if kind == "prompt" else "an assistant turn"
        expected = f"{kind}s, which end with {expected_end}"
        if not thread.turns:
            raise BadRow("threads", row, None, given="an empty thread", expected=expected)
        # Prompts must not end with the assistant's turn; all other uses must.
        last_role = thread.turns[-1].role
        has_answer = last_role == "assistant"
        if has_answer != (kind != "prompt"):
            raise BadRow("threads", row, None, given=f"a thread that ends with the {last_role} turn", expected=expected)
        if kind == "rating":
            check_rating(thread.metadata, RowLocation("threads", row))
        yield thread


def _inline_pairs(spec: InlinePairs) -> Iterator[Pair]:
    for row, (chosen, rejected) in enumerate(spec.pairs, start=1):
        yield checked_pair(chosen, rejected, RowLocation("pairs", row))


def _why_empty(spec: Source, skipped: SkippedRows) -> str:
    source = spec.source if isinstance(spec, RowsSpec) else dataset_name(spec)
    if skipped.count:
        return (
            f"{source}: all {skipped.count} rows were skipped; expected at least one usable row. {skipped.reasons[0]}"
        )
    return f"{source}: given no rows; expected at least one"
