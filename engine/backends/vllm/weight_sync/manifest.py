"""Describes the weights that the trainer staged, tensor by tensor. Workers compare what arrives with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from engine.backends.vllm.serving.runtime import Manifest
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes
from engine.errors import BadSpec


def entry_of(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """(dtype, shape, sha256 of the row-major bytes)."""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """The manifest of (name, tensor) pairs. Raises BadSpec if a name occurs twice."""
    manifest: Manifest = {}
    for name, tensor in tensors:
        if name in manifest:
            raise BadSpec(f"tensor {name} was staged twice")
        manifest[name] = entry_of(tensor)
    return manifest


def manifest_of_files(paths: Sequence[Path]) -> Manifest:
    """The manifest of safetensors files. Raises BadSpec for an incomplete file, or if a name occurs twice."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path in paths:
            yield from read_tensors(path)

    return manifest_of(tensors())


def digest_of(manifest: Manifest) -> str:
    """Equal for equal names, dtypes, shapes and bytes; the order of the tensors does not matter."""
    lines = (f"{name} {dtype} {list(shape)} {sha256}\n" for name, (dtype, shape, sha256) in sorted(manifest.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
