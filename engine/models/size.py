"""Counts the parameters of a model from the headers of its safetensors files, without torch and without a download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

from storage.errors import CorruptArtifact
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore

SUFFIX = ".safetensors"
METADATA = "__metadata__"
"""The only key of a header that does not name a tensor."""
MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors library."""
BYTES_IN_4BIT = 4.5 / 8
"""Bytes of a weight in NF4: 4 bits, and a float32 number for each block of 64 weights."""


def parameter_count(store: ObjectStore, model: ArtifactRef) -> int:
    """Number of elements of all tensors of a registered model. Raises CorruptArtifact."""
    return sum(prod(shape) for _, shape in _stored_shapes(store, model))


def base_nbytes(
    store: ObjectStore, model: ArtifactRef, *, compute_bytes: int, master_bytes: int, load_in_4bit: bool
) -> int:
    """Estimated bytes of a registered model as the frozen base of adapters: `compute_bytes` per weight. With
    `load_in_4bit` its linear layers take `BYTES_IN_4BIT` per weight, the others `master_bytes`. Raises CorruptArtifact.
    """
    if not load_in_4bit:
        return parameter_count(store, model) * compute_bytes
    linear, others = 0, 0
    for name, shape in _stored_shapes(store, model):
        if len(shape) == 2 and "embed" not in name and "head" not in name:
            linear += prod(shape)
        else:
            others += prod(shape)
    return int(linear * BYTES_IN_4BIT + others * master_bytes)


def folder_parameter_count(files: Mapping[str, Path]) -> int:
    """Number of elements of all tensors in the files of a local folder. Raises CorruptArtifact."""
    count = 0
    for name, path in files.items():
        if name.endswith(SUFFIX):
            with path.open("rb") as file:
                count += _elements(file, name)
    return count


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors in the folder's safetensors files. Raises CorruptArtifact."""
    names: list[str] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            names += _shapes(file, path.name)
    return names


def _stored_shapes(store: ObjectStore, model: ArtifactRef) -> Iterator[tuple[str, list[int]]]:
    """(name, shape) of every tensor of a registered model."""
    for entry in read_manifest(store, model.key).files:
        if entry.name.endswith(SUFFIX) and "/" not in entry.name:
            with store.open(entry.key) as file:
                yield from _shapes(file, entry.key).items()


def _elements(file: BinaryIO, name: str) -> int:
    return sum(prod(shape) for shape in _shapes(file, name).values())


def _shapes(file: BinaryIO, name: str) -> dict[str, list[int]]:
    """The shape of each tensor of an open safetensors file. Raises CorruptArtifact."""
    # A safetensors file begins with the size of its JSON header, in 8 bytes.
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise CorruptArtifact(f"{name} does not begin like a safetensors file; export the model again")
    try:
        header = json.loads(file.read(size))
        shapes = {}
        for tensor, entry in header.items():
            if tensor != METADATA:
                shapes[tensor] = [int(dimension) for dimension in entry["shape"]]
        return shapes
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"{name} has no readable safetensors header: {error}") from error
