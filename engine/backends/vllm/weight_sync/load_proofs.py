"""Turns the replies of vLLM's workers into the proof of a load, or into an error. Every transport uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.vllm.serving.runtime import LoadProof
from engine.errors import SamplerOutOfSync


def any_broken(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a worker reports that no further load can repair it, so that its process must be replaced."""
    return any(reply.get("broken") for reply in replies)


def check_replies(replies: Sequence[Mapping[str, Any]], worker_ids: Sequence[str], *, who: str = "vLLM") -> None:
    """Raises SamplerOutOfSync if a worker reports an error, or the workers are not those of `worker_ids`, in order."""
    for reply in replies:
        if reply.get("error"):
            raise SamplerOutOfSync(f"{who}, worker {reply['rank']}: {reply['error']}")
    if [reply["worker_id"] for reply in replies] != list(worker_ids):
        raise SamplerOutOfSync(f"{who} was restarted: its workers are not those that the weights were loaded into")


def proof_from_replies(replies: Sequence[Mapping[str, Any]], state: str, *, who: str = "vLLM") -> LoadProof:
    """The proof of one load, over all workers of one engine. Raises SamplerOutOfSync if a worker reports an error."""
    check_replies(replies, [reply["worker_id"] for reply in replies], who=who)
    if not replies or any(reply["state"] != state for reply in replies):
        states = [reply["state"] for reply in replies]
        raise SamplerOutOfSync(f"{who} replied for other weights than {state}: {states}")
    unread = set[str]()
    for reply in replies:
        unread.update(reply["unread"])
    seconds = {part: max(reply["seconds"][part] for reply in replies) for part in replies[0]["seconds"]}
    return LoadProof(
        state=state,
        tensors=replies[0]["tensors"],
        values_read=sum(reply["values"] for reply in replies),
        unread=tuple(sorted(unread)),
        seconds=seconds,
    )


def merge_proofs(proofs: Sequence[LoadProof], state: str) -> LoadProof:
    """One proof for all replicas. Raises SamplerOutOfSync if they received different numbers of tensors."""
    if len({proof.tensors for proof in proofs}) > 1:
        raise SamplerOutOfSync(f"the replicas hold unequal numbers of tensors of {state}: {proofs}")
    unread = set[str]()
    for proof in proofs:
        unread.update(proof.unread)
    seconds = {part: max(proof.seconds[part] for proof in proofs) for part in proofs[0].seconds}
    return LoadProof(
        state=state,
        tensors=proofs[0].tensors,
        values_read=sum(proof.values_read for proof in proofs),
        unread=tuple(sorted(unread)),
        seconds=seconds,
    )
