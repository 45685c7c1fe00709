"""Turns the replies of vLLM's workers into the proof of a load, or into an error. Every transport uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.vllm.serving.runtime import LoadProof
from engine.errors import SamplerOutOfSync


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
