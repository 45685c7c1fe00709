"""Stop strings: where a completion ends besides its end-of-turn token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.text.tokenizers import Tokenizer


def stop_token_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[int, ...]:
    """The stop strings that are one token each: a sampler can end there by itself."""
    ids = (tokenizer.encode(text) for text in stops)
    return tuple(dict.fromkeys(found[0] for found in ids if len(found) == 1))


def tokens_until_stop(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str], *, at_least: int) -> int:
    """How many of the tokens a completion keeps: up to the one that completes the first stop string, all without one.
    Stop strings within the first `at_least` tokens do not count."""

    def stopped(length: int) -> bool:
        text = tokenizer.decode(token_ids[at_least:length])
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(token_ids)):
        return len(token_ids)
    # once it is there it stays there, however many tokens follow
    return bisect_left(range(len(token_ids) + 1), True, lo=at_least, key=stopped)


def text_until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
