"""What a turn may hold besides plain text: typed, frozen, serialisable pieces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from storage.serialization import Frozen

Role = Literal["system", "user", "assistant", "tool"]


class TextFragment(Frozen):
    """Plain text."""

    kind: Literal["text"] = "text"
    text: str


class ImageFragment(Frozen):
    """An image, for a vision-language model (engine.text.images)."""

    kind: Literal["image"] = "image"
    url: str
    """A `data:` URL that carries it, or the path of a local file, which becomes one when the thread enters a dataset or
    is rendered. Other URLs are refused then: images are never fetched."""


class ReasoningFragment(Frozen):
    """What an assistant thought before it answered; not part of the answer's text."""

    kind: Literal["reasoning"] = "reasoning"
    text: str


class ToolCallFragment(Frozen):
    """An assistant's request to run a tool."""

    kind: Literal["tool_call"] = "tool_call"
    id: str
    name: str
    arguments: dict[str, JsonValue] = {}


class ToolResponseFragment(Frozen):
    """What a tool answered to the call of the same id."""

    kind: Literal["tool_response"] = "tool_response"
    id: str
    text: str
    name: str | None = None


Fragment = Annotated[
    TextFragment | ImageFragment | ReasoningFragment | ToolCallFragment | ToolResponseFragment,
    Field(discriminator="kind"),
]

ALLOWED_ROLES: dict[str, tuple[Role, ...]] = {
    "text": ("system", "user", "assistant", "tool"),
    "image": ("user", "tool"),
    "reasoning": ("assistant",),
    "tool_call": ("assistant",),
    "tool_response": ("tool",),
}
"""Which roles may hold a fragment of a kind."""
