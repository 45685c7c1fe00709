"""`Renderer`: converts conversations to token ids and back, with the model's own chat template.

The ids of a thread are those of the template's text of the whole thread. Each turn then gets its part of them. The
template may add text of its own, such as a default system prompt, as long as the text of a longer conversation begins
with the text of a shorter one. Sampled turns are never rendered: they keep the sampler's ids.

Text that spells a special token becomes that token, as with every use of a chat template: remove such text from
untrusted input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from engine.errors import (
    ChatTemplateMissing,
    TemplateNotPrefixStable,
    TemplateRefused,
    ThreadError,
    UnsupportedFragment,
)
from engine.models.samples import as_loss_mask, as_token_ids
from engine.protocol import TokenSequence
from engine.text.fragments import ReasoningFragment, ToolCallFragment
from engine.text.images import embed_images, images_in, placed_images
from engine.text.threads import StringThread, TokenizedThread, TokenizedTurn
from engine.text.tokenizers import EncodedText, Tokenizer
from engine.text.tool_calls import Tools
from engine.text.turns import Content, Turn, fragments_of, turn_messages


class Renderer:
    """Converts threads to token ids with one tokenizer. Raises ChatTemplateMissing when it has no chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_chat_template:
            raise ChatTemplateMissing(
                f"the tokenizer of {tokenizer.name} has no chat template, expected one: add chat_template.jinja to "
                "the model's folder, or take an instruction-tuned model"
            )
        self.tokenizer = tokenizer

    # -- text to ids -------------------------------------------------------------------------------------------

    def prompt_ids(self, thread: StringThread) -> list[int]:
        """Returns the ids of a prompt: the whole thread and the header of the assistant's next turn.

        Raises ThreadError when the thread is empty or ends with the assistant's turn, UnsupportedFragment when it holds
        an image. `prompt_sequence` accepts images.
        """
        _check_prompt(thread.turns)
        self._check_text_only(thread.turns)
        text = template_text(self.tokenizer, thread.turns, tools=thread.tools, generation_prompt=True)
        return self.tokenizer.encode(text)

    def prompt_sequence(self, thread: StringThread) -> TokenSequence:
        """Returns the ids of a prompt with the thread's images. No token is trained."""
        _check_prompt(thread.turns)
        if not images_in(thread.turns):
            ids = self.prompt_ids(thread)
            return TokenSequence(as_token_ids(ids, "a prompt"), np.zeros(len(ids), bool))
        return self.sequence(self.prompt(thread))

    def prompt(self, thread: StringThread | TokenizedThread) -> TokenizedThread:
        """Returns the thread with an open assistant turn at its end, which has only the header. `with_completion`
        completes it.

        Only sampled turns stay trained: in a prompt, answers that came as text are context. A thread that ends with an
        open turn is returned unchanged. Raises the errors of `prompt_ids`.
        """
        # The ids of a tokenised thread must not change, so only the header is encoded.
        if isinstance(thread, TokenizedThread):
            if thread.turns and thread.turns[-1].is_open:
                return thread
            _check_prompt(thread.turns)
            header = generation_header(self.tokenizer, self.detokenize(thread).turns, thread.tools)
            turns, header_ids = list(thread.turns), self.tokenizer.encode(header)
        else:
            # The header is encoded together with the turns, since a token may span the border between them.
            _check_prompt(thread.turns)
            thread = self._embed_images(thread)
            header = generation_header(self.tokenizer, thread.turns, thread.tools)
            texts = [*turn_texts(self.tokenizer, thread.turns, thread.tools), TurnText(header, "")]
            *ids, (header_ids, _) = self._encode_turns([texts])[0]
            turns = _tokenized_turns(thread, ids, self.tokenizer)

        # Only sampled turns stay trained.
        context = []
        for turn in turns:
            was_sampled = turn.logprobs is not None
            context.append(turn if was_sampled else _untrained(turn))
        open_turn = TokenizedTurn(
            "assistant", tuple(header_ids), (0.0,) * len(header_ids), header=len(header_ids), logprobs=()
        )
        return TokenizedThread((*context, open_turn), thread.metadata, thread.tools)

    def tokenize(self, thread: StringThread) -> TokenizedThread:
        """Returns the ids and weights of every turn. Image files are read here, once.

        A trained turn trains its content and its end-of-turn token, and neither the header that the template writes
        before nor the line break after it.

        Raises ThreadError (no turns), TemplateRefused, TemplateNotPrefixStable, UnsupportedFragment.
        """
        return self.tokenize_all([thread])[0]

    def tokenize_all(self, threads: Sequence[StringThread]) -> list[TokenizedThread]:
        """Returns `tokenize` of each thread. One call of the tokenizer encodes all of them."""
        threads = [self._embed_images(thread) for thread in threads]
        encoded = self._encode_turns([turn_texts(self.tokenizer, thread.turns, thread.tools) for thread in threads])
        tokenized = []
        for thread, ids in zip(threads, encoded, strict=True):
            turns = _tokenized_turns(thread, ids, self.tokenizer)
            tokenized.append(TokenizedThread(tuple(turns), thread.metadata, thread.tools))
        return tokenized

    def append(self, tokenized: TokenizedThread, role: str, content: Any) -> TokenizedThread:
        """Appends a turn of text to a tokenised thread, whose ids do not change."""
        if tokenized.turns and tokenized.turns[-1].is_open:
            raise ThreadError("the last turn is open; complete it with with_completion before appending another")

        # The template is applied to the whole conversation as text. Only what the new turn adds is encoded.
        thread = self._embed_images(self.detokenize(tokenized).append(role, content))
        texts = turn_texts(self.tokenizer, thread.turns, thread.tools)
        header_ids, body_ids = self.tokenizer.encode(texts[-1].header), self.tokenizer.encode(texts[-1].body)
        weight = thread.get_turn_weights()[-1]
        turn = _tokenized_turn(thread.turns[-1], header_ids, body_ids, weight, self.tokenizer)

        # A sampled turn ends with its last sampled token. What the template writes after it goes to the new turn.
        if tokenized.turns and tokenized.turns[-1].logprobs is not None:
            closing_ids = self._closing_ids(tokenized.turns[-1], texts[-2].body)
            turn = replace(
                turn,
                token_ids=(*closing_ids, *turn.token_ids),
                weights=(*[0.0] * len(closing_ids), *turn.weights),
                header=turn.header + len(closing_ids),
            )
        return TokenizedThread((*tokenized.turns, turn), tokenized.metadata, tokenized.tools)

    def extended(self, tokenized: TokenizedThread, turns: Sequence[Turn]) -> TokenizedThread | None:
        """Returns the thread with the turns appended and the opening of the assistant's next turn. Its ids do not
        change: those of sampled turns stay the sampler's.

        None if the chat template renders earlier turns differently once more turns follow.
        """
        try:
            for role, content in turns:
                tokenized = self.append(tokenized, role, content)
            return self.prompt(tokenized)
        except TemplateNotPrefixStable:
            return None

    # -- sampled ids -------------------------------------------------------------------------------------------

    def with_completion(
        self, prompt: TokenizedThread, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> TokenizedThread:
        """Returns the prompt with its open turn completed by sampled ids (weight 1 each) and their logprobs (nats)."""
        if not prompt.turns or not prompt.turns[-1].is_open:
            raise ThreadError(
                "the tokenized thread has no open assistant turn, expected one: begin with prompt(thread)"
            )
        if not token_ids or len(token_ids) != len(logprobs):
            raise ThreadError(
                f"given {len(token_ids)} token ids and {len(logprobs)} logprobs; expected at least one id, and one "
                "logprob for each"
            )
        open_turn = prompt.turns[-1]
        turn = replace(
            open_turn,
            token_ids=(*open_turn.token_ids, *token_ids),
            weights=(*open_turn.weights, *[1.0] * len(token_ids)),
            logprobs=tuple(logprobs),
        )
        return TokenizedThread((*prompt.turns[:-1], turn), prompt.metadata, prompt.tools)

    def detokenize(self, tokenized: TokenizedThread) -> StringThread:
        """Returns the conversation as text. Sampled turns are decoded, the others keep the text that they were made
        from. An open turn is left out. In a thread with tools, the calls in sampled turns become fragments."""
        closed = [turn for turn in tokenized.turns if not turn.is_open]
        turns: list[tuple[str, Any]] = []
        call_count = 0
        for turn in closed:
            content = self._content(turn, tokenized.tools, call_count)
            call_count += sum(isinstance(part, ToolCallFragment) for part in fragments_of(content))
            turns.append((turn.role, content))
        weights = [max(turn.weights, default=0.0) for turn in closed]
        return StringThread(turns, tokenized.metadata, weights, tokenized.tools)

    def decode_completion(self, token_ids: Sequence[int]) -> str:
        """Returns the text of sampled ids, without special tokens such as the end-of-turn token."""
        return self.tokenizer.decode(self._without_end(token_ids), skip_special=True)

    def serialize(self, tokenized: TokenizedThread) -> tuple[list[int], list[float]]:
        """Returns (token ids, weights) of equal length. Tokens with a weight > 0 are trained.

        Raises UnsupportedFragment for a thread with images; `sequence` accepts them.
        """
        self._check_text_only(tokenized.turns)
        return tokenized.token_ids, tokenized.weights

    def sequence(self, tokenized: TokenizedThread) -> TokenSequence:
        """Returns token ids, weights and images in the form that the engine takes."""
        images = placed_images(tokenized.turns, self.tokenizer.images)
        token_ids = as_token_ids(tokenized.token_ids, "a thread")
        loss_mask = as_loss_mask(tokenized.weights, len(token_ids), "a thread")
        return TokenSequence(token_ids, loss_mask, images=images)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _check_text_only(self, turns: Sequence[Turn] | Sequence[TokenizedTurn]) -> None:
        images = images_in(turns)
        if images:
            subject = "this call takes" if self.tokenizer.images else f"{self.tokenizer.name} takes"
            raise UnsupportedFragment(f"turn {images[0][0]} holds an image; {subject} text only: remove it")

    def _embed_images(self, thread: StringThread) -> StringThread:
        """Returns the thread with the bytes of its images. It reads no file if the model takes no images."""
        if self.tokenizer.images is None:
            self._check_text_only(thread.turns)
        return embed_images(thread)

    def _content(self, turn: TokenizedTurn, tools: Tools, call_count: int) -> Content | None:
        """Returns the content of a turn. `call_count` is the number of calls in the turns before it."""
        if turn.logprobs is None:
            return turn.content
        sampled = turn.token_ids[turn.header :]
        if not tools:
            return self.decode_completion(sampled)
        text = self.tokenizer.decode_with_calls(self._without_end(sampled))
        return self.tokenizer.tool_format.parse_answer(text, tools).content(call_count)

    def _without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        # The end-of-turn token is not always a special token, so it is removed here and not by the tokenizer.
        if token_ids and token_ids[-1] in self.tokenizer.eos_token_ids:
            return token_ids[:-1]
        return token_ids

    def _encode_turns(self, threads: Sequence[Sequence[TurnText]]) -> list[list[tuple[list[int], list[int]]]]:
        """Returns (header ids, body ids) of each turn of each thread. Joined, they are the ids of the whole text."""
        texts: list[list[str]] = []
        for turns in threads:
            texts.append([text for turn in turns for text in turn])
        return [list(zip(ids[::2], ids[1::2], strict=True)) for ids in encode_parts(self.tokenizer, texts)]

    def _closing_ids(self, sampled: TokenizedTurn, body: str) -> list[int]:
        """Returns the ids that the template writes between a sampled turn and the next one. They include the
        end-of-turn token if the sampled turn was cut before it."""
        body_ids = self.tokenizer.encode(body)
        eos_ids = self.tokenizer.eos_token_ids
        end = _trained_length(body_ids, self.tokenizer)
        was_cut = sampled.token_ids[-1] not in eos_ids
        template_has_end = end > 0 and body_ids[end - 1] in eos_ids
        if was_cut and template_has_end:
            return body_ids[end - 1 :]
        return body_ids[end:]


def _check_prompt(turns: Sequence[Turn] | Sequence[TokenizedTurn]) -> None:
    if not turns:
        raise ThreadError("the thread has no turns, expected a prompt; begin it with .user(…)")
    if turns[-1].role == "assistant":
        raise ThreadError(
            "the last turn is the assistant's, expected a prompt for it to answer; append a .user(…) turn, or leave "
            "the answer out"
        )


def _tokenized_turns(
    thread: StringThread, ids: Sequence[tuple[list[int], list[int]]], tokenizer: Tokenizer
) -> list[TokenizedTurn]:
    turns = []
    for turn, (header, body), weight in zip(thread.turns, ids, thread.get_turn_weights(), strict=True):
        turns.append(_tokenized_turn(turn, header, body, weight, tokenizer))
    return turns


def _tokenized_turn(
    turn: Turn, header: list[int], body: list[int], weight: float, tokenizer: Tokenizer
) -> TokenizedTurn:
    # The model writes the body up to its end-of-turn token. The template writes the header and what follows that token.
    trained = _trained_length(body, tokenizer) if weight > 0 else 0
    weights = [0.0] * len(header) + [weight] * trained + [0.0] * (len(body) - trained)
    return TokenizedTurn(turn.role, (*header, *body), tuple(weights), header=len(header), content=turn.content)


def _trained_length(body: Sequence[int], tokenizer: Tokenizer) -> int:
    """Returns the number of a turn's ids up to and including its end-of-turn token. If it has none, white space at the
    end is not counted."""
    for length in range(len(body), 0, -1):
        if body[length - 1] in tokenizer.eos_token_ids:
            return length
    # The template has no end-of-turn token.
    for length in range(len(body), 0, -1):
        if tokenizer.decode([body[length - 1]], skip_special=False).strip():
            return length
    return 0


def _untrained(turn: TokenizedTurn) -> TokenizedTurn:
    return replace(turn, weights=(0.0,) * len(turn.weights))


def encode_parts(tokenizer: Tokenizer, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Returns the ids of each part of each text. The ids of all parts of a text, joined, are those of the whole text.

    All texts are encoded in one call, once each; the tokenizer tells which character each token begins with.
    """
    encoded = tokenizer.encode_all(["".join(parts) for parts in texts])
    if encoded is None:
        return [plain_encode_parts(tokenizer, parts) for parts in texts]
    parts_ids = []
    for parts, whole in zip(texts, encoded, strict=True):
        ids = _divide(whole, parts)
        parts_ids.append(plain_encode_parts(tokenizer, parts) if ids is None else ids)
    return parts_ids


def _divide(whole: EncodedText, parts: Sequence[str]) -> list[list[int]] | None:
    """Divides the ids of a text among its parts. None if the first character of a part is in no token, or in one that
    begins in the part before: whether that token takes in the space after it, or joins two texts, is not known."""
    ids = whole.ids
    characters = len("".join(parts))
    cuts = [0]
    for border in accumulate(map(len, parts[:-1])):
        if border in (0, characters):
            cuts.append(len(ids) if border else 0)
            continue
        token = whole.char_to_token(border)
        if token is None or token == whole.char_to_token(border - 1):
            return None
        cuts.append(token)
    return [ids[start:end] for start, end in pairwise([*cuts, len(ids)])]


def plain_encode_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """The ids of each part of one text, by `Tokenizer.encode` alone: for a tokenizer that does not tell the characters
    of its tokens."""
    # Usually the parts, encoded alone, join to the ids of the whole text.
    whole = tokenizer.encode("".join(parts))
    ids = [tokenizer.encode(part) for part in parts]
    joined: list[int] = []
    for part_ids in ids:
        joined.extend(part_ids)
    if joined == whole:
        return ids

    # Some token spans two parts: cut the whole text's ids where they begin to differ from those of each prefix.
    prefixes = accumulate(parts[:-1])
    ends = [_common_length(tokenizer.encode(prefix), whole) for prefix in prefixes]
    cuts = [0, *accumulate(ends, max), len(whole)]
    return [whole[start:end] for start, end in pairwise(cuts)]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class TurnText(NamedTuple):
    """The template's text of one turn."""

    header: str
    """The text that opens an assistant's turn; "" for the other roles."""
    body: str
    """The rest of the turn's text."""


def template_text(
    tokenizer: Tokenizer, turns: Sequence[Turn], *, tools: Tools = (), generation_prompt: bool
) -> str:
    """Returns the text that the template makes of the turns and the tools, with placeholders for the images where the
    model takes images.

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

    tool_format = tokenizer.tool_format
    messages = tool_format.messages(_messages(turns), tools)
    if tokenizer.images is not None:
        # The templates of these models accept content as a list of parts only.
        for message in messages:
            message["content"] = _as_parts(message["content"])
    listed_tools = tools if tool_format.lists_tools else ()
    text = tokenizer.apply_chat_template(messages, tools=listed_tools, generation_prompt=generation_prompt)
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


def generation_header(tokenizer: Tokenizer, turns: Sequence[Turn], tools: Tools = ()) -> str:
    """Returns the text that the template adds after `turns` to open the assistant's next turn."""
    if not turns:
        raise ThreadError("the thread begins with the assistant's turn; expected a system or user turn before it")
    text = template_text(tokenizer, turns, tools=tools, generation_prompt=False)
    return _header_after(tokenizer, turns, tools, text)


def _header_after(tokenizer: Tokenizer, turns: Sequence[Turn], tools: Tools, text: str) -> str:
    """`generation_header` after turns whose text is known."""
    if not turns:
        return generation_header(tokenizer, turns)
    text_with_header = template_text(tokenizer, turns, tools=tools, generation_prompt=True)
    return _added_text(tokenizer, text, text_with_header, change=f"opening turn {len(turns)}")


def turn_texts(tokenizer: Tokenizer, turns: Sequence[Turn], tools: Tools = ()) -> list[TurnText]:
    """Returns what each turn adds to the template's text of the turns before it.

    Raises ThreadError (no turns), TemplateRefused, TemplateNotPrefixStable, UnsupportedFragment.
    """
    if not turns:
        raise ThreadError("the thread has no turns, expected at least one; begin it with .user(…)")

    # Apply the template to each prefix of the conversation. The difference to the prefix before is the turn's text.
    text_before, texts = "", []
    for index, turn in enumerate(turns):
        header = ""
        if turn.role == "assistant":
            header = _header_after(tokenizer, turns[:index], tools, text_before)
        try:
            text = template_text(tokenizer, turns[: index + 1], tools=tools, generation_prompt=False)
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
