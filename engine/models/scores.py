"""The calls of handles of models with a scalar head: a value per token, and the score of a whole conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.errors import BadSpec
from engine.models.call_batching import CallBatcher
from engine.models.folder import head_of, scalar_head_message
from engine.models.samples import as_token_ids
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
    """A sequence whose only value is the one at the last of `token_ids`.

    A value is read at the position before a trained token. One trained token `end` is therefore appended. Its id has no
    effect: any id of the vocabulary works."""
    loss_mask = np.arange(len(token_ids) + 1) == len(token_ids)
    return TokenSequence(as_token_ids([*token_ids, end], "a sequence"), loss_mask)


def check_head(store: ObjectStore, base: ArtifactRef, head: Head, *, frozen: bool = False) -> None:
    """Raises BadSpec if the registered model cannot be used with `head`.

    A model with a scalar head cannot be a language model. A `frozen` language model cannot be a scoring model, because
    its new scalar head would never be trained."""
    model_head = head_of(store, base)
    if (model_head, head) == ("scalar", "lm"):
        raise BadSpec(scalar_head_message(registered_key(base)))
    if frozen and (model_head, head) == ("lm", "scalar"):
        raise BadSpec(
            f"{registered_key(base)} is a language model, so its scores would come from a new head with random "
            "weights; train one with RewardModelling, or spawn it with spawn_train and train it"
        )


class ScoringMixin:
    """Adds the scoring calls to the handles of models."""

    workspace: Workspace
    renderer: Renderer
    engine: Engine
    _values: CallBatcher[TokenSequence, list[float]]

    async def policy(self) -> PolicyRef:
        raise NotImplementedError

    async def score(self, tokenized: TokenizedThread) -> list[float]:
        """Returns the value at the position before each trained token (weight > 0), in the order of
        `logprobs_per_token`. Raises BadSpec for a language model."""
        return await self._values.submit(await self.policy(), self.renderer.sequence(tokenized))

    async def score_last_token(self, thread: StringThread | TokenizedThread) -> float:
        """Returns the value at the last token: a reward model's score of the whole conversation."""
        tokenized = self.renderer.tokenize(thread) if isinstance(thread, StringThread) else thread
        # serialize raises UnsupportedFragment for images, which no scalar model takes.
        ids, _ = self.renderer.serialize(tokenized)
        end = self.renderer.tokenizer.eos_token_ids[0]
        (score,) = await self._values.submit(await self.policy(), last_token_sequence(ids, end=end))
        return score

    async def _read_values(self, key: Hashable, items: list[TokenSequence]) -> list[list[float]]:
        request = LogprobsRequest(cast(PolicyRef, key), items, max_tokens=self.workspace.max_tokens)
        return await self.engine.values(request, epoch=self.workspace.epoch)
