"""Parses the replies of vLLM's workers into receipts or errors, for every transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.vllm.serving.runtime import Receipt
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


def receipt_from_replies(replies: Sequence[Mapping[str, Any]], state: str, *, who: str = "vLLM") -> Receipt:
    """The receipt of one load, over all workers of one engine. Raises SamplerOutOfSync if a worker reports an error."""
    check_replies(replies, [reply["worker_id"] for reply in replies], who=who)
    if not replies or any(reply["state"] != state for reply in replies):
        states = [reply["state"] for reply in replies]
        raise SamplerOutOfSync(f"{who} replied for other weights than {state}: {states}")
    unread = set[str]()
    for reply in replies:
        unread.update(reply["unread"])
    seconds = {part: max(reply["seconds"][part] for reply in replies) for part in replies[0]["seconds"]}
    return Receipt(
        state=state,
        tensors=replies[0]["tensors"],
        values_read=sum(reply["values"] for reply in replies),
        unread=tuple(sorted(unread)),
        seconds=seconds,
    )


def merge_receipts(receipts: Sequence[Receipt], state: str) -> Receipt:
    """One receipt for all replicas. Raises SamplerOutOfSync if they received different numbers of tensors."""
    if len({receipt.tensors for receipt in receipts}) > 1:
        raise SamplerOutOfSync(f"the replicas hold unequal numbers of tensors of {state}: {receipts}")
    unread = set[str]()
    for receipt in receipts:
        unread.update(receipt.unread)
    seconds = {part: max(receipt.seconds[part] for receipt in receipts) for part in receipts[0].seconds}
    return Receipt(
        state=state,
        tensors=receipts[0].tensors,
        values_read=sum(receipt.values_read for receipt in receipts),
        unread=tuple(sorted(unread)),
        seconds=seconds,
    )
