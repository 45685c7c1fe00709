"""What happens to conversations that are longer than a run allows: an error, truncation, or dropping."""

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
    """Longest conversation in tokens; None: the model's context."""
    truncation: Cut = "error"
    """left keeps the last tokens, right keeps the first tokens, drop leaves the conversation out."""

    def limit(self, workspace: Workspace, base: ArtifactRef) -> int | None:
        """Tokens that a conversation may have: the least of `max_tokens`, the model's context and the max_batch_size
        that the model was spawned with. None if neither this plan nor the model sets a limit; the engine then refuses a
        conversation that does not fit."""
        # Without any setting the engine decides. Reading the model's context would cost a request.
        if self == ANY_LENGTH and workspace.max_tokens is None:
            return None
        context = context_length_of(workspace.open_store(), base)
        return shortest(self.max_tokens, context, workspace.max_tokens)


ANY_LENGTH = LengthPlan()


def shortest(*limits: int | None) -> int | None:
    """The least of the limits that are not None; None if all are None."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_uncut(lengths: LengthPlan) -> None:
    """Raises ValueError for a plan that truncates, where only whole conversations can be compared or scored."""
    if lengths.truncation in ("left", "right"):
        raise ValueError(
            f"truncation={lengths.truncation!r} shortens conversations, but answers are compared or scored as a whole; "
            "set truncation to error or drop"
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
    """The sequence with at most `limit` tokens, or None if the plan drops it. The first remaining token is not trained,
    because no token before it predicts it. Raises SampleTooLong with the `name` of the sequence."""
    length = len(sequence.token_ids)
    if limit is None or length <= limit:
        return sequence
    if plan.truncation == "drop":
        return None
    if plan.truncation == "error":
        raise too_long(name(), length, limit, remedy="left, right or drop")
    if sequence.images:
        raise SampleTooLong(
            f"{name()} has {length} tokens, at most {limit} are allowed, and it has images, which cannot be truncated; "
            "raise algorithm.max_tokens, or leave the row out"
        )
    # left keeps the last tokens, right keeps the first ones
    part = slice(length - limit, None) if plan.truncation == "left" else slice(limit)
    loss_mask = sequence.loss_mask[part].copy()
    loss_mask[0] = False
    return replace(sequence, token_ids=sequence.token_ids[part], loss_mask=loss_mask)
