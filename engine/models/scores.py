"""What handles of models with a scalar head give: values per token, and the score of a whole conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, cast

from engine.errors import BadSpec
from engine.models.call_batching import CallBatcher
from engine.models.folder import head_of, scalar_head_message
from engine.protocol import Engine, LogprobsRequest, TokenSequence
from engine.specs.adapters import Head
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from storage.chain.records import PolicyRef
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

if TYPE_CHECKING:
    from engine.workspace import Workspace


def last_token_sequence(token_ids: Sequence[int], *, end: int) -> TokenSequence:
    """The sequence whose one value is that of its last token. A value is read at the position before a trained token,
    so `end` follows, trained alone; nothing reads it, and any id of the vocabulary does."""
    return TokenSequence([*token_ids, end], [0.0] * len(token_ids) + [1.0])


def check_head(store: ObjectStore, base: ArtifactRef, wanted: Head, *, frozen: bool = False) -> None:
    """Raises BadSpec where the registered model has a scalar head and a language model is wanted, or where the scores
    of a new head, which `frozen` would leave as drawn, are wanted of a language model."""
    has = head_of(store, base)
    if (has, wanted) == ("scalar", "lm"):
        raise BadSpec(scalar_head_message(registered_key(base)))
    if frozen and (has, wanted) == ("lm", "scalar"):
        raise BadSpec(
            f"{registered_key(base)} is a language model, so that it would score by a new head, at random; train one "
            "with RewardModelling, or spawn it with spawn_train and train it"
        )


class ScoringMixin:
    """Mixed into handles (engine.handles)."""

    workspace: Workspace
    renderer: Renderer
    engine: Engine
    _values: CallBatcher[TokenSequence, list[float]]

    async def policy(self) -> PolicyRef:
        raise NotImplementedError

    async def score(self, tokenized: TokenizedThread) -> list[float]:
        """The value at the position before each trained token (weight > 0), as `logprobs_per_token` lists them. Raises
        BadSpec for a language model."""
        return await self._values.submit(await self.policy(), self.renderer.sequence(tokenized))

    async def score_last_token(self, thread: StringThread | TokenizedThread) -> float:
        """The value at the last token: what a reward model says of the whole conversation."""
        tokenized = self.renderer.tokenize(thread) if isinstance(thread, StringThread) else thread
        ids, _ = self.renderer.serialize(tokenized)
        end = self.renderer.tokenizer.eos_token_ids[0]
        (score,) = await self._values.submit(await self.policy(), last_token_sequence(ids, end=end))
        return score

    async def _read_values(self, key: Hashable, items: list[TokenSequence]) -> list[list[float]]:
        request = LogprobsRequest(cast(PolicyRef, key), items, max_tokens=self.workspace.max_tokens)
        return await self.engine.values(request, epoch=self.workspace.epoch)
