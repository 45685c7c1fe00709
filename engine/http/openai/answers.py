"""One answer in the making: sampled tokens go in, text comes out, in whole characters and never past a stop string.

An answer that is streamed and one that is given whole are made here alike, so their texts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.protocol import StopReason
from engine.text.tokenizers import Tokenizer

FinishReason = Literal["stop", "length"]
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""


class Answer:
    """Text of the tokens fed so far. `text` is what was released; `finish` is None until the answer has ended."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.offsets: list[int] = []
        """Per token: characters of text before it."""
        self.text = ""
        self.finish: FinishReason | None = None
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._window, self._read = 0, 0

    def feed(self, token: int, logprob: float) -> str:
        """Takes the next sampled token; returns the text it releases. A token after the end is not part of it."""
        if self.finish is not None:
            return ""
        self.offsets.append(len(self.text) + len(self._held))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return self._release(self._decoded(is_last=False))

    def close(self, reason: StopReason) -> str:
        """Says how the sampler ended; returns the text that was held back. Nothing changes after a stop string."""
        if self.finish is not None:
            return ""
        released = self._release(self._decoded(is_last=True))
        if self.finish is None:
            released += self._held
            self.text += self._held
            self._held = ""
            self.finish = "length" if reason == "length" else "stop"
        return released

    def _decoded(self, *, is_last: bool) -> str:
        """The text of the tokens after `_read`, or "" while it may end within a character.

        They are decoded behind the tokens of the last release, since some tokenizers write a word at the beginning
        of a text otherwise than after another word.
        """
        end = len(self.tokens)
        if self.tokens and self.tokens[-1] in self.tokenizer.eos_token_ids:
            if not is_last:
                return ""  # text, unless it turns out to be the end
            end -= 1
        before = self.tokenizer.decode(self.tokens[self._window : self._read])
        text = self.tokenizer.decode(self.tokens[self._window : end])
        new = text[len(before) :]
        if not new or (text.endswith(BROKEN) and not is_last):
            return ""
        self._window, self._read = self._read, end
        return new

    def _release(self, new: str) -> str:
        """Adds to the text what can be no part of a stop string; ends the answer before one."""
        self._held += new
        keep = 0
        if len(self.tokens) > self._min_tokens:
            found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
            if found:
                self.finish = "stop"
                self._held = self._held[: min(found)]
            else:
                keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        at = len(self._held) - keep
        released, self._held = self._held[:at], self._held[at:]
        self.text += released
        return released


def stop_token_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """The stop strings that are one token each: the sampler itself ends there."""
    ids = (tokenizer.encode(text) for text in stop)
    return tuple(dict.fromkeys(found[0] for found in ids if len(found) == 1))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token as text, specials included; `BROKEN` where it is part of a character."""
    return tokenizer.decode([token], skip_special=False)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
