"""Names for the rows of a stored dataset in error messages. A stored row has an index from 0 and no file."""

from __future__ import annotations

from collections.abc import Callable

from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore

NameRow = Callable[[int], str]
"""Returns the name of the row with this 0-based index."""


def row_name(store: ObjectStore, dataset: ArtifactRef, index: int) -> str:
    """The name of a row, such as "row 4 of data/train.jsonl" for index 3.

    Rows are counted from 1, as in the errors of loading, over all files of the dataset. Rows that were skipped at
    loading have no index and are not counted.
    """
    manifest = read_manifest(store, dataset.key)
    # The rows of a mixture are counted within its parts, which are its parents.
    for uri in manifest.parents:
        if not uri.startswith(keys.datasets_prefix()):
            break
        part = read_manifest(store, uri.partition("#")[0]).ref
        rows = part.rows or 0
        if index < rows:
            return row_name(store, part, index)
        index -= rows
    # Generated and inline datasets have no file, and their kind as source, so the name of the dataset stands for it.
    spec = manifest.extra.get("spec")
    has_source = isinstance(spec, dict) and spec.get("kind") != manifest.extra["source"]
    source = manifest.extra["source"] if has_source else keys.dataset_of(dataset.key)[0]
    skipped = ", where skipped rows are not counted" if manifest.extra.get("skipped") else ""
    return f"row {index + 1} of {source}{skipped}"
