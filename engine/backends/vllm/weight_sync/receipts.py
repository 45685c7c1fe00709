"""What the workers' extension answered, as receipts or as the errors that it tells of. Any transport's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.vllm.serving.runtime import Receipt
from engine.errors import SamplerOutOfSync


def broken(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a worker says that no load will mend it: another process must take its place."""
    return any(answer.get("broken") for answer in answers)


def refuse_wrong(answers: Sequence[Mapping[str, Any]], boots: Sequence[str], *, who: str = "vLLM") -> None:
    """Raises SamplerOutOfSync unless every worker agrees and is the process that `boots` names, in this order."""
    for answer in answers:
        if answer.get("wrong"):
            raise SamplerOutOfSync(f"{who}, worker {answer['rank']}: {answer['wrong']}")
    found = [answer["boot"] for answer in answers]
    if found != list(boots):
        raise SamplerOutOfSync(f"{who} was restarted: its workers are not those that the weights were loaded into")


def receipt_of(answers: Sequence[Mapping[str, Any]], state: str, *, who: str = "vLLM") -> Receipt:
    """Of one load, over all workers of one engine. Raises SamplerOutOfSync where one of them refused."""
    refuse_wrong(answers, [answer["boot"] for answer in answers], who=who)
    if not answers or any(answer["state"] != state for answer in answers):
        raise SamplerOutOfSync(f"{who} answered for other weights than {state}: {[a['state'] for a in answers]}")
    parts = answers[0]["seconds"]
    return Receipt(
        state=state,
        tensors=answers[0]["tensors"],
        values_read=sum(answer["values"] for answer in answers),
        unread=tuple(sorted({name for answer in answers for name in answer["unread"]})),
        seconds={part: max(answer["seconds"][part] for answer in answers) for part in parts},
    )


def together(receipts: Sequence[Receipt], state: str) -> Receipt:
    """One receipt of all replicas. Raises SamplerOutOfSync when they took unequal numbers of tensors."""
    if len({receipt.tensors for receipt in receipts}) > 1:
        raise SamplerOutOfSync(f"the replicas hold unequal numbers of tensors of {state}: {receipts}")
    return Receipt(
        state=state,
        tensors=receipts[0].tensors,
        values_read=sum(receipt.values_read for receipt in receipts),
        unread=tuple(sorted({name for receipt in receipts for name in receipt.unread})),
        seconds={part: max(r.seconds[part] for r in receipts) for part in receipts[0].seconds},
    )
