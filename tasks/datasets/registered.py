"""Finds datasets of the store by the key that a config gives, and records which version a run uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from storage.errors import CorruptArtifact
from storage.registry.datasets import DatasetVersion, list_datasets
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore, read_json
from tasks.datasets.errors import DatasetError, DatasetNotFound
from tasks.datasets.sources.hub import pin_hub_dataset
from tasks.datasets.spec import DatasetUse, HubDataset, MixtureDataset, RegisteredDataset

S = TypeVar("S")

SHOWN_VERSION = 8
"""Characters of a version in an error message."""
MOST_SHOWN = 5
"""Number of names or versions that an error message lists."""


def resolve_version(
    store: ObjectStore,
    source: S,
    use: DatasetUse,
    *,
    run: str | None = None,
    commits: Mapping[str, str] | None = None,
) -> S:
    """Return the source with its full version if it is a registered dataset, with its commit if it is one of the hub,
    and unchanged otherwise. The parts of a mixture are resolved alike.

    With `run`, the version that the run has recorded is used, if there is one. `commits` are those that the run uses of
    the hub's branches. Raises DatasetNotFound for an unknown name or version, DatasetError for a dataset of another
    use, and HubError.
    """
    if isinstance(source, MixtureDataset):
        parts = []
        for part in source.parts:
            dataset = resolve_version(store, part.dataset, use, run=run, commits=commits)
            parts.append(part.model_copy(update={"dataset": dataset}))
        return source.model_copy(update={"parts": tuple(parts)})
    if isinstance(source, HubDataset):
        return pin_hub_dataset(source, commits or {})
    if not isinstance(source, RegisteredDataset):
        return source
    recorded = None if run is None else _pinned_key(store, run, source, use)
    return source.model_copy(update={"key": recorded or select_version(store, source, use).key})


def pin_version(store: ObjectStore, run: str, source: object, use: DatasetUse, ref: ArtifactRef) -> None:
    """Record that the run uses the dataset `ref` where its config gives `source`. The first record is kept."""
    if not isinstance(source, RegisteredDataset):
        return
    name, version = keys.dataset_of(ref.key)
    if source.version != version:
        key = keys.pinned_dataset(run, source.name, source.version, use)
        store.put_if_absent(key, canonical_json({"dataset": f"{name}@{version}"}))


def check_dataset_exists(store: ObjectStore, source: RegisteredDataset) -> None:
    """Raise DatasetNotFound for an unknown name or version."""
    _matching(store, source)


def select_version(store: ObjectStore, source: RegisteredDataset, use: DatasetUse) -> DatasetVersion:
    """Return the version that the key names: for a name alone, the newest one of this use.

    Raises as `resolve_version`."""
    matching = _matching(store, source)
    of_use = [version for version in matching if version.use in (use, None)]
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


def _pinned_key(store: ObjectStore, run: str, source: RegisteredDataset, use: DatasetUse) -> str | None:
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
