"""Digests of weights: sha256 over names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor

from engine.backends.weight_files.tensor_files import tensor_bytes


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], *, base: str = "") -> tuple[str, dict[str, str]]:
    """(digest of all tensors, digest of each by name). The tensors are sorted by name. `base` is the digest of the
    weights that these add to, such as those under an adapter."""
    digests = {name: digest_tensor(tensor) for name, tensor in tensors}
    return combine_digests(digests, base=base)


def digest_tensor(tensor: Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def combine_digests(digests: Mapping[str, str], *, base: str = "") -> tuple[str, dict[str, str]]:
    """(digest of all, `digests`) for digests by name, which are sorted by name."""
    lines = [f"base {base}\n"] if base else []
    lines += [f"{name} {digest}\n" for name, digest in digests.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest(), dict(digests)
