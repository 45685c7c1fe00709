"""Models by name, version and alias. A version is a plain Hugging Face folder with a manifest; it never changes.

An alias is a numbered log of versions: moving it is a put-if-absent of the next number, so no move is ever lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import JsonValue

from storage.errors import CorruptArtifact, InvalidKey, ObjectNotFound, VersionConflict
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, digest_of, file_entries, find_artifact, publish_files
from storage.store.objects import ObjectStore

LATEST = "latest"


def publish_model(
    store: ObjectStore,
    name: str,
    version: str,
    files: Mapping[str, Path],
    *,
    provenance: Provenance,
    parents: Sequence[str | ArtifactRef] = (),
    extra: Mapping[str, JsonValue] | None = None,
) -> ArtifactRef:
    """Commits models/<name>/<version>/<file> and moves the alias "latest" there. The files are copied.

    Safe to repeat: what an interrupted try left is completed. Which content a version names is decided before the
    first upload, so two publishers never mix their files. Raises VersionConflict when it names other content.
    """
    key = keys.model_version(name, version)
    entries = file_entries(files, lambda file: f"{key}/{file}")
    _claim(store, name, version, digest_of(entries))
    ref = find_artifact(store, key)
    if ref is None:
        ref = publish_files(
            store, key, files, entries, kind="model", parents=parents, provenance=provenance, extra=extra
        )
    _make_latest_once(store, name, version)
    return ref


def find_published(store: ObjectStore, name: str, version: str) -> ArtifactRef | None:
    """The model of that version, or None; completes a publication that ended before "latest" was moved."""
    ref = find_model(store, name, version)
    if ref is not None:
        _make_latest_once(store, name, version)
    return ref


def find_model(store: ObjectStore, name: str, version: str | None = None) -> ArtifactRef | None:
    """The model of that version (None: the latest), or None."""
    version = version or resolve_alias(store, name)
    return None if version is None else find_artifact(store, keys.model_version(name, version))


def list_versions(store: ObjectStore, name: str) -> list[str]:
    """The committed versions of a model, sorted by name."""
    prefix = keys.model_part(name, "claims")  # one small object per version, instead of listing every weight file
    claimed = (info.key.removeprefix(prefix).removesuffix(".json") for info in store.list(prefix))
    return [v for v in claimed if store.exists(keys.manifest_of_files(keys.model_version(name, v)))]


def list_models(store: ObjectStore) -> list[str]:
    """The names of all published models, sorted."""
    entries = (keys.alias_of(info.key) for info in store.list(keys.models_prefix()))
    return sorted({entry[0] for entry in entries if entry is not None})


def set_alias(store: ObjectStore, name: str, alias: str, version: str) -> int:
    """Makes `alias` mean `version`; returns the number of the entry in the alias's log that says so.

    Setting the current value again adds nothing. Raises ObjectNotFound when there is no such version.
    """
    if find_model(store, name, version) is None:
        known = ", ".join(list_versions(store, name)) or "none"
        raise ObjectNotFound(f"model {name!r} has no version {version!r} to call {alias!r}; published: {known}")
    return _append_alias(store, name, alias, version)


def resolve_alias(store: ObjectStore, name: str, alias: str = LATEST) -> str | None:
    """The version that `alias` means now, or None."""
    numbers = _log_numbers(store, name, alias)
    return _entry(store, name, alias, numbers[-1]) if numbers else None


def _make_latest_once(store: ObjectStore, name: str, version: str) -> None:
    # a late retry of an old publication must not take "latest" back
    if version not in _versions_in_log(store, name, LATEST):
        _append_alias(store, name, LATEST, version)


def _append_alias(store: ObjectStore, name: str, alias: str, version: str) -> int:
    numbers = _log_numbers(store, name, alias)
    last = numbers[-1] if numbers else 0
    if last and _entry(store, name, alias, last) == version:
        return last
    body = {"version": version, "attempt": uuid4().hex, "created": datetime.now(UTC).isoformat()}
    while True:
        last += 1
        put = store.put_if_absent(keys.model_alias(name, alias, last), canonical_json(body))
        if put.won or _version_in(put.data, keys.model_alias(name, alias, last)) == version:
            return last


def _claim(store: ObjectStore, name: str, version: str, sha256: str) -> None:
    key = keys.model_claim(name, version)
    there = store.put_if_absent(key, canonical_json({"sha256": sha256})).data
    try:
        claimed = json.loads(there)["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{key} does not say which content the version names: {error}") from error
    if claimed != sha256:
        raise VersionConflict(
            f"version {version!r} of model {name!r} names the content {claimed[:12]}, these files are {sha256[:12]}; "
            "versions never change: choose another one"
        )


def _log_numbers(store: ObjectStore, name: str, alias: str) -> list[int]:
    found = (keys.parse_number(info.key) for info in store.list(keys.model_aliases_prefix(name, alias)))
    return sorted(n for n in found if n is not None)


def _versions_in_log(store: ObjectStore, name: str, alias: str) -> set[str]:
    return {_entry(store, name, alias, number) for number in _log_numbers(store, name, alias)}


def _entry(store: ObjectStore, name: str, alias: str, number: int) -> str:
    key = keys.model_alias(name, alias, number)
    return _version_in(store.get(key), key)


def _version_in(data: bytes, key: str) -> str:
    try:
        return keys.validate_name(json.loads(data)["version"])
    except (ValueError, KeyError, TypeError, InvalidKey) as error:
        raise CorruptArtifact(f"{key} does not name a version: {error}") from error


def registered_key(ref: ArtifactRef) -> str:
    """`name@version` of a registered model: what `Model(key)` takes."""
    _, name, version = ref.key.split("/")
    return f"{name}@{version}"


def available_name(store: ObjectStore, name: str, parent: str) -> str:
    """`name`, or `name-2`, `name-3`, …: the first that no model bears, or that bears one made from `parent` already
    (so that a repetition finds what it published)."""
    number, candidate = 1, name
    while True:
        versions = [find_model(store, candidate, version) for version in list_versions(store, candidate)]
        if all(model is not None and parent in model.parents for model in versions):
            return candidate
        number += 1
        candidate = f"{name}-{number}"
