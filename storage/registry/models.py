"""Registered models, by name, version and alias. A version is a Hugging Face folder with a manifest and never changes.

An alias is a numbered log of versions. A move puts the next number if it is absent, so that no move is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import JsonValue

from storage.errors import CorruptArtifact, InvalidKey, ModelBeingDeleted, VersionConflict
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import (
    ArtifactRef,
    Provenance,
    digest_of,
    file_entries,
    find_artifact,
    publish_files,
    uri_of,
)
from storage.store.index import record_uses, used_by
from storage.store.objects import ObjectStore, list_numbers, read_json

LATEST = "latest"
_DELETING = "deleting"
"""Field of a version's claim that says that a deletion of the version has begun."""


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
    """Copies the files to models/<name>/<version>/, commits them, and moves the alias "latest" to the version.

    A repetition completes an interrupted publication. The digest of the version's content is recorded before the first
    upload, so that two publishers never mix their files. Raises VersionConflict if the version names other content,
    ModelBeingDeleted.
    """
    # decide the content of the version, upload it unless it is committed, move "latest"
    key = keys.model_version(name, version)
    entries = file_entries(files, lambda file: f"{key}/{file}")
    _claim(store, name, version, digest_of(entries))
    ref = find_artifact(store, key)
    if ref is None:
        record_uses(store, keys.manifest_of_files(key), used_by(map(uri_of, parents)))
        ref = publish_files(
            store, key, files, entries, kind="model", parents=parents, provenance=provenance, extra=extra
        )
    _make_latest_once(store, name, version)
    return ref


def find_published(store: ObjectStore, name: str, version: str) -> ArtifactRef | None:
    """Returns the model of that version, or None. Completes a publication that ended before "latest" was moved."""
    ref = find_model(store, name, version)
    if ref is not None:
        _make_latest_once(store, name, version)
    return ref


def find_model(store: ObjectStore, name: str, version: str | None = None) -> ArtifactRef | None:
    """Returns the model of that version (None: the latest), or None if there is none."""
    version = version or resolve_alias(store, name)
    if version is None:
        return None
    return find_artifact(store, keys.model_version(name, version))


def list_versions(store: ObjectStore, name: str) -> list[str]:
    """Returns the committed versions of a model, sorted by name."""
    # a claim is one small object per version, so that weight files need not be listed
    prefix = keys.model_part(name, "claims")
    versions = []
    for info in store.list(prefix):
        version = info.key.removeprefix(prefix).removesuffix(".json")
        if store.exists(keys.manifest_of_files(keys.model_version(name, version))):
            versions.append(version)
    return versions


def list_models(store: ObjectStore) -> list[str]:
    """Returns the names of all published models, sorted."""
    aliases = (keys.alias_of(info.key) for info in store.list(keys.models_prefix()))
    return sorted({alias[0] for alias in aliases if alias is not None})


def resolve_alias(store: ObjectStore, name: str, alias: str = LATEST) -> str | None:
    """Returns the version that `alias` names now, or None."""
    numbers = _log_numbers(store, name, alias)
    if not numbers:
        return None
    return _read_entry(store, name, alias, numbers[-1])


def move_latest_from(store: ObjectStore, name: str, version: str) -> None:
    """Moves the alias "latest" from a version that will be deleted to the newest other one. Without another one,
    deletes the alias."""
    if resolve_alias(store, name) != version:
        return
    numbers = _log_numbers(store, name, LATEST)
    others = set(list_versions(store, name)) - {version}
    for number in reversed(numbers):
        candidate = _read_entry(store, name, LATEST, number)
        if candidate in others:
            _append_latest(store, name, candidate, after=numbers[-1])
            return
    for number in numbers:
        store.delete(keys.model_alias(name, LATEST, number))


def mark_deletion(store: ObjectStore, name: str, version: str, *, deleting: bool) -> None:
    """Marks a version as being deleted in its claim, or removes the mark. Raises ObjectNotFound."""
    key = keys.model_claim(name, version)
    body = json.loads(store.get(key))
    body[_DELETING] = deleting
    store.put(key, canonical_json(body))


def check_not_deleted(store: ObjectStore, model: str) -> None:
    """Raises ModelBeingDeleted if the deletion of the version with this logical key has begun, or has ended."""
    name, _, version = model.removeprefix(keys.models_prefix()).partition("/")
    body = read_json(store, keys.model_claim(name, version))
    if body is None or body.get(_DELETING):
        raise ModelBeingDeleted(
            f"model {name}@{version} in {store.url} is deleted, or is being deleted; choose another version, or finish "
            f"the deletion with: ostinato models delete {name}@{version} --yes"
        )


def _make_latest_once(store: ObjectStore, name: str, version: str) -> None:
    """Adds the version to the log of the alias "latest", unless the log has it."""
    # a late retry of an old publication must not move "latest" back
    numbers = _log_numbers(store, name, LATEST)
    if version in {_read_entry(store, name, LATEST, number) for number in numbers}:
        return
    _append_latest(store, name, version, after=numbers[-1] if numbers else 0)


def _append_latest(store: ObjectStore, name: str, version: str, *, after: int) -> None:
    """Adds an entry to the log of the alias "latest", at the first free number above `after`."""
    # the attempt id makes the entries of two writers different bytes
    body = {"version": version, "attempt": uuid4().hex, "created": datetime.now(UTC).isoformat()}
    number = after
    while True:
        number += 1
        key = keys.model_alias(name, LATEST, number)
        put = store.put_if_absent(key, canonical_json(body))
        # another writer may take the number: then try the next, unless its entry is the same
        if put.won or _version_in(put.data, key) == version:
            return


def _claim(store: ObjectStore, name: str, version: str, sha256: str) -> None:
    """Records the digest of the version's content. Raises VersionConflict if another digest is recorded."""
    key = keys.model_claim(name, version)
    stored = store.put_if_absent(key, canonical_json({"sha256": sha256})).data
    try:
        body = json.loads(stored)
        claimed = body["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{key} does not say which content the version names: {error}") from error
    if body.get(_DELETING):
        check_not_deleted(store, keys.model_version(name, version))
    if claimed != sha256:
        raise VersionConflict(
            f"version {version!r} of model {name!r} names the content {claimed[:12]}, these files are {sha256[:12]}; "
            "versions never change: choose another one"
        )


def _log_numbers(store: ObjectStore, name: str, alias: str) -> list[int]:
    return list_numbers(store, keys.model_aliases_prefix(name, alias))


def _read_entry(store: ObjectStore, name: str, alias: str, number: int) -> str:
    key = keys.model_alias(name, alias, number)
    return _version_in(store.get(key), key)


def _version_in(data: bytes, key: str) -> str:
    try:
        return keys.validate_name(json.loads(data)["version"])
    except (ValueError, KeyError, TypeError, InvalidKey) as error:
        raise CorruptArtifact(f"{key} does not name a version: {error}") from error


def registered_key(ref: ArtifactRef) -> str:
    """Returns `name@version` of a registered model, which `Model(key)` accepts."""
    _, name, version = ref.key.split("/")
    return f"{name}@{version}"


def available_name(store: ObjectStore, name: str, parent: str) -> str:
    """Returns the first of `name`, `name-2`, `name-3`, … that is free, or whose versions were all made from `parent`.

    So a repeated publication finds the name that it used before.
    """
    number, candidate = 1, name
    while True:
        # a name without versions is free
        versions = [find_model(store, candidate, version) for version in list_versions(store, candidate)]
        if all(model is not None and parent in model.parents for model in versions):
            return candidate
        number += 1
        candidate = f"{name}-{number}"
