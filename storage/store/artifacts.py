"""Commits and reads artifacts.

A writer first puts the data at keys that only this attempt uses. Then it puts a small manifest under the artifact's
logical key, if there is none. The first writer wins; a loser removes its data and returns the winner's reference.
Readers find the data only through manifests, and check digests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import Field, JsonValue, ValidationError, field_validator

from storage.errors import (
    ArtifactConflict,
    AttemptTooOld,
    CorruptArtifact,
    InvalidKey,
    ObjectNotFound,
    SchemaMismatch,
    StorageError,
)
from storage.failpoints import FAILPOINTS, failpoint
from storage.serialization import FileDigest, Frozen, canonical_json, digest, digest_file
from storage.store import keys
from storage.store.key_patterns import manifest_keys
from storage.store.objects import ObjectStore

UploadFiles = Callable[[Mapping[str, tuple[str, Path]]], Mapping[str, FileDigest]]
"""Uploads some of the files, given as (key, path) by name, in other processes. Returns their digests, by name."""
Item = TypeVar("Item")
Result = TypeVar("Result")

MANIFEST_VERSION = 1
FILES_AT_ONCE = 16
"""Files that are uploaded, downloaded or hashed at a time. All of them share the connections of the process, so more
would only help for many small files."""
MAX_ATTEMPT_SECONDS = 12 * 3600.0
"""Older attempts are not committed. Garbage collection deletes unreferenced data when it is twice as old."""
MANIFEST_NAME = Path(keys.manifest_of_files("folder")).name
_FAILPOINT_NAMES = {"rollouts": "rollout", "graded": "grade"}


class Provenance(Frozen):
    """The code, config and seed that an artifact was made with."""

    code_version: str
    config_digest: str
    seed: int


class ArtifactRef(Frozen):
    """Names a committed artifact. Tasks pass one another only these references and PolicyRefs."""

    kind: str
    key: str
    sha256: str
    bytes: int
    rows: int | None
    parents: tuple[str, ...]

    @property
    def uri(self) -> str:
        return f"{self.key}#{self.sha256}"


class FileEntry(Frozen):
    """One file of an artifact."""

    name: str
    """Path relative to the artifact's folder. For a one-file artifact, the last segment of the key."""
    key: str
    sha256: str
    bytes: int

    @field_validator("name", "key")
    @classmethod
    def _check_segments(cls, value: str) -> str:
        try:
            return keys.validate_key(value)
        except InvalidKey as error:
            raise ValueError(str(error)) from error

    def check(self, sha256: str, size: int) -> None:
        """Raises CorruptArtifact unless `sha256` is the digest in the manifest. `size` is for the error text."""
        if sha256 != self.sha256:
            raise CorruptArtifact(
                f"{self.key} has {size} bytes with sha256 {sha256[:12]}, its manifest says {self.bytes} with "
                f"{self.sha256[:12]}; restore the object from a backup, or delete the manifest to make the artifact "
                "again"
            )


class Attempt:
    """One attempt to write an artifact: its unique id and its age."""

    def __init__(self, store: ObjectStore) -> None:
        self.id = uuid4().hex
        self._store = store
        self._started = [clock() for clock in store.clocks]

    def age_seconds(self) -> float:
        """Seconds since the attempt began, by the clock that measures most."""
        return max(clock() - started for clock, started in zip(self._store.clocks, self._started, strict=True))

    @property
    def too_old(self) -> bool:
        """Whether the attempt must not be committed any more."""
        return self.age_seconds() > MAX_ATTEMPT_SECONDS


class Manifest(Frozen):
    """Describes one committed artifact: its files, digest, parents and origin."""

    schema_version: int = MANIFEST_VERSION
    kind: str
    key: str
    files: tuple[FileEntry, ...] = Field(min_length=1)
    sha256: str
    """Digest of the bytes of a single file. For several files, the digest of the canonical JSON of their sorted
    (name, sha256) pairs."""
    bytes: int
    rows: int | None
    parents: tuple[str, ...]
    provenance: Provenance
    attempt: str
    created: str
    """ISO time, UTC, by the writer's clock."""
    extra: dict[str, JsonValue] = {}

    @property
    def ref(self) -> ArtifactRef:
        fields = {"kind", "key", "sha256", "bytes", "rows", "parents"}
        return ArtifactRef(**self.model_dump(include=fields))


def commit_bytes(  # noqa: PLR0913 - one field of the manifest each
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    kind: str,
    suffix: str,
    rows: int | None = None,
    parents: Sequence[str | ArtifactRef] = (),
    provenance: Provenance,
    extra: Mapping[str, JsonValue] | None = None,
) -> ArtifactRef:
    """Commits one file of bytes under the logical key. `suffix` is its extension, like '.parquet'."""
    attempt = Attempt(store)
    data_key = f"{key}.{attempt.id}{suffix}"
    entry = FileEntry(name=Path(data_key).name, key=data_key, sha256=digest(data), bytes=len(data))
    draft = _draft(key, [entry], attempt, kind=kind, rows=rows, parents=parents, provenance=provenance, extra=extra)
    _reach_failpoint(kind, "before_data")
    store.put(data_key, data)
    return _commit(store, keys.manifest(key), draft, attempt).ref


def commit_file(  # noqa: PLR0913 - one field of the manifest each
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    kind: str,
    suffix: str,
    rows: int | None = None,
    parents: Sequence[str | ArtifactRef] = (),
    provenance: Provenance,
    extra: Mapping[str, JsonValue] | None = None,
) -> ArtifactRef:
    """Like commit_bytes, for a file that need not fit in memory. The file is moved into the store."""
    attempt = Attempt(store)
    data_key = keys.validate_key(f"{key}.{attempt.id}{suffix}")
    name = Path(data_key).name
    _reach_failpoint(kind, "before_data")
    entries = _store_attempt(store, {name: path}, lambda _: data_key, kind, move=True)
    draft = _draft(key, entries, attempt, kind=kind, rows=rows, parents=parents, provenance=provenance, extra=extra)
    return _commit(store, keys.manifest(key), draft, attempt).ref


def commit_files(  # noqa: PLR0913 - one field of the manifest each
    store: ObjectStore,
    key: str,
    files: Mapping[str, Path],
    *,
    kind: str,
    rows: int | None = None,
    parents: Sequence[str | ArtifactRef] = (),
    provenance: Provenance,
    extra: Mapping[str, JsonValue] | None = None,
    move: bool = True,
    upload: UploadFiles | None = None,
) -> ArtifactRef:
    """Commits a folder of files, given by name. With `move` the files may be moved instead of copied.

    `upload` is called first; this process uploads the files that it leaves. Raises FileNotFoundError for a file that is
    neither uploaded nor on this machine."""
    attempt = Attempt(store)
    _check_names(files)
    _reach_failpoint(kind, "before_data")
    entries = _store_attempt(store, files, lambda name: f"{key}/{attempt.id}/{name}", kind, move=move, upload=upload)
    draft = _draft(key, entries, attempt, kind=kind, rows=rows, parents=parents, provenance=provenance, extra=extra)
    return _commit(store, keys.manifest_of_files(key), draft, attempt).ref


def publish_files(
    store: ObjectStore,
    key: str,
    files: Mapping[str, Path],
    entries: Sequence[FileEntry],
    *,
    kind: str,
    parents: Sequence[str | ArtifactRef] = (),
    provenance: Provenance,
    extra: Mapping[str, JsonValue] | None = None,
) -> ArtifactRef:
    """Commits a folder whose files lie directly under `key`. `entries` are the file_entries of `files`.

    The key must determine the content, so that all writers write the same bytes and a loser does not remove them.
    """
    attempt = Attempt(store)
    draft = _draft(key, entries, attempt, kind=kind, rows=None, parents=parents, provenance=provenance, extra=extra)
    stored = _put_files(store, {entry.name: (entry.key, files[entry.name]) for entry in entries}, kind, move=False)
    for entry in entries:
        uploaded = stored[entry.name]
        if uploaded is not None:
            entry.check(*uploaded)
    return _commit(store, keys.manifest_of_files(key), draft, attempt, shared=True).ref


def find_artifact(store: ObjectStore, key: str) -> ArtifactRef | None:
    """Returns the committed artifact of that key, or None, with one request. Raises CorruptArtifact."""
    try:
        return read_manifest(store, key).ref
    except ObjectNotFound:
        return None


def require_parent(ref: ArtifactRef, parent: str) -> ArtifactRef:
    """Returns the ref. Raises ArtifactConflict unless the URI `parent` is among its parents.

    Two models of one stage share the keys of its steps, so an artifact may belong to the other model.
    """
    if parent not in ref.parents:
        raise ArtifactConflict(
            f"{ref.key} was made from {', '.join(ref.parents) or 'nothing'}, not from {parent}; train two models in "
            "stages of different names, or in two runs"
        )
    return ref


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """Reads the manifest of a logical key. Raises ObjectNotFound, CorruptArtifact."""
    for manifest_key in manifest_keys(key):
        try:
            data = store.get(manifest_key)
        except ObjectNotFound:
            continue
        return _parse(data, manifest_key, key)
    raise ObjectNotFound(f"no artifact {key!r} is committed in {store.url}")


def read_bytes(store: ObjectStore, ref: ArtifactRef) -> bytes:
    """Reads a one-file artifact. Raises ObjectNotFound, and CorruptArtifact if its digest is not the one in `ref`."""
    entry = single_file_entry(store, ref)
    try:
        data = store.get(entry.key)
    except ObjectNotFound as error:
        raise CorruptArtifact(f"{ref.key} is committed, but its data {entry.key} is gone from {store.url}") from error
    entry.check(digest(data), len(data))
    return data


def single_file_entry(store: ObjectStore, ref: ArtifactRef) -> FileEntry:
    """Returns the file of a one-file artifact.

    Raises CorruptArtifact when the store holds another artifact there, SchemaMismatch when it has several files.
    """
    manifest = read_manifest(store, ref.key)
    if manifest.sha256 != ref.sha256:
        raise CorruptArtifact(
            f"{ref.key} is {manifest.sha256[:12]} in {store.url}, the reference says {ref.sha256[:12]}; "
            "the reference belongs to another store, or the artifact was deleted and made again"
        )
    if len(manifest.files) != 1:
        raise SchemaMismatch(
            f"{ref.key} is a {manifest.kind} of {len(manifest.files)} files, and one file was expected; give the "
            "reference of a table"
        )
    return manifest.files[0]


def file_entries(files: Mapping[str, Path], key_of: Callable[[str], str]) -> list[FileEntry]:
    """Returns name, key, digest and size of each local file, sorted by name. `key_of` makes the key of a name.

    Raises InvalidKey, and ValueError when there is no file.
    """
    _check_names(files)
    names = sorted(files)
    digests = map_files(lambda name: digest_file(files[name]), names)
    return [_entry(name, key_of, *of_file) for name, of_file in zip(names, digests, strict=True)]


def digest_of(entries: Sequence[FileEntry]) -> str:
    """Returns the digest of an artifact that consists of these files."""
    if len(entries) == 1:
        return entries[0].sha256
    pairs = sorted([entry.name, entry.sha256] for entry in entries)
    return digest(canonical_json(pairs))


def map_files(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns the results of `function` for every item in order, computed by up to FILES_AT_ONCE threads. After an
    error no further call begins. It is raised when the calls that run have ended."""
    if len(items) == 1:
        return [function(items[0])]
    pool = ThreadPoolExecutor(min(FILES_AT_ONCE, max(1, len(items))), thread_name_prefix="ostinato-files")
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _check_names(files: Mapping[str, Path]) -> None:
    """Raises InvalidKey for a name that no file of an artifact can have, ValueError when there is no file."""
    if not files:
        raise ValueError("an artifact has at least one file, none was given")
    for name in files:
        if keys.validate_key(name) == MANIFEST_NAME:
            raise InvalidKey(
                f"a file of an artifact cannot be called {name!r}, which is the name of the manifest; leave it out"
            )


def _entry(name: str, key_of: Callable[[str], str], sha256: str, size: int) -> FileEntry:
    return FileEntry(name=name, key=keys.validate_key(key_of(name)), sha256=sha256, bytes=size)


def _store_attempt(
    store: ObjectStore,
    files: Mapping[str, Path],
    key_of: Callable[[str], str],
    kind: str,
    *,
    move: bool,
    upload: UploadFiles | None = None,
) -> list[FileEntry]:
    """Writes the files of an attempt to its keys. Returns their entries, sorted by name.

    A store on this machine links the files, so they are hashed before. Another store hashes them while it reads them.
    """
    paths = {name: (key_of(name), path) for name, path in sorted(files.items())}
    if store.local_path(key_of(min(files))) is not None:
        entries = file_entries(files, key_of)
        _put_files(store, paths, kind, move=move)
        return entries
    stored: dict[str, FileDigest | None] = {}
    if upload is not None:
        # Another process may use other credentials, and so another store. Only what this store has counts.
        uploaded = upload(paths)
        stored |= {name: of_file for name, of_file in uploaded.items() if store.exists(paths[name][0])}
        if stored:
            _reach_failpoint(kind, "mid_upload")
    left = {name: place for name, place in paths.items() if name not in stored}
    if left:
        stored |= _put_files(store, left, kind, move=move)
    return [_entry(name, key_of, *(stored[name] or digest_file(files[name]))) for name in paths]


def _put_files(
    store: ObjectStore, files: Mapping[str, tuple[str, Path]], kind: str, *, move: bool
) -> dict[str, FileDigest | None]:
    """Writes files, given as name -> (key, path). Returns what `put_file` returns, by name. Several files of a store on
    another machine are uploaded at a time.

    Each key names the attempt or the content, so every writer of a key writes the same bytes."""

    def put(name: str) -> FileDigest | None:
        key, path = files[name]
        stored = store.put_file(key, path, move=move, resume=True)
        if name == first:
            _reach_failpoint(kind, "mid_upload")
        return stored

    names = list(files)
    first = names[0]
    # On this machine a file is linked, which takes no time; the order is then that of the names.
    is_local = store.local_path(files[first][0]) is not None
    digests = [put(name) for name in names] if is_local else map_files(put, names)
    return dict(zip(names, digests, strict=True))


def _draft(key: str, entries: Sequence[FileEntry], attempt: Attempt, **fields: Any) -> Manifest:
    parents = tuple(map(uri_of, fields.pop("parents")))
    return Manifest(
        key=keys.validate_key(key),
        files=tuple(entries),
        sha256=digest_of(entries),
        bytes=sum(entry.bytes for entry in entries),
        parents=parents,
        attempt=attempt.id,
        created=datetime.now(UTC).isoformat(),
        extra=dict(fields.pop("extra") or {}),
        **fields,
    )


def uri_of(parent: str | ArtifactRef) -> str:
    """Returns the URI of a parent of an artifact."""
    return parent.uri if isinstance(parent, ArtifactRef) else parent


def _commit(
    store: ObjectStore, manifest_key: str, draft: Manifest, attempt: Attempt, *, shared: bool = False
) -> Manifest:
    """Puts the manifest if there is none, and returns the committed one. The data must be complete before this call.

    With `shared` the data of a loser is the winner's, and is not removed. Raises AttemptTooOld, and then nothing was
    committed.
    """
    # the manifest commits the artifact
    _reach_failpoint(draft.kind, "after_data")
    _reach_failpoint(draft.kind, "before_manifest")
    if attempt.too_old:
        raise AttemptTooOld(_too_old_message(draft.key, attempt))
    put = store.put_if_absent(manifest_key, canonical_json(draft.model_dump(mode="json")))
    _reach_failpoint(draft.kind, "after_manifest")
    if put.won:
        # a writer that was suspended right before its commit may have committed data that was deleted meanwhile
        if attempt.too_old and not all(store.exists(entry.key) for entry in draft.files):
            store.delete(manifest_key)
            raise AttemptTooOld(_too_old_message(draft.key, attempt))
        return draft
    # another writer was first
    winner = _parse(put.data, manifest_key, draft.key)
    if not shared:
        _discard(store, draft, keep={entry.key for entry in winner.files})
    return winner


def _too_old_message(key: str, attempt: Attempt) -> str:
    return (
        f"the attempt to make {key} began {attempt.age_seconds() / 3600:.1f} h ago, and an attempt older than "
        f"{MAX_ATTEMPT_SECONDS / 3600:.0f} h is not committed, because its data may be collected as garbage; "
        "make it again"
    )


def _discard(store: ObjectStore, draft: Manifest, *, keep: set[str]) -> None:
    """Removes a loser's data. If that fails, the rest is left for garbage collection."""
    for entry in draft.files:
        if entry.key not in keep:
            try:
                store.delete(entry.key)
            except StorageError:
                return


def _parse(data: bytes, manifest_key: str, key: str) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{manifest_key} is not a readable manifest (or of a newer version): {error}") from error
    if manifest.schema_version > MANIFEST_VERSION:
        raise CorruptArtifact(
            f"{manifest_key} has schema version {manifest.schema_version}, this code reads up to {MANIFEST_VERSION}; "
            "upgrade, or read it with the version that wrote it"
        )
    if manifest.key != key:
        raise CorruptArtifact(f"{manifest_key} is the manifest of {manifest.key}, not of {key}: it was copied or moved")
    return manifest


def _reach_failpoint(kind: str, moment: str) -> None:
    """Reaches the failpoints of this moment for this kind of artifact and for all artifacts, where they exist."""
    for owner in (_FAILPOINT_NAMES.get(kind, kind), "artifact"):
        if f"{owner}.{moment}" in FAILPOINTS:
            failpoint(f"{owner}.{moment}")
