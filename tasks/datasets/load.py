"""Loads a declared dataset into a committed table of threads whose version is a digest of its content.

Loading streams: one block of rows is in memory, and the digests of earlier rows spill to disk. The table becomes
visible as a whole at the end. Loading the same rows again returns the existing artifact.
"""

import hashlib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from engine.text.images import embed_images
from engine.text.threads import StringThread
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import TableWriter
from tasks.datasets.convert import RowLocation, check_rating
from tasks.datasets.errors import BadRow, DatasetError, EmptyDataset
from tasks.datasets.gym import generate_threads
from tasks.datasets.preferences import Pair, checked_pair
from tasks.datasets.read import SkippedRows, read_pairs, read_threads
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.spec import (
    DatasetUse,
    FileDataset,
    InlineDataset,
    InlinePairs,
    PythonDataset,
    ReasoningGymDataset,
)

Source = FileDataset | PythonDataset | ReasoningGymDataset | InlineDataset | InlinePairs

BLOCK_ROWS = 256
THREAD_COLUMNS = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Name of a table -> its columns that hold a conversation."""
ID_CHARACTERS = 32
"""Hex digits of an id: 128 bits of sha256."""


class LoadedDataset(Frozen):
    """A dataset in the store."""

    ref: ArtifactRef
    rows: int
    new: bool = False
    """Whether the store did not have this version before."""
    skipped: int = 0
    """Number of rows that were left out because they cannot be used."""
    skipped_reasons: tuple[str, ...] = ()
    """Errors of the first few skipped rows."""


def load_dataset(
    store: ObjectStore,
    spec: Source,
    *,
    kind: DatasetUse = "prompt",
    provenance: Provenance,
) -> LoadedDataset:
    """Commit the threads of `spec` (for preferences, pairs of threads) under keys.dataset(name, version).

    The version is a digest of the rows in their order, of `kind`, and of the fields of the spec that select rows (not
    of the path or encoding of a file). Raises DatasetError and its subclasses before anything is visible in the store.
    """
    # The digest begins with what selects the rows.
    skipped = SkippedRows()
    row_selection = selection_fields(spec)
    content = hashlib.sha256(canonical_json({"layout": 1, "kind": kind, "spec": row_selection}))
    table = "pairs" if kind == "preference" else "threads"
    with TableWriter(table) as writer:
        # Write the rows block by block, and add each row to the digest.
        for block in _blocks(_table_rows(dataset_items(spec, kind=kind, skipped=skipped))):
            for row in block:
                content.update(canonical_json([row["id"], *(row[name] for name in THREAD_COLUMNS[table])]))
            writer.write(block)
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
                "source": spec.source if isinstance(spec, FileDataset | PythonDataset) else spec.kind,
                "skipped": skipped.count,
                "skipped_reasons": list(skipped.reasons),
            },
        )
        rows = writer.rows
    return LoadedDataset(ref=ref, rows=rows, new=new, skipped=skipped.count, skipped_reasons=tuple(skipped.reasons))


def dataset_items(spec: Source, *, kind: DatasetUse, skipped: SkippedRows) -> Iterator[StringThread | Pair]:
    """Yield the threads, or pairs of threads, of a spec, in order. Raises DatasetError if it has none of this kind."""
    if isinstance(spec, FileDataset | PythonDataset):
        if kind == "preference":
            return read_pairs(spec, skipped=skipped)
        return read_threads(spec, kind=kind, skipped=skipped)
    if isinstance(spec, InlinePairs):
        if kind != "preference":
            raise DatasetError(f"given pairs, for a dataset of {kind}s; expected {kind}s")
        return _inline_pairs(spec)
    if kind == "preference":
        raise DatasetError(f"given {dataset_name(spec)!r}, which has none, for a dataset of {kind}s; expected {kind}s")
    if isinstance(spec, ReasoningGymDataset):
        if kind == "rating":
            raise DatasetError(f"given {dataset_name(spec)!r}, whose answers have no rating; expected a file")
        return generate_threads(spec, kind=kind)
    return _inline_threads(spec, kind)


def selection_fields(spec: Source) -> dict[str, Any]:
    """The fields of a spec that change which rows it has. A dataset stays the same if its files are moved, written as
    Parquet, or cut into parts that are read in order."""
    return spec.model_dump(mode="json", exclude={"path", "further_paths", "arguments", "format", "threads", "pairs"})


def dataset_name(spec: Source) -> str:
    """The name of the folder of the dataset's versions: that of the first file, or of reasoning-gym's dataset."""
    if isinstance(spec, FileDataset | PythonDataset):
        name = Path(spec.path).stem if isinstance(spec, FileDataset) else spec.path
        # Keep only characters that are allowed in a key of the store.
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100] or "file"
    if isinstance(spec, ReasoningGymDataset):
        return f"reasoning_gym-{spec.name}"
    return "inline"


def prompt_id(thread: StringThread) -> str:
    """A digest of the thread with its metadata. Seeds are derived from it, so the order of the rows has no effect."""
    return digest(thread.to_json().encode())[:ID_CHARACTERS]


def _identity(item: StringThread | Pair) -> tuple[str, dict[str, str]]:
    """The id of an item and its columns, with the images embedded.

    Raises UnsupportedFragment for an image that would have to be downloaded, ThreadError for one that cannot be read.
    """
    if isinstance(item, StringThread):
        thread = embed_images(item)
        return prompt_id(thread), {"thread": thread.to_json()}
    columns = {
        "chosen": embed_images(item.chosen).to_json(),
        "rejected": embed_images(item.rejected).to_json(),
    }
    return digest(canonical_json(list(columns.values())))[:ID_CHARACTERS], columns


def _table_rows(source: Iterator[StringThread | Pair]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table. The n-th repetition of a row (from 1) has `#n` after its id."""
    with RepetitionCounter() as ids:
        for index, item in enumerate(source):
            # Seeds are derived from the id, so two equal rows need different ones.
            identity, columns = _identity(item)
            repetition = ids.add(identity)
            metadata = item.metadata if isinstance(item, StringThread) else item.chosen.metadata
            yield {
                "index": index,
                "id": f"{identity}#{repetition}" if repetition else identity,
                **columns,
                "metadata": canonical_json(dict(metadata)).decode(),
            }


def _blocks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while block := list(islice(rows, BLOCK_ROWS)):
        yield block


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
            check_rating(thread, RowLocation("threads", row))
        yield thread


def _inline_pairs(spec: InlinePairs) -> Iterator[Pair]:
    for row, (chosen, rejected) in enumerate(spec.pairs, start=1):
        yield checked_pair(chosen, rejected, RowLocation("pairs", row))


def _why_empty(spec: Source, skipped: SkippedRows) -> str:
    source = spec.source if isinstance(spec, FileDataset | PythonDataset) else dataset_name(spec)
    if skipped.count:
        return (
            f"{source}: all {skipped.count} rows were skipped; expected at least one usable row. {skipped.reasons[0]}"
        )
    return f"{source}: given no rows; expected at least one"
