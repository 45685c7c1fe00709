"""A declared dataset becomes a committed table of threads whose version names its content.

Loading streams: one block of rows is in memory, and what identifies earlier rows spills to disk. The table becomes
visible only as a whole, at the end; loading the same rows again returns the artifact that is there.
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
from tasks.datasets import gym, read
from tasks.datasets.convert import RowLocation, check_rating
from tasks.datasets.errors import BadRow, DatasetError, EmptyDataset
from tasks.datasets.preferences import Pair, checked_pair
from tasks.datasets.read import SkippedRows
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
THREADS_OF = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Table -> its columns that hold a conversation."""
ID_CHARACTERS = 32
"""128 bits of sha256."""


class LoadedDataset(Frozen):
    """A dataset in the store. `skipped_reasons` holds the first few of the `skipped`."""

    ref: ArtifactRef
    rows: int
    new: bool = False
    """Whether the store did not have this version before."""
    skipped: int = 0
    skipped_reasons: tuple[str, ...] = ()


def load_dataset(
    store: ObjectStore,
    spec: Source,
    *,
    kind: DatasetUse = "prompt",
    provenance: Provenance,
) -> LoadedDataset:
    """Commit the threads of `spec` under keys.dataset(name, version) and return the ref (preferences: pairs).

    The version is a digest of the rows in their order, of `kind`, and of what the spec means (not of where a file
    lies or how it is encoded). Raises DatasetError and its kinds, before anything is visible in the store.
    """
    skipped = SkippedRows()
    content = hashlib.sha256(canonical_json({"layout": 1, "kind": kind, "spec": meaning(spec)}))
    table = "pairs" if kind == "preference" else "threads"
    with TableWriter(table) as writer:
        for block in _blocks(_numbered(items(spec, kind=kind, skipped=skipped))):
            for row in block:
                content.update(canonical_json([row["id"], *(row[name] for name in THREADS_OF[table])]))
            writer.write(block)
        if writer.rows == 0:
            raise EmptyDataset(_why_empty(spec, skipped))
        key = keys.dataset(dataset_name(spec), content.hexdigest()[:ID_CHARACTERS])
        new = find_artifact(store, key) is None
        ref = writer.commit(
            store,
            key,
            provenance=provenance,
            extra={
                "use": kind,
                "spec": meaning(spec),
                "source": spec.source if isinstance(spec, FileDataset | PythonDataset) else spec.kind,
                "skipped": skipped.count,
                "skipped_reasons": list(skipped.reasons),
            },
        )
        rows = writer.rows
    return LoadedDataset(ref=ref, rows=rows, new=new, skipped=skipped.count, skipped_reasons=tuple(skipped.reasons))


def items(spec: Source, *, kind: DatasetUse, skipped: SkippedRows) -> Iterator[StringThread | Pair]:
    """The threads, or pairs of them, of any spec, in order, streamed. Raises DatasetError where there are none."""
    if isinstance(spec, FileDataset | PythonDataset):
        if kind == "preference":
            return read.pairs(spec, skipped=skipped)
        return read.rows(spec, kind=kind, skipped=skipped)
    if isinstance(spec, InlinePairs) != (kind == "preference"):
        given = "pairs" if isinstance(spec, InlinePairs) else f"{dataset_name(spec)!r}, which has none"
        raise DatasetError(f"given {given}, for a dataset of {kind}s; expected {kind}s")
    if isinstance(spec, InlinePairs):
        return _inline_pairs(spec)
    if isinstance(spec, ReasoningGymDataset):
        if kind == "rating":
            raise DatasetError(f"given {dataset_name(spec)!r}, whose answers have no rating; expected a file")
        return gym.rows(spec, kind=kind)
    return _inline(spec, kind)


def meaning(spec: Source) -> dict[str, Any]:
    """The part of a spec that changes which rows there are. Files that are moved,
    written as Parquet, or cut into parts that are read in order, are the same data."""
    return spec.model_dump(mode="json", exclude={"path", "further_paths", "arguments", "format", "threads", "pairs"})


def dataset_name(spec: Source) -> str:
    """The folder of the dataset's versions: the (first) file's name, or reasoning-gym's."""
    if isinstance(spec, FileDataset | PythonDataset):
        name = Path(spec.path).stem if isinstance(spec, FileDataset) else spec.path
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100] or "file"
    return f"reasoning_gym-{spec.name}" if isinstance(spec, ReasoningGymDataset) else "inline"


def prompt_id(thread: StringThread) -> str:
    """What seeds are derived from: a digest of the thread and its metadata, so that the order of rows means nothing."""
    return digest(thread.to_json().encode())[:ID_CHARACTERS]


def _identity(item: StringThread | Pair) -> tuple[str, dict[str, str]]:
    """What names an item, and its columns, which hold the images themselves. Raises UnsupportedFragment for one that
    would have to be fetched, ThreadError for one that cannot be read."""
    if isinstance(item, StringThread):
        whole = embed_images(item)
        return prompt_id(whole), {"thread": whole.to_json()}
    columns = {
        "chosen": embed_images(item.chosen).to_json(),
        "rejected": embed_images(item.rejected).to_json(),
    }
    return digest(canonical_json(list(columns.values())))[:ID_CHARACTERS], columns


def _numbered(source: Iterator[StringThread | Pair]) -> Iterator[dict[str, Any]]:
    """Rows of the table. The n-th repetition of a row (from 1) has `#n` after its id."""
    with RepetitionCounter() as seen:
        for index, item in enumerate(source):
            identity, columns = _identity(item)
            repetition = seen.count(identity)
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


def _inline(spec: InlineDataset, kind: DatasetUse) -> Iterator[StringThread]:
    for row, thread in enumerate(spec.threads, start=1):
        last = thread.turns[-1].role if thread.turns else None
        if last is None or (last == "assistant") != (kind != "prompt"):
            ends = "a user or tool turn" if kind == "prompt" else "an assistant turn"
            given = "an empty thread" if last is None else f"a thread that ends with the {last} turn"
            raise BadRow("threads", row, None, given=given, expected=f"{kind}s, which end with {ends}")
        if kind == "rating":
            check_rating(thread, RowLocation("threads", row))
        yield thread


def _inline_pairs(spec: InlinePairs) -> Iterator[Pair]:
    for row, (chosen, rejected) in enumerate(spec.pairs, start=1):
        yield checked_pair(chosen, rejected, RowLocation("pairs", row))


def _why_empty(spec: Source, skipped: SkippedRows) -> str:
    where = spec.source if isinstance(spec, FileDataset | PythonDataset) else dataset_name(spec)
    if skipped.count:
        return f"{where}: all {skipped.count} rows were skipped; expected at least one usable. {skipped.reasons[0]}"
    return f"{where}: given no rows; expected at least one"
