"""Conversations: `StringThread` holds text, `TokenizedThread` holds token ids. Both are immutable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never, Self

from pydantic import JsonValue, model_serializer

from engine.errors import ThreadError
from engine.text.fragments import Role
from engine.text.turns import (
    Content,
    Turn,
    check_metadata,
    check_tools,
    check_weights,
    content_as_json,
    default_weight,
    parse_turn,
    parse_turns,
    short_repr,
    turn_messages,
)
from storage.serialization import Frozen, canonical_json

_FIELDS = {"turns", "metadata", "weights", "tools"}


class StringThread(Frozen):
    """A conversation: turns of (role, content), metadata that stays with it, and a training weight per turn.

    >>> StringThread(turns=[("user", "What is 2+3?")], metadata={"answer": "5"}).assistant("5").last_content()
    '5'

    Content is a str or a list of fragments (`engine.text.fragments`). Turns with a weight > 0 are trained. By default
    every assistant turn has weight 1 and every other turn 0. Appending returns a new thread: the turns before keep
    their weights, and an appended assistant turn has weight 1.

    Raises ThreadError on an unknown role, content that is neither text nor fragments, and metadata that JSON cannot
    represent.
    """

    turns: tuple[Turn, ...] = ()
    metadata: dict[str, JsonValue] = {}
    weights: tuple[float, ...] | None = None
    """Training weight of each turn. None stands for the default weights: 1 for each assistant turn and 0 for any other.
    Only assistant turns can be trained."""
    tools: tuple[dict[str, JsonValue], ...] = ()
    """The tools that the assistant may call, in the format of OpenAI's API."""

    def __init__(
        self,
        turns: Iterable[Any] = (),
        metadata: Mapping[str, Any] | None = None,
        weights: Sequence[float] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **unknown: Never,  # pydantic refuses them at run time; a type checker reports them
    ) -> None:
        checked = parse_turns(turns)
        fields = {
            "turns": checked,
            "metadata": check_metadata({} if metadata is None else metadata),
            "weights": check_weights(weights, checked),
            "tools": check_tools(tools) if tools else (),
        }
        super().__init__(**fields, **unknown)

    @model_serializer
    def _as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "turns": [{"role": turn.role, "content": content_as_json(turn.content)} for turn in self.turns],
            "metadata": self.metadata,
            "weights": None if self.weights is None else list(self.weights),
        }
        # A thread without tools has the bytes that it had before threads had tools.
        return fields | {"tools": list(self.tools)} if self.tools else fields

    # -- appending ---------------------------------------------------------------------------------------------

    def append(self, role: str, content: Any) -> Self:
        """Returns a new thread with one more turn."""
        turn = parse_turn((role, content), len(self.turns))
        weights = self.weights
        if weights is not None:
            weights = (*weights, default_weight(turn))
        return type(self)((*self.turns, turn), self.metadata, weights, self.tools)

    def system(self, content: Any) -> Self:
        return self.append("system", content)

    def user(self, content: Any) -> Self:
        return self.append("user", content)

    def assistant(self, content: Any) -> Self:
        return self.append("assistant", content)

    def tool(self, content: Any) -> Self:
        return self.append("tool", content)

    def with_metadata(self, metadata: Mapping[str, Any]) -> Self:
        """Returns a new thread with this metadata in place of the old."""
        return type(self)(self.turns, metadata, self.weights, self.tools)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Returns a new thread with these tools, in the format of OpenAI's API, in place of the old."""
        return type(self)(self.turns, self.metadata, self.weights, tools)

    # -- reading -----------------------------------------------------------------------------------------------

    def get_turns(self) -> list[Turn]:
        return list(self.turns)

    def last_content(self) -> str:
        """Returns the text of the last turn. Raises ThreadError when there is no turn."""
        if not self.turns:
            raise ThreadError("the thread has no turns, expected at least one; begin it with .user(…)")
        return self.turns[-1].text

    def completion(self) -> str | None:
        """Returns the text of the last turn if it is the assistant's, else None."""
        if not self.turns or self.turns[-1].role != "assistant":
            return None
        return self.turns[-1].text

    def messages(self) -> list[dict[str, Any]]:
        """Returns the messages that chat templates take: `role` and `content`, and where present `reasoning_content`,
        `tool_calls`, `tool_call_id`. A tool turn with several responses becomes one message per response. Content is
        a str, or a list of parts when it holds an image."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            messages.extend(turn_messages(turn))
        return messages

    # -- weights -----------------------------------------------------------------------------------------------

    def get_turn_weights(self) -> list[float]:
        """Returns one weight per turn. Turns with a weight > 0 are trained."""
        if self.weights is not None:
            return list(self.weights)
        return [default_weight(turn) for turn in self.turns]

    def with_weight_all_assistant_turns(self) -> Self:
        return self.with_weight_assistant_turns_from_index(0)

    def with_weight_last_assistant_turn(self) -> Self:
        """Returns a new thread with weight 1 on the last assistant turn and 0 on all others.

        Raises ThreadError when there is no assistant turn.
        """
        indices = [index for index, turn in enumerate(self.turns) if turn.role == "assistant"]
        if not indices:
            raise ThreadError(
                f"the thread's roles are {[turn.role for turn in self.turns]}, expected an assistant turn to train; "
                "append one with .assistant(…)"
            )
        return self.with_weight_assistant_turns_from_index(indices[-1])

    def with_weight_assistant_turns_from_index(self, index: int) -> Self:
        """Returns a new thread with weight 1 on the assistant turns from turn `index` on and 0 on all others.

        `index` is 0-based and counts all turns.
        """
        if index < 0:
            raise ThreadError(f"the index is {index}, expected 0 or more: turns are counted from the first")
        weights = [0.0] * min(index, len(self.turns))
        for turn in self.turns[index:]:
            weights.append(default_weight(turn))
        return type(self)(self.turns, self.metadata, weights, self.tools)

    # -- JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns one line of canonical JSON: equal threads give equal bytes."""
        return canonical_json(self).decode("utf-8")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the thread that `to_json` wrote. Raises ThreadError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ThreadError(f"not JSON ({error}); expected what StringThread.to_json wrote") from error
        if not isinstance(data, dict) or "turns" not in data or data.keys() - _FIELDS:
            raise ThreadError(
                f"given {short_repr(data)}; expected an object with 'turns', 'metadata' and 'weights', as to_json "
                "writes it"
            )
        return cls(data["turns"], data.get("metadata"), data.get("weights"), data.get("tools", ()))


@dataclass(frozen=True, slots=True)
class TokenizedTurn:
    """The tokens of one turn, including those of the template. `token_ids` and `weights` have equal length."""

    role: Role
    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    """Training weight of each token. Tokens with a weight > 0 are trained."""
    header: int = 0
    """Number of tokens at the start that the template wrote before the content."""
    logprobs: tuple[float, ...] | None = None
    """Logprobs of the tokens after the header under the sampler, in nats. None when the turn was not sampled."""
    content: Content | None = None
    """The content that the tokens were made from. None when they were sampled."""

    @property
    def is_open(self) -> bool:
        """Whether the turn has only its header, and a sampler is to complete it."""
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
    """A conversation in token ids. Sampled turns keep the sampler's ids and are never tokenised again."""

    turns: tuple[TokenizedTurn, ...]
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    tools: tuple[dict[str, JsonValue], ...] = ()
    """The tools that the assistant may call, in the format of OpenAI's API."""

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        token_ids: list[int] = []
        for turn in self.turns:
            token_ids.extend(turn.token_ids)
        return token_ids

    @property
    def weights(self) -> list[float]:
        """Training weight of each token. Tokens with a weight > 0 are trained."""
        weights: list[float] = []
        for turn in self.turns:
            weights.extend(turn.weights)
        return weights

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprob (nats) of each trained token. Raises ThreadError if a trained turn was not sampled."""
        logprobs: list[float] = []
        for index, turn in enumerate(self.turns):
            # A turn that is not trained needs no logprobs, sampled or not.
            loss_mask = [weight > 0 for weight in turn.weights]
            if not any(loss_mask):
                continue
            if turn.logprobs is None:
                raise ThreadError(
                    f"turn {index} ({turn.role}) is trained but was not sampled, so it has no sampler logprobs; "
                    "use logprobs_per_token of a model"
                )
            # The header of a sampled turn was written by the template and has no logprobs.
            sampled_mask = loss_mask[turn.header :]
            logprobs += [value for value, trained in zip(turn.logprobs, sampled_mask, strict=True) if trained]
        return logprobs

    def with_context(self, turns: int) -> TokenizedThread:
        """Returns the thread with its first `turns` turns as context, which is not trained. No id changes."""
        context = [replace(turn, weights=(0.0,) * len(turn.weights)) for turn in self.turns[:turns]]
        return replace(self, turns=(*context, *self.turns[turns:]))

    def len_last_turn(self) -> int:
        """Returns the number of tokens of the last turn, without the template's header.

        Raises ThreadError when there is no turn.
        """
        if not self.turns:
            raise ThreadError("the tokenized thread has no turns, expected at least one")
        return len(self.turns[-1].token_ids) - self.turns[-1].header
