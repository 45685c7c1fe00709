"""Stop strings, which end a completion besides the end-of-turn token: finds them in token ids and in text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.text.tokenizers import Tokenizer


def stop_token_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of the stop strings that are a single token. A sampler can stop at these by itself."""
    encoded = [tokenizer.encode(stop) for stop in stops]
    single_tokens = [ids[0] for ids in encoded if len(ids) == 1]
    return tuple(dict.fromkeys(single_tokens))


def tokens_until_stop(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str], *, at_least: int) -> int:
    """Returns how many tokens a completion keeps: up to and including the token that completes the first stop string.

    Without a stop string it keeps all of them. Stop strings within the first `at_least` tokens do not count.
    """

    def has_stop(length: int) -> bool:
        text = tokenizer.decode(token_ids[at_least:length])
        return any(stop in text for stop in stops)

    if not stops or not has_stop(len(token_ids)):
        return len(token_ids)
    # A prefix that holds a stop string still holds it with more tokens, so the shortest one is found by bisection.
    return bisect_left(range(len(token_ids) + 1), True, lo=at_least, key=has_stop)


def text_until_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    positions = [text.find(stop) for stop in stops]
    return text[: min((position for position in positions if position >= 0), default=len(text))]
