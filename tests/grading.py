"""Graders for tests, by import path."""

from __future__ import annotations

import hashlib

from engine.text.threads import StringThread


def even_share(thread: StringThread) -> float:
    """Share of the first six characters with an even code point: about one half by chance, so every group has a
    spread of rewards and every step moves the weights."""
    return sum(ord(character) % 2 == 0 for character in thread.last_content()[:6]) / 6


def by_hash(thread: StringThread) -> float:
    """In [0, 1), a function of the text and blind to its meaning."""
    return int(hashlib.sha256(thread.to_json().encode()).hexdigest()[:8], 16) / 2**32


def constant(_thread: StringThread, *, value: float = 1.0) -> float:
    return value


def even_share_of_most(thread: StringThread, *, failing: str = "0") -> float:
    """`even_share`, but raises on answers to the prompt `failing`."""
    if thread.turns[0].text == failing:
        raise RuntimeError(f"no grade for the prompt {failing}")
    return even_share(thread)


def only_even_prompts(thread: StringThread) -> float:
    """`even_share` of answers to even digits; 0 for all others, whose groups then teach nothing."""
    return even_share(thread) if int(thread.turns[0].text[-1]) % 2 == 0 else 0.0


def nothing(_thread: StringThread) -> float:
    return 0.0
