"""The dataset of the store that a config names by its key.

Completions and preferences can be used as prompts: their prompts are a table of their own, whose version is a digest of
the version that they are made of.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import field_validator

from storage.errors import CorruptArtifact
from storage.registry.datasets import DatasetVersion, list_datasets
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, find_artifact
from storage.store.objects import ObjectStore, read_json
from storage.store.tables import RowReader, TableWriter
from tasks.datasets.errors import DatasetError, DatasetNotFound
from tasks.datasets.load import (
    ID_CHARACTERS,
    THREAD_COLUMNS,
    DatasetUse,
    DeclaredDataset,
    LoadedDataset,
    OnProgress,
    OrderedDataset,
    table_rows,
)
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.stored import prompt_item

_DATASET_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}(@[0-9a-f]{1,64})?", re.ASCII)
SHOWN_VERSION = 8
"""Characters of a version in an error message."""
MOST_SHOWN = 5
"""Number of names or versions that an error message lists."""
WITH_PROMPTS = ("completion", "preference")
"""Uses of datasets whose prompts can be used without their answers."""


class RegisteredDataset(OrderedDataset, DeclaredDataset):
    """A dataset of the store, as `ostinato data ls` lists them."""

    kind: Literal["registered"] = "registered"
    key: str
    """`name@version` of a dataset of the store; the first characters of the version are enough. `name` alone is its
    newest version. A run keeps the version that it began with."""

    @field_validator("key")
    @classmethod
    def _is_a_key(cls, key: str) -> str:
        if not _DATASET_KEY.fullmatch(key):
            raise ValueError(
                f"given {key!r:.200}; expected the name of a dataset, or name@version, as ostinato data ls lists them"
            )
        return key

    @property
    def name(self) -> str:
        return self.key.partition("@")[0]

    @property
    def version(self) -> str:
        """The version or its first characters. Empty: the newest one."""
        return self.key.partition("@")[2]

    @property
    def title(self) -> str:
        return keys.short_key(self.key)

    def check(self, store: ObjectStore) -> None:
        _matching(store, self)

    def resolved(
        self, store: ObjectStore, use: DatasetUse, *, run: str | None = None, commits: Mapping[str, str] | None = None
    ) -> Self:
        recorded = None if run is None else _recorded_key(store, run, self, use)
        return self.model_copy(update={"key": recorded or select_version(store, self, use).key})

    def record_version(self, store: ObjectStore, run: str, use: DatasetUse, data: LoadedDataset) -> None:
        name, version = keys.dataset_of(data.ref.key)
        if self.version != version:
            key = keys.pinned_dataset(run, self.name, self.version, use)
            store.put_if_absent(key, canonical_json({"dataset": f"{name}@{version}"}))

    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        version = select_version(store, self, use)
        if version.use in (use, None):
            return LoadedDataset(ref=version.ref, rows=version.ref.rows or 0, skipped=version.skipped)
        name = f"{version.name[:100]}-prompts"
        key = keys.dataset(name, digest({"layout": 1, "kind": use, "of": version.ref.sha256})[:ID_CHARACTERS])
        known = find_artifact(store, key)
        ref = known or _commit_prompts(store, key, version, provenance)
        return LoadedDataset(ref=ref, rows=ref.rows or 0, new=known is None, skipped=version.skipped)


def select_version(store: ObjectStore, source: RegisteredDataset, use: DatasetUse) -> DatasetVersion:
    """Return the version that the key names: for a name alone, the newest one of this use. For prompts, if there is
    none: the newest one of completions or preferences.

    Raises as `DeclaredDataset.resolved`."""
    matching = _matching(store, source)
    of_use = [version for version in matching if version.use in (use, None)]
    if use == "prompt" and not of_use:
        of_use = [version for version in matching if version.use in WITH_PROMPTS]
    if not of_use:
        raise DatasetError(
            f"dataset {source.key!r} is used for {use}s, but the store has it for other uses: {_shown(matching)}. Add "
            f"it for this use: ostinato data add FILE --use {use}"
        )
    if source.version and len(of_use) > 1:
        raise DatasetError(
            f"dataset {source.key!r} names {len(of_use)} versions: {_shown(of_use, len(source.version))}; give more of "
            "its characters"
        )
    return of_use[-1]


def _commit_prompts(store: ObjectStore, key: str, version: DatasetVersion, provenance: Provenance) -> ArtifactRef:
    """Write the prompts of completions or pairs into a table, one block in memory at a time. Raises DatasetError for a
    row without a prompt."""
    columns = THREAD_COLUMNS[version.ref.kind]
    reader = RowReader(store, version.ref)
    try:
        with TableWriter("threads") as writer, RepetitionCounter() as counter:
            for block in reader.blocks():
                items = []
                conversations = zip(*(block.column(name).to_pylist() for name in columns), strict=True)
                for row, metadata in zip(conversations, block.column("metadata").to_pylist(), strict=True):
                    try:
                        items.append(prompt_item(row, metadata))
                    except ValueError as error:
                        number = writer.rows + len(items) + 1
                        raise DatasetError(f"row {number} of {version.key} has no prompt: {error}") from error
                writer.write(table_rows(items, counter, writer.rows, "threads"))
            extra = {"use": "prompt", "source": version.source, "skipped": version.skipped}
            return writer.commit(store, key, parents=[version.ref], provenance=provenance, extra=extra)
    finally:
        reader.close()


def _matching(store: ObjectStore, source: RegisteredDataset) -> list[DatasetVersion]:
    """The versions that the key may name, oldest first. Raises DatasetNotFound if there is none."""
    versions = list_datasets(store, source.name)
    if not versions:
        raise _unknown_name_error(store, source.name)
    matching = [version for version in versions if version.version.startswith(source.version)]
    if not matching:
        raise DatasetNotFound(
            f"dataset {source.name!r} has no version {source.version!r} in {store.url}; it has {_shown(versions)}"
        )
    return matching


def _recorded_key(store: ObjectStore, run: str, source: RegisteredDataset, use: DatasetUse) -> str | None:
    """The key of the version that the run has recorded, or None."""
    key = keys.pinned_dataset(run, source.name, source.version, use)
    body = read_json(store, key)
    if body is None:
        return None
    try:
        return RegisteredDataset(key=body["dataset"]).key
    except (KeyError, ValueError) as error:
        raise CorruptArtifact(f"{key} does not name a dataset: {error}") from error


def _unknown_name_error(store: ObjectStore, name: str) -> DatasetNotFound:
    names = sorted({version.name for version in list_datasets(store)})
    if not names:
        return DatasetNotFound(
            f"no dataset {name!r}, nor any other, is in {store.url}; add one with: ostinato data add FILE"
        )
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return DatasetNotFound(
        f"no dataset {name!r} is in {store.url}; {hint}it has {', '.join(names[:MOST_SHOWN])}{more}. List them with "
        "ostinato data ls, add one with ostinato data add FILE"
    )


def _shown(versions: list[DatasetVersion], given_characters: int = 0) -> str:
    """The newest versions with their uses, for an error message; each with more characters than were given."""
    newest = []
    for version in reversed(versions):
        use = f"{version.use}s" if version.use else "any use"
        newest.append(f"{version.version[: given_characters + SHOWN_VERSION]} ({use})")
    more = f" and {len(newest) - MOST_SHOWN} more" if len(newest) > MOST_SHOWN else ""
    return ", ".join(newest[:MOST_SHOWN]) + more
