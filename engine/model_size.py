"""How large a registered model is, from the headers of its files alone: no torch, no download."""

from __future__ import annotations

import json
from math import prod

from storage.artifacts import ArtifactRef, read_manifest
from storage.errors import CorruptArtifact
from storage.objects import ObjectStore

MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""


def parameter_count(store: ObjectStore, model: ArtifactRef) -> int:
    """Elements of all tensors in the model's safetensors files. Raises CorruptArtifact."""
    return sum(
        _elements(store, entry.key)
        for entry in read_manifest(store, model.key).files
        if entry.name.endswith(".safetensors") and "/" not in entry.name
    )


def _elements(store: ObjectStore, key: str) -> int:
    with store.open(key) as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise CorruptArtifact(f"{key} does not begin like a safetensors file; publish the model again")
        try:
            header = json.loads(file.read(size))
            return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(f"{key} has no readable safetensors header: {error}") from error
