"""Tells from a key alone what kind of object lies there. storage.store.keys makes the keys that match here."""

from __future__ import annotations

import re
from typing import Literal

from storage.store import keys
from storage.store.keys import RESERVED_VERSIONS, RUN_PARTS

_NO_VERSION = "|".join(f"{part}/" for part in sorted(RESERVED_VERSIONS))
_OF_RUN = "|".join(re.escape(part) for part in RUN_PARTS if "." in part)

# group 1: the logical key of a one-file artifact; group 2: that of an artifact that is a folder
_MANIFEST = re.compile(
    r"(runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+/\d{5,}|evaluations/[^/]+)|datasets/[^/]+/[^/]+/threads"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+)\.json"
    r"|(runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})"
    rf"|models/[^/]+/(?!{_NO_VERSION})[^/]+"
    r"|uploads/[^/]+/[0-9a-f]{64})/manifest\.json",
    re.ASCII,
)
# files of artifacts and attempts, next to or below the manifest
_DATA = re.compile(
    r"runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+|evaluations)/[^/]+\.[0-9a-f]{32}\.[^/]+"
    r"|runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})/[0-9a-f]{32}/.+"
    r"|datasets/[^/]+/[^/]+/threads\.[0-9a-f]{32}\.[^/]+"
    rf"|models/[^/]+/(?!{_NO_VERSION})[^/]+/.+"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+\.[0-9a-f]{32}\.[^/]+|uploads/[^/]+/[0-9a-f]{64}/[0-9a-f]{32}/.+",
    re.ASCII,
)
# objects without a manifest
_STANDALONE = re.compile(
    r"store\.json|index/complete\.json|index/(?:runs|chains)/[^/]+(?:/[^/]+)?@run\.json"
    r"|index/uses/[0-9a-f]{64}/(?:runs|models)/.+\.json|files/(?:seen|loaded)/[0-9a-f]{64}\.json"
    r"|votes/[^/]+\.json|models/[^/]+/(?:claims/[^/]+|aliases/[^/]+/\d{6,})\.json"
    rf"|runs/.+/(?:{_OF_RUN}"
    r"|leases/(?:\d{6,}(?:\.released)?|deleting)\.json"
    r"|loops/\d{6,}/\d{6,}\.json|datasets/[^/]+\.json|stages/[^/]+/(?:stage\.json"
    r"|steps/\d{6,}/calls-\d{5,}/call-[0-9a-f]{64}\.json"
    r"|metrics/\d{6,}\.json|logged/[^/]+\.json|chains/[^/]+/(?:root|(?:rebases/)?\d{6,})\.json"
    r"|checkpoints/[^/]+/\d{6,}/name\.json))",
    re.ASCII,
)
# the logical key is group 1 for one file, 2 for a folder, 3 for a registered model
_OWNER = re.compile(
    r"(runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+|evaluations)/[^/]+|datasets/[^/]+/[^/]+/threads"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+)\.[0-9a-f]{32}\.[^/]+"
    r"|(runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})"
    r"|uploads/[^/]+/[0-9a-f]{64})/[0-9a-f]{32}/.+"
    r"|(models/[^/]+/[^/]+)/.+",
    re.ASCII,
)
# what `ostinato doctor` and the estimate of a run write to test a store, and remove again
_PROBE = re.compile(r"doctor/[0-9a-f]{32}/.+", re.ASCII)
KeyKind = Literal["manifest", "attempt", "published", "upload", "standalone", "probe", "unknown"]
"""manifest: commits an artifact. attempt: data that one attempt wrote, committed or not. published: a file of a
registered model. upload: a model folder that a client uploads. standalone: an object without a manifest, such as a
record. probe: an object that only tests the store. unknown: not an object of the project."""


def artifact_of_manifest(key: str) -> str | None:
    """Returns the logical key of the artifact whose manifest is at `key`, or None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return match[1] or match[2] if match else None


def manifest_keys(key: str) -> list[str]:
    """Returns where the manifest of the artifact with this logical key can be. Of every artifact of the project the key
    tells whether it is a file or a folder, so that is one key. Other keys have two."""
    candidates = [keys.manifest(key), keys.manifest_of_files(key)]
    return [candidate for candidate in candidates if artifact_of_manifest(candidate) == key] or candidates


def is_artifact_data(key: str) -> bool:
    """Whether the object is data of an artifact or of an attempt, which only a manifest gives a meaning."""
    return artifact_of_manifest(key) is None and _DATA.fullmatch(key) is not None


def classify_key(key: str) -> KeyKind:
    """Returns the kind of the object at `key`."""
    area = key.partition("/")[0]
    is_manifest, is_data = artifact_of_manifest(key) is not None, is_artifact_data(key)
    if area == "uploads" and (is_manifest or is_data):
        return "upload"
    if is_manifest:
        return "manifest"
    if is_data:
        is_published = area == "models" and key.split("/")[2] not in RESERVED_VERSIONS
        return "published" if is_published else "attempt"
    if _PROBE.fullmatch(key):
        return "probe"
    return "standalone" if is_standalone(key) else "unknown"


def owning_artifact(key: str) -> str | None:
    """Returns the logical key of the artifact that a manifest or data belongs to, or None for any other object."""
    if (artifact := artifact_of_manifest(key)) is not None:
        return artifact
    if not is_artifact_data(key):
        return None
    match = _OWNER.fullmatch(key)
    if match is None:
        return None
    return match[1] or match[2] or match[3]


def is_standalone(key: str) -> bool:
    """Whether the object needs no manifest: a record, a lease, a claim, an alias or a report."""
    return _STANDALONE.fullmatch(key) is not None
