"""Conversations of more tokens than a run trains on: an error, cut, or dropped and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pydantic import Field

from engine.errors import SampleTooLong
from engine.protocol import TokenSequence
from engine.text.stored_models import context_length_of
from engine.workspace import Workspace
from storage.serialization import Frozen
from storage.store.artifacts import ArtifactRef

Cut = Literal["error", "left", "right", "drop"]


class LengthPlan(Frozen):
    """How long a conversation may be, and what happens to a longer one."""

    max_tokens: int | None = Field(None, ge=1)
    """None: the model's context."""
    truncation: Cut = "error"
    """left keeps the last tokens, right the first; drop leaves the conversation out."""

    def limit(self, workspace: Workspace, base: ArtifactRef) -> int | None:
        """Tokens that a conversation may have: `max_tokens`, the model's context, and the max_batch_size that the model
        was spawned with. None where nothing is said, and the engine will refuse what does not fit."""
        if self == ANY_LENGTH and workspace.max_tokens is None:
            return None
        context = context_length_of(workspace.open_store(), base)
        return shortest(self.max_tokens, context, workspace.max_tokens)


ANY_LENGTH = LengthPlan()


def shortest(*limits: int | None) -> int | None:
    """The least of the limits that are given; None where none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_uncut(lengths: LengthPlan) -> None:
    """Raises ValueError for a plan that cuts, where only whole conversations can be compared or scored."""
    if lengths.truncation in ("left", "right"):
        raise ValueError(
            f"truncation={lengths.truncation!r} cuts conversations, and answers are compared or scored whole; set "
            "truncation to error or drop"
        )


def too_long(row: str, length: int, limit: int, *, remedy: str) -> SampleTooLong:
    """The error about a row of more tokens than fit."""
    return SampleTooLong(
        f"{row} has {length} tokens, and at most {limit} fit (algorithm.max_tokens, the model's context, or the "
        f"max_batch_size that it was spawned with); set algorithm.truncation to {remedy}, or raise the limit"
    )


def cut(
    sequence: TokenSequence, plan: LengthPlan, limit: int | None, *, name: Callable[[], str]
) -> TokenSequence | None:
    """The sequence, of at most `limit` tokens; None for a longer one that the plan drops. Nothing predicts the first
    token that is kept, so it is not trained. Raises SampleTooLong, which says the `name` of the sequence."""
    length = len(sequence.token_ids)
    if limit is None or length <= limit:
        return sequence
    if plan.truncation == "drop":
        return None
    if plan.truncation == "error":
        raise too_long(name(), length, limit, remedy="left, right or drop")
    if sequence.images:
        raise SampleTooLong(
            f"{name()} has {length} tokens, of which {limit} are allowed, and images, which are not cut; raise "
            "algorithm.max_tokens, or leave the row out"
        )
    kept = slice(length - limit, None) if plan.truncation == "left" else slice(limit)
    return replace(sequence, token_ids=sequence.token_ids[kept], weights=[0.0, *sequence.weights[kept][1:]])
