"""The chat template's text of a thread, turn by turn: what each turn adds to the text of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.errors import TemplateNotPrefixStable, TemplateRefused, ThreadError, UnsupportedFragment
from engine.text.fragments import ReasoningFragment, ToolCallFragment
from engine.text.images import images_in
from engine.text.tokenizers import Tokenizer
from engine.text.turns import Turn, turn_messages


class Piece(NamedTuple):
    """The template's text of one turn: the header that opens an assistant's turn ("" for others), and the rest."""

    header: str
    body: str


def template_text(tokenizer: Tokenizer, turns: Sequence[Turn], *, generation_prompt: bool) -> str:
    """What the template writes for the turns, with room for each image where the model takes them. Raises
    UnsupportedFragment for what it could only lose, ThreadError for text that spells an image."""
    images = images_in(turns)
    if images and tokenizer.images is None:
        raise UnsupportedFragment(
            f"turn {images[0][0]} holds an image; {tokenizer.name} takes text only: remove it, or take a "
            "vision-language model (idefics3, smolvlm)"
        )
    parts = [part for turn in turns if not isinstance(turn.content, str) for part in turn.content]
    calls = [part.name for part in parts if isinstance(part, ToolCallFragment)]
    messages = [message for turn in turns for message in turn_messages(turn)]
    if tokenizer.images is not None:  # templates of these models take lists of parts only
        messages = [message | {"content": _as_parts(message["content"])} for message in messages]
    text = tokenizer.apply_chat_template(messages, generation_prompt=generation_prompt)
    if tokenizer.images is not None:
        text = tokenizer.images.expanded(text, len(images))
    if lost := [name for name in calls if name not in text]:
        raise UnsupportedFragment(
            f"the chat template of {tokenizer.name} does not write the tool call {lost[0]!r}; take a model "
            "whose template knows tools, or write the call as text"
        )
    return text


def _as_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def generation_header(tokenizer: Tokenizer, turns: Sequence[Turn]) -> str:
    """What the template writes after the turns to open the assistant's next one."""
    if not turns:
        raise ThreadError("the thread begins with the assistant's turn; expected a system or user turn before it")
    written = template_text(tokenizer, turns, generation_prompt=False)
    return _suffix(
        tokenizer, template_text(tokenizer, turns, generation_prompt=True), written, f"opening turn {len(turns)}"
    )


def template_pieces(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[Piece]:
    """The template's text, turn by turn: what each turn adds to the text of those before it."""
    if not turns:
        raise ThreadError("the thread has no turns, expected at least one; begin it with .user(…)")
    written, pieces = "", []
    for index, turn in enumerate(turns):
        header = generation_header(tokenizer, turns[:index]) if turn.role == "assistant" else ""
        try:
            text = template_text(tokenizer, turns[: index + 1], generation_prompt=False)
        except TemplateRefused:
            if index or turn.role != "system" or len(turns) == 1:
                raise
            # some templates refuse a system turn alone: what it writes then counts as the next turn's
            pieces.append(Piece("", ""))
            continue
        body = _suffix(tokenizer, text, written + header, f"adding turn {index} ({turn.role})")
        _check_reasoning(tokenizer, turn, header + body, index)
        pieces.append(Piece(header, body))
        written = text
    return pieces


def _suffix(tokenizer: Tokenizer, text: str, written: str, doing: str) -> str:
    if not text.startswith(written):
        at = next((at for at, (a, b) in enumerate(zip(text, written, strict=False)) if a != b), len(text))
        raise TemplateNotPrefixStable(
            f"the chat template of {tokenizer.name} rewrites earlier text when {doing}: {written[at : at + 40]!r} "
            f"became {text[at : at + 40]!r}; expected it only to add: use a template that does not depend on later "
            "turns (reasoning of earlier turns is what most drop), or train on threads of one answer"
        )
    return text[len(written) :]


def _check_reasoning(tokenizer: Tokenizer, turn: Turn, text: str, index: int) -> None:
    for part in turn.content if not isinstance(turn.content, str) else ():
        if isinstance(part, ReasoningFragment) and part.text.strip() not in text:
            raise UnsupportedFragment(
                f"the chat template of {tokenizer.name} does not write the reasoning of turn {index}; take a "
                "model whose template does, or write the reasoning as text"
            )
