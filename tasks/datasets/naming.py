"""How errors name a row of a dataset that is in the store already, where a row has an index from 0 and no file."""

from __future__ import annotations

from collections.abc import Callable

from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore

NameRow = Callable[[int], str]
"""0-based index of a row -> its name."""


def row_name(store: ObjectStore, dataset: ArtifactRef, index: int) -> str:
    """"row 4 of data/train.jsonl" for the row of index 3. Rows are counted from 1, as the errors of loading count them,
    over all files of the dataset. Rows that were skipped at loading have no index, and are not counted."""
    extra = read_manifest(store, dataset.key).extra
    spec = extra.get("spec")
    has_source = isinstance(spec, dict) and spec.get("kind") in ("file", "python")
    source = extra["source"] if has_source else keys.dataset_of(dataset.key)[0]
    skipped = ", where skipped rows are not counted" if extra.get("skipped") else ""
    return f"row {index + 1} of {source}{skipped}"
