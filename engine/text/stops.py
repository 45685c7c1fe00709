"""Where a completion ends: `CompletionEnd`, which every sampler asks after each token, and stop strings as bytes.

A stop string ends a completion at the token that completes it. The text of a completion is the joined bytes of its
tokens (`Tokenizer.token_bytes`), so that a character may be split over tokens, and a string may be spelled by any
tokens. UTF-8 is self-synchronising: a string occurs in the text where its bytes occur.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.errors import BadSpec
from engine.protocol import SamplingParams, StopReason
from engine.text.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of a call in UTF-8, for the tokens of one tokenizer.

    It is small and needs no tokenizer, so that it can be sent to a sampler in another process."""

    strings: tuple[bytes, ...]
    token_bytes: Mapping[int, bytes]
    """The bytes of each token that can be part of an occurrence of a string, or that has no text. Any other token
    breaks off an occurrence that has begun."""


def stop_strings(tokenizer: Tokenizer | None, params: SamplingParams) -> StopStrings | None:
    """Returns the stop strings of the parameters; None if there are none.

    Raises BadSpec for stop strings without a tokenizer."""
    if not params.stop:
        return None
    if tokenizer is None:
        raise BadSpec(
            f"the stop strings {list(params.stop)} were given, and this sampler has no tokenizer to find them in text; "
            "make it with a tokenizer, or give stop_token_ids"
        )
    return _encoded_stop_strings(tokenizer, params.stop)


@lru_cache(maxsize=16)
def _encoded_stop_strings(tokenizer: Tokenizer, texts: tuple[str, ...]) -> StopStrings:
    strings = tuple(text.encode() for text in texts)
    # Parts of a string that a token can begin with, end with, or lie in. No UTF-8 text has the byte 0xFF.
    prefixes, suffixes = set[bytes](), set[bytes]()
    for string in strings:
        prefixes |= {string[:length] for length in range(1, len(string))}
        suffixes |= {string[-length:] for length in range(1, len(string))}
    joined = b"\xff".join(strings)

    def is_relevant(token: bytes) -> bool:
        if token in joined or any(string in token for string in strings):
            return True
        return any(token[-size:] in prefixes or token[:size] in suffixes for size in range(1, len(token)))

    relevant = {token_id: token for token_id, token in enumerate(tokenizer.token_bytes) if is_relevant(token)}
    return StopStrings(strings, relevant)


class CompletionEnd:
    """Tells after each token of one completion whether it has ended, and why."""

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        stops: StopStrings | None = None,
        sampled: Sequence[int] = (),
    ) -> None:
        """`stops` are the strings of `params.stop`; None: there are none. `sampled` are the tokens that the completion
        has already. Raises BadSpec if it has ended with one of them."""
        self._params, self._stops = params, stops
        self._eos: Collection[int] = () if params.ignore_eos else eos_token_ids
        self._tokens = 0
        self._tail = b""
        """The end of the text, in which a stop string may have begun."""
        for position, token in enumerate(sampled):
            reason = self.after(token)
            if reason is not None:
                raise BadSpec(
                    f"a completion was given with {len(sampled)} sampled tokens, and it ended at token {position + 1} "
                    f"(stop reason {reason!r}); leave completions that have ended out of the call"
                )

    def after(self, token: int) -> StopReason | None:
        """Adds the next token. Returns why the completion ends with it; None if it goes on."""
        self._tokens += 1
        if token in self._eos:
            return "eos"
        if token in self._params.stop_token_ids or self._completes_string(token):
            return "stop"
        return "length" if self._tokens >= self._params.max_new_tokens else None

    def _completes_string(self, token: int) -> bool:
        if self._stops is None or self._tokens <= self._params.min_new_tokens:
            return False
        token_bytes = self._stops.token_bytes.get(token)
        if token_bytes is None:
            self._tail = b""
            return False
        text = self._tail + token_bytes
        longest = max(map(len, self._stops.strings))
        self._tail = text[max(0, len(text) - longest + 1) :]
        return any(string in text for string in self._stops.strings)
