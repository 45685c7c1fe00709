"""Rendering: conversations to token ids and back, by the model's own chat template.

The ids of a whole thread are those of the template's whole text; each turn then gets its part of them. So the template
may write what it likes (a default system prompt, say), as long as a longer conversation begins with the text of a
shorter one. Sampled turns are never rendered: they keep the sampler's ids.

Text that spells a special token becomes that token, as in every use of a chat template: clean what you do not trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from engine.protocol import TokenSequence
from engine.text.errors import ChatTemplateMissing, ThreadError, UnsupportedFragment
from engine.text.images import embed_images, images_in, placed_images
from engine.text.template import Piece, generation_header, template_pieces, template_text
from engine.text.threads import StringThread, TokenizedThread, TokenizedTurn
from engine.text.tokenizers import Tokenizer
from engine.text.turns import Turn


class Renderer:
    """Threads to token ids by one tokenizer. Raises ChatTemplateMissing when it has no chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_chat_template:
            raise ChatTemplateMissing(
                f"the tokenizer of {tokenizer.name} has no chat template, expected one: add chat_template.jinja to "
                "the model's folder, or take an instruction-tuned model"
            )
        self.tokenizer = tokenizer

    # -- text to ids -------------------------------------------------------------------------------------------

    def prompt_ids(self, thread: StringThread) -> list[int]:
        """The ids a model is to continue: the whole thread and the header of the assistant's next turn.

        Raises ThreadError when the thread is empty or ends with the assistant's turn, UnsupportedFragment when it holds
        an image: `prompt_sequence` takes one.
        """
        _check_prompt(thread.turns)
        self._check_text_only(thread.turns)
        return self.tokenizer.encode(template_text(self.tokenizer, thread.turns, generation_prompt=True))

    def prompt_sequence(self, thread: StringThread) -> TokenSequence:
        """The same with the thread's images, and no token trained."""
        _check_prompt(thread.turns)
        if not images_in(thread.turns):
            ids = self.prompt_ids(thread)
            return TokenSequence(ids, [0.0] * len(ids))
        return self.sequence(self.prompt(thread))

    def prompt(self, thread: StringThread | TokenizedThread) -> TokenizedThread:
        """The thread with the assistant's next turn opened (only its header): what `with_completion` completes.

        In a prompt only sampled turns stay trained: answers that came as text are context. A thread already opened
        is returned as it is. Raises ThreadError as `prompt_ids` does.
        """
        if isinstance(thread, TokenizedThread):
            if thread.turns and thread.turns[-1].is_open:
                return thread
            _check_prompt(thread.turns)
            header = generation_header(self.tokenizer, self.detokenize(thread).turns)
            turns, header_ids = list(thread.turns), self.tokenizer.encode(header)
        else:
            _check_prompt(thread.turns)
            thread = self._with_images(thread)
            pieces = [
                *template_pieces(self.tokenizer, thread.turns),
                Piece(generation_header(self.tokenizer, thread.turns), ""),
            ]
            *ids, (header_ids, _) = self._split(pieces)
            turns = _tokenized_turns(thread, ids, self.tokenizer)
        context = [turn if turn.logprobs is not None else _untrained(turn) for turn in turns]
        opened = TokenizedTurn(
            "assistant", tuple(header_ids), (0.0,) * len(header_ids), header=len(header_ids), logprobs=()
        )
        return TokenizedThread((*context, opened), thread.metadata)

    def tokenize(self, thread: StringThread) -> TokenizedThread:
        """Ids and weights of every turn. A trained turn trains its content and its end-of-turn token, not what the
        template writes before (header) or after (a line break). Image files are read here, once.

        Raises ThreadError (no turns), TemplateRefused, TemplateNotPrefixStable, UnsupportedFragment.
        """
        thread = self._with_images(thread)
        ids = self._split(template_pieces(self.tokenizer, thread.turns))
        return TokenizedThread(tuple(_tokenized_turns(thread, ids, self.tokenizer)), thread.metadata)

    def append(self, tokenized: TokenizedThread, role: str, content: Any) -> TokenizedThread:
        """One more turn of text after ids that are kept as they are: how a sampled conversation goes on."""
        if tokenized.turns and tokenized.turns[-1].is_open:
            raise ThreadError("the last turn is open; complete it with with_completion before appending another")
        after = self._with_images(self.detokenize(tokenized).append(role, content))
        pieces = template_pieces(self.tokenizer, after.turns)
        header_ids, body_ids = (self.tokenizer.encode(text) for text in pieces[-1])
        weight = after.get_turn_weights()[-1]
        turn = _tokenized_turn(after.turns[-1], header_ids, body_ids, weight, self.tokenizer)
        if tokenized.turns and tokenized.turns[-1].logprobs is not None:
            closing = self._closing(tokenized.turns[-1], pieces[-2].body)
            turn = replace(
                turn,
                token_ids=(*closing, *turn.token_ids),
                weights=(*(0.0 for _ in closing), *turn.weights),
                header=turn.header + len(closing),
            )
        return TokenizedThread((*tokenized.turns, turn), tokenized.metadata)

    # -- sampled ids -------------------------------------------------------------------------------------------

    def with_completion(
        self, prompt: TokenizedThread, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> TokenizedThread:
        """The opened prompt with the sampled ids (weight 1 each) and their logprobs (nats), exactly as given."""
        if not prompt.turns or not prompt.turns[-1].is_open:
            raise ThreadError(
                "the tokenized thread has no open assistant turn, expected one: begin with prompt(thread)"
            )
        if not token_ids or len(token_ids) != len(logprobs):
            raise ThreadError(
                f"given {len(token_ids)} token ids and {len(logprobs)} logprobs; expected at least one id, and one "
                "logprob for each"
            )
        opened = prompt.turns[-1]
        turn = replace(
            opened,
            token_ids=(*opened.token_ids, *token_ids),
            weights=(*opened.weights, *(1.0 for _ in token_ids)),
            logprobs=tuple(logprobs),
        )
        return TokenizedThread((*prompt.turns[:-1], turn), prompt.metadata)

    def detokenize(self, tokenized: TokenizedThread) -> StringThread:
        """The conversation in text: sampled turns decoded, the others as they came. An open turn is left out."""
        closed = [turn for turn in tokenized.turns if not turn.is_open]
        return StringThread(
            turns=[(turn.role, self._content(turn)) for turn in closed],
            metadata=tokenized.metadata,
            weights=[max(turn.weights, default=0.0) for turn in closed],
        )

    def decode_completion(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, without the end-of-turn token and other specials."""
        ended = bool(token_ids) and token_ids[-1] in self.tokenizer.eos_token_ids
        return self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special=True)

    def serialize(self, tokenized: TokenizedThread) -> tuple[list[int], list[float]]:
        """(token ids, weights), flat and of equal length; weight > 0 is trained. Raises UnsupportedFragment for a
        thread with images, of which these would say nothing: see `sequence`."""
        self._check_text_only(tokenized.turns)
        return tokenized.token_ids, tokenized.weights

    def sequence(self, tokenized: TokenizedThread) -> TokenSequence:
        """Token ids, weights and images, as the engine takes them."""
        images = placed_images(tokenized.turns, self.tokenizer.images)
        return TokenSequence(tokenized.token_ids, tokenized.weights, images=images)

    # -- parts ------------------------------------------------------------------------------------------

    def _check_text_only(self, turns: Sequence[Turn] | Sequence[TokenizedTurn]) -> None:
        if found := images_in(turns):
            takes = "this call takes" if self.tokenizer.images else f"{self.tokenizer.name} takes"
            raise UnsupportedFragment(f"turn {found[0][0]} holds an image; {takes} text only: remove it")

    def _with_images(self, thread: StringThread) -> StringThread:
        """The thread with the bytes of its images. No file is read for a model that takes none."""
        if self.tokenizer.images is None:
            self._check_text_only(thread.turns)
        return embed_images(thread)

    def _content(self, turn: TokenizedTurn) -> Any:
        return turn.content if turn.logprobs is None else self.decode_completion(turn.token_ids[turn.header :])

    def _split(self, pieces: Sequence[Piece]) -> list[tuple[list[int], list[int]]]:
        """(header ids, body ids) of each piece; together exactly the ids of the whole text.

        A token that spans two parts belongs to the later one, so that no trained content is lost.
        """
        texts = [text for piece in pieces for text in piece]
        whole = self.tokenizer.encode("".join(texts))
        parts = [self.tokenizer.encode(text) for text in texts]
        if [token for part in parts for token in part] != whole:
            ends = [_common_length(self.tokenizer.encode(prefix), whole) for prefix in accumulate(texts[:-1])]
            cuts = [0, *accumulate(ends, max), len(whole)]
            parts = [whole[start:end] for start, end in pairwise(cuts)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _closing(self, sampled: TokenizedTurn, body: str) -> list[int]:
        """What the template writes after a sampled turn before the next: its end-of-turn token too, if it was cut."""
        body_ids = self.tokenizer.encode(body)
        eos = self.tokenizer.eos_token_ids
        end = _trained_length(body_ids, self.tokenizer)
        ended = sampled.token_ids[-1] in eos
        return body_ids[end - 1 :] if not ended and end and body_ids[end - 1] in eos else body_ids[end:]


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
    return [
        _tokenized_turn(turn, header, body, weight, tokenizer)
        for turn, (header, body), weight in zip(thread.turns, ids, thread.get_turn_weights(), strict=True)
    ]


def _tokenized_turn(
    turn: Turn, header: list[int], body: list[int], weight: float, tokenizer: Tokenizer
) -> TokenizedTurn:
    trained = _trained_length(body, tokenizer) if weight > 0 else 0
    weights = [0.0] * len(header) + [weight] * trained + [0.0] * (len(body) - trained)
    return TokenizedTurn(turn.role, (*header, *body), tuple(weights), header=len(header), content=turn.content)


def _trained_length(body: Sequence[int], tokenizer: Tokenizer) -> int:
    """How many of a turn's ids are content and end of turn; where no end-of-turn token is known, all but the white
    space at the end."""
    for length in range(len(body), 0, -1):
        if body[length - 1] in tokenizer.eos_token_ids:
            return length
    for length in range(len(body), 0, -1):
        if tokenizer.decode([body[length - 1]], skip_special=False).strip():
            return length
    return 0


def _untrained(turn: TokenizedTurn) -> TokenizedTurn:
    return replace(turn, weights=(0.0,) * len(turn.weights))


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
