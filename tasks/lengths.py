"""Conversations of more tokens than a run trains on: an error, or cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from engine.errors import SampleTooLong
from engine.protocol import TokenSequence
from engine.text.tokenizers import context_length_of
from storage.artifacts import ArtifactRef
from storage.models import Frozen
from storage.objects import ObjectStore

Cut = Literal["error", "left", "right"]


class LengthPlan(Frozen):
    """How long a conversation may be, and what happens to a longer one."""

    max_tokens: int | None = Field(None, ge=1)
    """None: the model's context."""
    truncation: Cut = "error"
    """left keeps the last tokens, right the first."""

    def limit(self, store: ObjectStore, base: ArtifactRef) -> int | None:
        """Tokens that a conversation may have; None where nothing is said, and the engine will refuse what does not
        fit."""
        if self == ANY_LENGTH:
            return None
        context = context_length_of(store, base)
        return min((one for one in (self.max_tokens, context) if one is not None), default=None)


ANY_LENGTH = LengthPlan()


def cut(sequence: TokenSequence, plan: LengthPlan, limit: int | None, *, row: str) -> TokenSequence:
    """The sequence, of at most `limit` tokens. Nothing predicts the first that is kept, so it is not trained. Raises
    SampleTooLong, naming the `row`."""
    length = len(sequence.token_ids)
    if limit is None or length <= limit:
        return sequence
    if plan.truncation == "error":
        raise SampleTooLong(
            f"{row} has {length} tokens, and at most {limit} fit (algorithm.max_tokens, or the model's context); "
            "set algorithm.truncation to left or right, or raise max_tokens"
        )
    if sequence.images:
        raise SampleTooLong(
            f"{row} has {length} tokens, of which {limit} are allowed, and images, which are not cut; raise "
            "algorithm.max_tokens, or leave the row out"
        )
    kept = slice(length - limit, None) if plan.truncation == "left" else slice(limit)
    return replace(sequence, token_ids=sequence.token_ids[kept], weights=[0.0, *sequence.weights[kept][1:]])
