"""Applies a chat template to a thread, and divides the template's text into what each turn adds to the turns before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import TemplateNotPrefixStable, TemplateRefused, ThreadError, UnsupportedFragment
from engine.text.fragments import ReasoningFragment, ToolCallFragment
from engine.text.images import images_in
from engine.text.tokenizers import Tokenizer
from engine.text.turns import Turn, fragments_of, turn_messages


class TurnText(NamedTuple):
    """The template's text of one turn."""

    header: str
    """The text that opens an assistant's turn; "" for the other roles."""
    body: str
    """The rest of the turn's text."""


def template_text(tokenizer: Tokenizer, turns: Sequence[Turn], *, generation_prompt: bool) -> str:
    """Returns the text that the template makes of the turns, with placeholders for the images where the model takes
    images.

    Raises:
        UnsupportedFragment: the model takes no images, or the template leaves out a tool call.
        ThreadError: the conversation's own text contains an image token.
    """
    # A template of a text model would drop an image without an error.
    images = images_in(turns)
    if images and tokenizer.images is None:
        raise UnsupportedFragment(
            f"turn {images[0][0]} holds an image; {tokenizer.name} takes text only: remove it, or take a "
            "vision-language model (idefics3, smolvlm)"
        )

    messages = _messages(turns)
    if tokenizer.images is not None:
        # The templates of these models accept content as a list of parts only.
        for message in messages:
            message["content"] = _as_parts(message["content"])
    text = tokenizer.apply_chat_template(messages, generation_prompt=generation_prompt)
    if tokenizer.images is not None:
        text = tokenizer.images.expand(text, len(images))

    # Templates that do not know tools drop the calls. Training on the rest would teach answers without their reason.
    for name in _tool_call_names(turns):
        if name not in text:
            raise UnsupportedFragment(
                f"the chat template of {tokenizer.name} does not write the tool call {name!r}; take a model "
                "whose template knows tools, or write the call as text"
            )
    return text


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.extend(turn_messages(turn))
    return messages


def _tool_call_names(turns: Sequence[Turn]) -> list[str]:
    names: list[str] = []
    for turn in turns:
        names.extend(part.name for part in fragments_of(turn.content) if isinstance(part, ToolCallFragment))
    return names


def _as_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def generation_header(tokenizer: Tokenizer, turns: Sequence[Turn]) -> str:
    """Returns the text that the template adds after `turns` to open the assistant's next turn."""
    if not turns:
        raise ThreadError("the thread begins with the assistant's turn; expected a system or user turn before it")
    return _header_after(tokenizer, turns, template_text(tokenizer, turns, generation_prompt=False))


def _header_after(tokenizer: Tokenizer, turns: Sequence[Turn], text: str) -> str:
    """`generation_header` after turns whose text is known."""
    if not turns:
        return generation_header(tokenizer, turns)
    text_with_header = template_text(tokenizer, turns, generation_prompt=True)
    return _added_text(tokenizer, text, text_with_header, change=f"opening turn {len(turns)}")


def turn_texts(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[TurnText]:
    """Returns what each turn adds to the template's text of the turns before it.

    Raises ThreadError (no turns), TemplateRefused, TemplateNotPrefixStable, UnsupportedFragment.
    """
    if not turns:
        raise ThreadError("the thread has no turns, expected at least one; begin it with .user(…)")

    # Apply the template to each prefix of the conversation. The difference to the prefix before is the turn's text.
    text_before, texts = "", []
    for index, turn in enumerate(turns):
        header = _header_after(tokenizer, turns[:index], text_before) if turn.role == "assistant" else ""
        try:
            text = template_text(tokenizer, turns[: index + 1], generation_prompt=False)
        except TemplateRefused:
            if index or turn.role != "system" or len(turns) == 1:
                raise
            # Some templates refuse a conversation that is only a system turn. Its text then counts as the next turn's.
            texts.append(TurnText("", ""))
            continue
        body = _added_text(tokenizer, text_before + header, text, change=f"adding turn {index} ({turn.role})")
        _check_reasoning(tokenizer, turn, header + body, index)
        texts.append(TurnText(header, body))
        text_before = text
    return texts


def _added_text(tokenizer: Tokenizer, before: str, after: str, *, change: str) -> str:
    """Returns what `after` adds to `before`. Raises TemplateNotPrefixStable if it does not begin with it."""
    if not after.startswith(before):
        start = _first_difference(before, after)
        raise TemplateNotPrefixStable(
            f"the chat template of {tokenizer.name} rewrites earlier text when {change}: "
            f"{before[start : start + 40]!r} became {after[start : start + 40]!r}; expected it only to add text: use a "
            "template that does not depend on later turns (many templates drop the reasoning of earlier turns), or "
            "train on threads with a single answer"
        )
    return after[len(before) :]


def _first_difference(before: str, after: str) -> int:
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return index
    return len(after)


def _check_reasoning(tokenizer: Tokenizer, turn: Turn, text: str, index: int) -> None:
    for part in fragments_of(turn.content):
        if isinstance(part, ReasoningFragment) and part.text.strip() not in text:
            raise UnsupportedFragment(
                f"the chat template of {tokenizer.name} does not write the reasoning of turn {index}; take a "
                "model whose template does, or write the reasoning as text"
            )
