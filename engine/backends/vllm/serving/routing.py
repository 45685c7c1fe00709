"""Which replica draws which completion: the completions of one prompt go to one replica, so that it computes the prompt
once, until that replica would hold more than its share.

Rendezvous hashing (Thaler and Ravishankar 1998) ranks the replicas for a prompt: when a replica comes or goes, only its
own prompts move. Bounded loads (arXiv:1608.01350) keep the ranking from filling one replica: none is given more than
`BOUND` times the mean. Pure: equal arguments give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.protocol import TokenIds

BOUND = 1.25
"""A replica's outstanding tokens are at most this many times the mean over the replicas that are open."""
LEADING_TOKENS = 256
"""So many tokens of a prompt decide its replica: longer prompts that begin alike (a shared document, earlier turns)
find their prefix in the same cache."""


@dataclass(frozen=True, slots=True)
class Work:
    """One completion to draw."""

    key: bytes
    """Equal for prompts that belong together; see `affinity`."""
    tokens: int
    """What it costs at most: tokens of the prompt and of the completion."""


def affinity(prompt: TokenIds) -> bytes:
    """The key of a prompt, by its leading tokens."""
    leading = prompt[:LEADING_TOKENS]
    return blake2b(b"".join(token.to_bytes(8, "little") for token in leading), digest_size=16).digest()


def ranking(key: bytes, replicas: Sequence[str]) -> list[str]:
    """All replicas, the preferred one first."""
    return sorted(replicas, key=lambda name: (blake2b(name.encode(), key=key, digest_size=16).digest(), name))


def plan(works: Sequence[Work], outstanding: Mapping[str, int]) -> list[str]:
    """The replica of each piece of work.

    Args:
        works: in the order in which they are placed.
        outstanding: by open replica, the tokens of what it was given and has not finished. Replicas that are down,
            drain, or hold other weights are left out by the caller.

    Raises:
        ValueError: there is no replica.
    """
    if not outstanding:
        raise ValueError("there is no open replica to give work to")
    loads = dict(outstanding)
    limit = math.ceil(BOUND * (sum(loads.values()) + sum(work.tokens for work in works)) / len(loads))
    ranked: dict[bytes, list[str]] = {}
    places = []
    for work in works:
        order = ranked.get(work.key) or ranked.setdefault(work.key, ranking(work.key, list(loads)))
        fits = (name for name in order if loads[name] + work.tokens <= limit)
        # a piece that is larger than the limit fits nowhere: the emptiest replica takes it
        place = next(fits, None) or min(order, key=lambda name: loads[name])
        loads[place] += work.tokens
        places.append(place)
    return places
