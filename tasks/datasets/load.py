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

from engine.text.threads import StringThread
from storage import keys
from storage.artifacts import ArtifactRef, Provenance, find_artifact
from storage.models import Frozen, canonical_json, digest
from storage.objects import ObjectStore
from storage.tables import TableWriter
from tasks.datasets import files, gym
from tasks.datasets.errors import BadRow, EmptyDataset
from tasks.datasets.files import SkippedRows
from tasks.datasets.seen import SeenBefore
from tasks.datasets.spec import DatasetUse, FileDataset, InlineDataset, ReasoningGymDataset

BLOCK_ROWS = 256
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
    spec: FileDataset | ReasoningGymDataset | InlineDataset,
    *,
    kind: DatasetUse = "prompt",
    provenance: Provenance,
) -> LoadedDataset:
    """Commit the threads of `spec` under keys.dataset(name, version) and return the ref.

    The version is a digest of the rows in their order, of `kind`, and of what the spec means (not of where a file
    lies or how it is encoded). Raises DatasetError and its kinds, before anything is visible in the store.
    """
    skipped = SkippedRows()
    content = hashlib.sha256(canonical_json({"layout": 1, "kind": kind, "spec": meaning(spec)}))
    with TableWriter("threads") as writer:
        for block in _blocks(_numbered(threads(spec, kind=kind, skipped=skipped))):
            for row in block:
                content.update(canonical_json([row["id"], row["thread"]]))
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
                "source": spec.path if isinstance(spec, FileDataset) else spec.kind,
                "skipped": skipped.count,
                "skipped_reasons": list(skipped.reasons),
            },
        )
        rows = writer.rows
    return LoadedDataset(ref=ref, rows=rows, new=new, skipped=skipped.count, skipped_reasons=tuple(skipped.reasons))


def threads(
    spec: FileDataset | ReasoningGymDataset | InlineDataset, *, kind: DatasetUse, skipped: SkippedRows
) -> Iterator[StringThread]:
    """The threads of any spec, in order, streamed."""
    if isinstance(spec, FileDataset):
        return files.rows(spec, kind=kind, skipped=skipped)
    if isinstance(spec, ReasoningGymDataset):
        return gym.rows(spec, kind=kind)
    return _inline(spec, kind)


def meaning(spec: FileDataset | ReasoningGymDataset | InlineDataset) -> dict[str, Any]:
    """The part of a spec that changes which rows there are. A file moved, or written as Parquet, is the same data."""
    return spec.model_dump(mode="json", exclude={"path", "format", "threads"})


def dataset_name(spec: FileDataset | ReasoningGymDataset | InlineDataset) -> str:
    """The folder of the dataset's versions: the file's name, or reasoning-gym's."""
    if isinstance(spec, FileDataset):
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(spec.path).stem).strip("-.")[:100]
        return plain or "file"
    return f"reasoning_gym-{spec.name}" if isinstance(spec, ReasoningGymDataset) else "inline"


def prompt_id(thread: StringThread) -> str:
    """What seeds are derived from: a digest of the thread and its metadata, so that the order of rows means nothing."""
    return digest(thread.to_json().encode())[:ID_CHARACTERS]


def _numbered(source: Iterator[StringThread]) -> Iterator[dict[str, Any]]:
    """Rows of the table. The n-th repetition of a row (from 1) has `#n` after its id."""
    with SeenBefore() as seen:
        for index, thread in enumerate(source):
            identity = prompt_id(thread)
            repetition = seen.count(identity)
            yield {
                "index": index,
                "id": f"{identity}#{repetition}" if repetition else identity,
                "thread": thread.to_json(),
                "metadata": canonical_json(dict(thread.metadata)).decode(),
            }


def _blocks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while block := list(islice(rows, BLOCK_ROWS)):
        yield block


def _inline(spec: InlineDataset, kind: DatasetUse) -> Iterator[StringThread]:
    for row, thread in enumerate(spec.threads, start=1):
        last = thread.turns[-1].role if thread.turns else None
        if last is None or (last == "assistant") != (kind == "completion"):
            ends = "an assistant turn" if kind == "completion" else "a user or tool turn"
            given = "an empty thread" if last is None else f"a thread that ends with the {last} turn"
            raise BadRow("threads", row, None, given=given, expected=f"{kind}s, which end with {ends}")
        yield thread


def _why_empty(spec: FileDataset | ReasoningGymDataset | InlineDataset, skipped: SkippedRows) -> str:
    where = spec.path if isinstance(spec, FileDataset) else dataset_name(spec)
    if skipped.count:
        return f"{where}: all {skipped.count} rows were skipped; expected at least one usable. {skipped.reasons[0]}"
    return f"{where}: given no rows; expected at least one"
