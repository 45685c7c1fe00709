"""Turns the replies of vLLM's workers into the proof of a load, or into an error. Every transport uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.backends.replicas.runtime import LoadProof, Manifest
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes
from engine.errors import BadSpec, SamplerOutOfSync


def any_broken(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a worker reports that no further load can repair it, so that its process must be replaced."""
    return any(reply.get("broken") for reply in replies)


def worker_ids_of(replies: Sequence[Mapping[str, Any]]) -> list[str]:
    return [reply["worker_id"] for reply in replies]


def check_replies(replies: Sequence[Mapping[str, Any]], worker_ids: Sequence[str], *, who: str = "vLLM") -> None:
    """Raises SamplerOutOfSync if a worker reports an error, or the workers are not those of `worker_ids`, in order."""
    for reply in replies:
        if reply.get("error"):
            raise SamplerOutOfSync(f"{who}, worker {reply['rank']}: {reply['error']}")
    # A worker makes a new id whenever its process starts, so other ids mean that the weights are gone.
    if worker_ids_of(replies) != list(worker_ids):
        raise SamplerOutOfSync(f"{who} was restarted: its workers are not those that the weights were loaded into")


def proof_from_replies(replies: Sequence[Mapping[str, Any]], state: str, *, who: str = "vLLM") -> LoadProof:
    """The proof of one load, over all workers of one engine. Raises SamplerOutOfSync if a worker reports an error."""
    check_replies(replies, worker_ids_of(replies), who=who)
    if not replies or any(reply["state"] != state for reply in replies):
        states = [reply["state"] for reply in replies]
        raise SamplerOutOfSync(f"{who} replied for other weights than {state}: {states}")
    # Each worker proves its part of the model, so one worker's reply is the proof of a part.
    parts: list[LoadProof] = []
    for reply in replies:
        unread = tuple(reply["unread"])
        parts.append(LoadProof(state, reply["tensors"], reply["values"], unread, reply["seconds"]))
    return _combine(parts, state)


def merge_proofs(proofs: Sequence[LoadProof], state: str) -> LoadProof:
    """One proof for all replicas. Raises SamplerOutOfSync if they received different numbers of tensors."""
    if len({proof.tensors for proof in proofs}) > 1:
        raise SamplerOutOfSync(f"the replicas hold unequal numbers of tensors of {state}: {proofs}")
    return _combine(proofs, state)


def _combine(proofs: Sequence[LoadProof], state: str) -> LoadProof:
    """One proof for all of several. They were made at the same time, so the longest duration counts."""
    values_read = 0
    unread = set[str]()
    seconds: dict[str, float] = {}
    for proof in proofs:
        values_read += proof.values_read
        unread.update(proof.unread)
        for part, duration in proof.seconds.items():
            seconds[part] = max(duration, seconds.get(part, 0.0))
    return LoadProof(state, proofs[0].tensors, values_read, tuple(sorted(unread)), seconds)


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
