"""The typed, serialisable parts of a turn: text, images, reasoning, tool calls and tool responses."""

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
    """A `data:` URL with the image's bytes, or the path of a local file. A path becomes a `data:` URL when the thread
    is loaded into a dataset or rendered. Any other URL is refused: images are never downloaded."""


class ReasoningFragment(Frozen):
    """Reasoning that an assistant wrote before its answer. It is not part of the answer's text."""

    kind: Literal["reasoning"] = "reasoning"
    text: str


class ToolCallFragment(Frozen):
    """An assistant's request to run a tool."""

    kind: Literal["tool_call"] = "tool_call"
    id: str
    name: str
    arguments: dict[str, JsonValue] = {}
    problem: str | None = Field(None, exclude_if=lambda problem: problem is None)
    """Why the call is malformed and cannot be executed. None for a valid call."""


class ToolResponseFragment(Frozen):
    """The response of a tool to the call with the same id."""

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
"""The roles whose turns may hold a kind of fragment."""
