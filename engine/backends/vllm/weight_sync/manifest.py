"""The trainer's side of the receipt: what was staged, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from engine.backends.vllm.serving.runtime import Manifest
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes
from engine.errors import BadSpec


def entry_of(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """(dtype, shape, sha256 of the row-major bytes)."""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Raises BadSpec on a name that comes twice."""
    manifest: Manifest = {}
    for name, tensor in tensors:
        if name in manifest:
            raise BadSpec(f"tensor {name} was staged twice")
        manifest[name] = entry_of(tensor)
    return manifest


def manifest_of_files(paths: Sequence[Path]) -> Manifest:
    """Raises BadSpec on what is no whole safetensors file, or a name that comes twice."""
    return manifest_of(pair for path in paths for pair in read_tensors(path))


def digest_of(manifest: Manifest) -> str:
    """Equal for equal names, dtypes, shapes and bytes, in whatever order they came."""
    lines = (f"{name} {dtype} {list(shape)} {sha256}\n" for name, (dtype, shape, sha256) in sorted(manifest.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
