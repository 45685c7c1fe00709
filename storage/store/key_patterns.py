"""What the object at a key is, by its place alone: what storage.store.keys spells, read back."""

from __future__ import annotations

import re
from typing import Literal

from storage.store.keys import RESERVED_VERSIONS, RUN_FILES

_NO_VERSION = "|".join(f"{part}/" for part in sorted(RESERVED_VERSIONS))
_OF_RUN = "|".join(map(re.escape, RUN_FILES))

_MANIFEST = re.compile(
    r"(runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+/\d{5,}|evaluations/[^/]+)|datasets/[^/]+/[^/]+/threads"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+)\.json"
    r"|(runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})"
    rf"|models/[^/]+/(?!{_NO_VERSION})[^/]+"
    r"|uploads/[^/]+/[0-9a-f]{64})/manifest\.json",
    re.ASCII,
)
_DATA = re.compile(
    r"runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+|evaluations)/[^/]+\.[0-9a-f]{32}\.[^/]+"
    r"|runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})/[0-9a-f]{32}/.+"
    r"|datasets/[^/]+/[^/]+/threads\.[0-9a-f]{32}\.[^/]+"
    rf"|models/[^/]+/(?!{_NO_VERSION})[^/]+/.+"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+\.[0-9a-f]{32}\.[^/]+|uploads/[^/]+/[0-9a-f]{64}/[0-9a-f]{32}/.+",
    re.ASCII,
)
_PLAIN = re.compile(
    r"store\.json|models/[^/]+/(?:claims/[^/]+|aliases/[^/]+/\d{6,})\.json"
    rf"|runs/.+/(?:{_OF_RUN}"
    r"|leases/\d{6,}(?:\.released)?\.json"
    r"|loops/\d{6,}/\d{6,}\.json|stages/[^/]+/(?:stage\.json"
    r"|metrics/\d{6,}\.json|logged/[^/]+\.json|chains/[^/]+/(?:root|(?:rebases/)?\d{6,})\.json"
    r"|checkpoints/[^/]+/\d{6,}/name\.json))",
    re.ASCII,
)
_OWNER = re.compile(
    r"(runs/.+/stages/[^/]+/(?:steps/\d{6,}/[^/]+|evaluations)/[^/]+|datasets/[^/]+/[^/]+/threads"
    r"|models/[^/]+/(?:decisions|cards)/[^/.]+)\.[0-9a-f]{32}\.[^/]+"
    r"|(runs/.+/stages/[^/]+/(?:checkpoints/[^/]+/\d{6,}|rebased/[^/]+/\d{6,}\.[0-9a-f]{32})"
    r"|uploads/[^/]+/[0-9a-f]{64})/[0-9a-f]{32}/.+"
    r"|(models/[^/]+/[^/]+)/.+",
    re.ASCII,
)
KeyKind = Literal["manifest", "attempt", "published", "upload", "plain", "unknown"]
"""manifest: commits an artifact. attempt: data of one attempt, committed or not. published: a file of a registered
model. upload: a model on its way in. plain: stands for itself. unknown: nothing that a store keeps."""


def artifact_of_manifest(key: str) -> str | None:
    """The logical key whose manifest is at `key`; None where no manifest is kept."""
    match = _MANIFEST.fullmatch(key)
    return match[1] or match[2] if match else None


def is_artifact_data(key: str) -> bool:
    """Whether only a manifest gives this object a meaning: data of a committed artifact, or of an attempt."""
    return artifact_of_manifest(key) is None and _DATA.fullmatch(key) is not None


def classify_key(key: str) -> KeyKind:
    """What the object at `key` is, by its place alone."""
    area = key.partition("/")[0]
    if area == "uploads" and (artifact_of_manifest(key) or is_artifact_data(key)):
        return "upload"
    if artifact_of_manifest(key) is not None:
        return "manifest"
    if is_artifact_data(key):
        return "published" if area == "models" and key.split("/")[2] not in RESERVED_VERSIONS else "attempt"
    return "plain" if is_standalone(key) else "unknown"


def owning_artifact(key: str) -> str | None:
    """The logical key that data belongs to, or whose manifest this is; None for any other object."""
    if (artifact := artifact_of_manifest(key)) is not None:
        return artifact
    match = _OWNER.fullmatch(key) if is_artifact_data(key) else None
    return next((group for group in match.groups() if group), None) if match else None


def is_standalone(key: str) -> bool:
    """Whether it is one of the objects that stand for themselves: records, leases, claims, aliases, reports."""
    return _PLAIN.fullmatch(key) is not None
