"""Recognises files that were loaded before, so that their rows are not read again.

The store keeps two kinds of record. `seen`: the size, times and sha256 of the file at a path of this machine. `loaded`:
the dataset that was made of files with these sha256. A record that is absent, outdated or damaged only means that the
files are read again.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from storage.errors import CorruptArtifact
from storage.serialization import canonical_json, digest, digest_file
from storage.store import keys
from storage.store.objects import ObjectStore, read_json

MIN_BYTES = 1 << 20
"""Smaller datasets are always read: that takes a tenth of a second, and no record has to be kept."""
READER_VERSION = 2
"""Raise it when the same files give other rows than before: the records of earlier readers are then not used."""
SETTLED_SECONDS = 2.0
"""A file that was changed more recently is not recognised by its times, which are too coarse to tell two changes
apart."""


def fingerprint(store: ObjectStore, files: Sequence[Path], formats: Sequence[str], rows: JsonValue) -> str | None:
    """Return a digest of the contents of the files and of `rows`, what selects and converts their rows.

    A file whose size and times are those of its last visit is not read. None: the files are small.
    """
    if sum(file.stat().st_size for file in files) < MIN_BYTES:
        return None
    contents = [[file_format, _sha256(store, file)] for file, file_format in zip(files, formats, strict=True)]
    return digest(canonical_json({"reader": READER_VERSION, "rows": rows, "files": contents}))


def find_loaded(store: ObjectStore, fingerprint: str) -> dict[str, Any] | None:
    """Return what `record_loaded` recorded for these files, or None."""
    return _read(store, keys.loaded_files(fingerprint))


def record_loaded(store: ObjectStore, fingerprint: str, loaded: dict[str, Any]) -> None:
    """Record the dataset that was made of these files."""
    store.put(keys.loaded_files(fingerprint), canonical_json(loaded))


def _sha256(store: ObjectStore, file: Path) -> str:
    """The sha256 of a file: the recorded one if its size and times are the recorded ones."""
    # two machines may have different files at one path
    # a path is bytes, which need not be UTF-8
    key = keys.seen_file(digest(platform.node().encode() + b"\0" + os.fsencode(file.resolve())))
    now, status = time.time(), file.stat()
    record = _read(store, key)
    if record is not None and record.get("status") == _status(status) and isinstance(record.get("sha256"), str):
        return str(record["sha256"])

    # no record if the file changed while it was read, or so recently that its times may hide a second change
    sha256, _ = digest_file(file)
    is_settled = max(status.st_mtime, status.st_ctime) < now - SETTLED_SECONDS
    if is_settled and _status(file.stat()) == _status(status):
        store.put(key, canonical_json({"status": _status(status), "sha256": sha256}))
    return sha256


def _status(status: os.stat_result) -> list[int]:
    """Size and times. The time of the last change of the file's status cannot be set back, unlike st_mtime."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(store: ObjectStore, key: str) -> dict[str, Any] | None:
    try:
        return read_json(store, key)
    except CorruptArtifact:
        return None
