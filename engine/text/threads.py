"""Conversations: `StringThread` in text, `TokenizedThread` in token ids. Both are immutable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import JsonValue, model_serializer

from engine.text.errors import ThreadError
from engine.text.fragments import Role
from engine.text.turns import (
    Content,
    Turn,
    check_metadata,
    check_turn,
    check_turns,
    check_weights,
    default_weight,
    plain_content,
    shown,
    turn_messages,
)
from storage.serialization import Frozen, canonical_json


class StringThread(Frozen):
    """A conversation: turns of (role, content), metadata that travels with it, and a training weight per turn.

    >>> StringThread(turns=[("user", "What is 2+3?")], metadata={"answer": "5"}).assistant("5").last_content()
    '5'

    Content is a str or a list of fragments (`engine.text.fragments`). Weights say which turns are trained (> 0): when
    none are set, every assistant turn has weight 1 and all others 0. Appending returns a new thread; weights set
    before concern the turns that were there, an appended assistant turn has weight 1 unless set again.

    Raises ThreadError on an unknown role, content that is neither text nor fragments, metadata JSON cannot say.
    """

    turns: tuple[Turn, ...] = ()
    metadata: dict[str, JsonValue] = {}
    weights: tuple[float, ...] | None = None
    """One per turn; None when they are the default: 1 for each assistant turn. Only assistant turns can be trained."""

    def __init__(
        self,
        turns: Iterable[Any] = (),
        metadata: Mapping[str, Any] | None = None,
        weights: Sequence[float] | None = None,
        **unknown: Any,
    ) -> None:
        checked = check_turns(turns)
        fields = {
            "turns": checked,
            "metadata": check_metadata({} if metadata is None else metadata),
            "weights": check_weights(weights, checked),
        }
        super().__init__(**fields, **unknown)

    @model_serializer
    def _as_dict(self) -> dict[str, Any]:
        return {
            "turns": [{"role": turn.role, "content": plain_content(turn.content)} for turn in self.turns],
            "metadata": self.metadata,
            "weights": None if self.weights is None else list(self.weights),
        }

    # -- appending ---------------------------------------------------------------------------------------------

    def append(self, role: str, content: Any) -> Self:
        """A new thread with one more turn."""
        turn = check_turn((role, content), len(self.turns))
        weights = None if self.weights is None else (*self.weights, default_weight(turn))
        return type(self)((*self.turns, turn), self.metadata, weights)

    def system(self, content: Any) -> Self:
        return self.append("system", content)

    def user(self, content: Any) -> Self:
        return self.append("user", content)

    def assistant(self, content: Any) -> Self:
        return self.append("assistant", content)

    def tool(self, content: Any) -> Self:
        return self.append("tool", content)

    def with_metadata(self, metadata: Mapping[str, Any]) -> Self:
        """A new thread with this metadata instead."""
        return type(self)(self.turns, metadata, self.weights)

    # -- reading -----------------------------------------------------------------------------------------------

    def get_turns(self) -> list[Turn]:
        return list(self.turns)

    def last_content(self) -> str:
        """The text of the last turn. Raises ThreadError when there is none."""
        if not self.turns:
            raise ThreadError("the thread has no turns, expected at least one; begin it with .user(…)")
        return self.turns[-1].text

    def completion(self) -> str | None:
        """The text of the last turn if it is the assistant's, else None."""
        return self.turns[-1].text if self.turns and self.turns[-1].role == "assistant" else None

    def messages(self) -> list[dict[str, Any]]:
        """The turns as chat templates take them: `role` and `content`, and where present `reasoning_content`,
        `tool_calls`, `tool_call_id`. A tool turn of several responses becomes as many messages. Content is a str,
        or a list of parts when it holds an image."""
        return [message for turn in self.turns for message in turn_messages(turn)]

    # -- weights -----------------------------------------------------------------------------------------------

    def get_turn_weights(self) -> list[float]:
        """One weight per turn; > 0 is trained."""
        return list(self.weights) if self.weights is not None else [default_weight(turn) for turn in self.turns]

    def with_weight_all_assistant_turns(self) -> Self:
        return self.with_weight_assistant_turns_from_index(0)

    def with_weight_last_assistant_turn(self) -> Self:
        """Weight 1 on the last assistant turn, 0 on all others. Raises ThreadError when there is none."""
        indices = [index for index, turn in enumerate(self.turns) if turn.role == "assistant"]
        if not indices:
            raise ThreadError(
                f"the thread's roles are {[turn.role for turn in self.turns]}, expected an assistant turn to train; "
                "append one with .assistant(…)"
            )
        return self.with_weight_assistant_turns_from_index(indices[-1])

    def with_weight_assistant_turns_from_index(self, index: int) -> Self:
        """Weight 1 on the assistant turns at or after turn `index` (0-based, over all turns), 0 on all others."""
        if index < 0:
            raise ThreadError(f"the index is {index}, expected 0 or more: turns are counted from the first")
        weights = [default_weight(turn) if at >= index else 0.0 for at, turn in enumerate(self.turns)]
        return type(self)(self.turns, self.metadata, weights)

    # -- JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line of canonical JSON: equal threads give equal bytes."""
        return canonical_json(self).decode("utf-8")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The thread `to_json` wrote. Raises ThreadError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ThreadError(f"not JSON ({error}); expected what StringThread.to_json wrote") from error
        if not isinstance(data, dict) or "turns" not in data or data.keys() - {"turns", "metadata", "weights"}:
            raise ThreadError(
                f"given {shown(data)}; expected an object of 'turns', 'metadata' and 'weights', as to_json writes it"
            )
        return cls(data["turns"], data.get("metadata"), data.get("weights"))


@dataclass(frozen=True, slots=True)
class TokenizedTurn:
    """The tokens of one turn, template included. `token_ids` and `weights` have equal length."""

    role: Role
    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    """Per token; > 0 is trained."""
    header: int = 0
    """How many of the first tokens the template wrote before the content."""
    logprobs: tuple[float, ...] | None = None
    """Nats of the sampled tokens, all those after the header, under the sampler; None when the turn was not sampled."""
    content: Content | None = None
    """Where the tokens came from; None when they were sampled."""

    @property
    def is_open(self) -> bool:
        """True for an assistant turn of which only the header is there: a sampler writes the rest."""
        return self.logprobs == ()

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.token_ids):
            raise ThreadError(f"{len(self.token_ids)} tokens and {len(self.weights)} weights; give one weight each")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids) - self.header:
            raise ThreadError(
                f"{len(self.logprobs)} logprobs for {len(self.token_ids) - self.header} sampled tokens; give one each"
            )


@dataclass(frozen=True, slots=True)
class TokenizedThread:
    """A conversation in token ids. Sampled turns keep the sampler's ids for good: they are never re-tokenised."""

    turns: tuple[TokenizedTurn, ...]
    metadata: dict[str, JsonValue] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def weights(self) -> list[float]:
        """Per token; > 0 is trained."""
        return [weight for turn in self.turns for weight in turn.weights]

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprob (nats) of each trained token. Raises ThreadError if a trained turn was not sampled."""
        found = []
        for index, turn in enumerate(self.turns):
            trained = [weight > 0 for weight in turn.weights]
            if not any(trained):
                continue
            if turn.logprobs is None:
                raise ThreadError(
                    f"turn {index} ({turn.role}) is trained but was not sampled, so it has no sampler logprobs; "
                    "use logprobs_per_token of a model"
                )
            found += [value for value, keep in zip(turn.logprobs, trained[turn.header :], strict=True) if keep]
        return found

    def len_last_turn(self) -> int:
        """Tokens of the last turn, the template's header left out. Raises ThreadError when there is no turn."""
        if not self.turns:
            raise ThreadError("the tokenized thread has no turns, expected at least one")
        return len(self.turns[-1].token_ids) - self.turns[-1].header
