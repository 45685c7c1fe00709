"""`AnswerBuilder`: turns sampled tokens into an answer's text, in whole characters and never beyond a stop string.

Streamed answers and whole answers are built in the same way, so that their texts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.protocol import StopReason
from engine.text.tokenizers import BROKEN, Tokenizer
from engine.text.tool_calls import overlap_start

FinishReason = Literal["stop", "length"]


class AnswerBuilder:
    """Builds the text of one answer, token by token.

    `text` is the text that was released so far. `finish` is None until the answer has ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0, with_calls: bool = False
    ) -> None:
        """`with_calls`: whether the text keeps the special tokens that are part of tool calls."""
        self.tokenizer = tokenizer
        self._decode = tokenizer.decode_with_calls if with_calls else tokenizer.decode
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        """For each token, the number of characters of text before it."""
        self.text = ""
        self.finish: FinishReason | None = None
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        """Text that is not released yet, since it may be the beginning of a stop string."""
        self._window = 0
        """Index of the first token of the last decoded piece. New tokens are decoded together with that piece."""
        self._decoded = 0
        """Number of tokens that are decoded."""

    def feed(self, token: int, logprob: float) -> str:
        """Adds the next sampled token and returns the text that it releases. After the end it adds nothing."""
        if self.finish is not None:
            return ""
        self.offsets.append(len(self.text) + len(self._held))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return self._release(self._decode_new(is_last=False))

    def close(self, reason: StopReason) -> str:
        """Ends the answer with the sampler's stop reason and returns the text that was held back.

        After a stop string it changes nothing.
        """
        if self.finish is not None:
            return ""
        released = self._release(self._decode_new(is_last=True))
        if self.finish is None:
            released += self._held
            self.text += self._held
            self._held = ""
            self.finish = "length" if reason == "length" else "stop"
        return released

    def _decode_new(self, *, is_last: bool) -> str:
        """Returns the text of the tokens that are not decoded yet, or "" while it may end within a character.

        The tokens of the last piece are decoded with them, since some tokenizers decode a word differently at the
        beginning of a text.
        """
        end = len(self.tokens)
        if self.tokens and self.tokens[-1] in self.tokenizer.eos_token_ids:
            if not is_last:
                return ""  # it is text only if sampling goes on after it
            end -= 1

        # Decode the last piece without and with the new tokens. What the new tokens add is the difference.
        before = self._decode(self.tokens[self._window : self._decoded])
        text = self._decode(self.tokens[self._window : end])
        new = text[len(before) :]
        if not new or (text.endswith(BROKEN) and not is_last):
            return ""

        # The new tokens are the piece with which the next ones are decoded.
        self._window, self._decoded = self._decoded, end
        return new

    def _release(self, new: str) -> str:
        """Releases the text that cannot be part of a stop string, and ends the answer before the first stop string."""
        self._held += new
        held_back = 0
        # Before the minimum length no stop string ends the answer, so there is nothing to hold back.
        if len(self.tokens) > self._min_tokens:
            positions = [self._held.find(stop) for stop in self._stop]
            matches = [position for position in positions if position >= 0]
            if matches:
                # The stop string and all text after it are not part of the answer.
                self.finish = "stop"
                self._held = self._held[: min(matches)]
            else:
                starts = [overlap_start(self._held, stop) for stop in self._stop]
                held_back = len(self._held) - min(starts, default=len(self._held))
        end = len(self._held) - held_back
        released, self._held = self._held[:end], self._held[end:]
        self.text += released
        return released


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of one token, also of a special token. It contains `BROKEN` for a part of a character."""
    return tokenizer.decode([token], skip_special=False)
