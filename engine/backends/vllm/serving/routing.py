"""Chooses the replica of each completion. The completions of one prompt go to one replica, which then computes the
prompt once, unless that replica would get more than its share.

Rendezvous hashing (Thaler and Ravishankar 1998) ranks the replicas for a prompt: when a replica is added or removed,
only its own prompts move. Bounded loads (arXiv:1608.01350) limit what one replica gets to `LOAD_BOUND` times the mean.
The functions are pure: equal arguments give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.protocol import TokenIds

LOAD_BOUND = 1.25
"""A replica's outstanding tokens are at most this many times the mean over the open replicas."""
LEADING_TOKENS = 256
"""Number of leading tokens of a prompt that decide its replica. Longer prompts with the same beginning (a shared
document, earlier turns) then find their prefix in the same cache."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One completion to sample, or one sequence to score."""

    key: bytes
    """Equal for prompts that should share a replica; see `affinity_key`."""
    tokens: int
    """Upper bound of its cost: tokens of the prompt and of the completion."""


def affinity_key(prompt: TokenIds) -> bytes:
    """The key of a prompt: a hash of its leading tokens."""
    leading = prompt[:LEADING_TOKENS]
    return blake2b(b"".join(token.to_bytes(8, "little") for token in leading), digest_size=16).digest()


def rank_replicas(key: bytes, replicas: Sequence[str]) -> list[str]:
    """All replicas, the preferred one for this key first."""
    return sorted(replicas, key=lambda name: (blake2b(name.encode(), key=key, digest_size=16).digest(), name))


def assign_replicas(items: Sequence[WorkItem], outstanding: Mapping[str, int]) -> list[str]:
    """The replica of each work item.

    Args:
        items: assigned in this order.
        outstanding: unfinished tokens of each open replica, by name. The caller leaves out replicas that are down,
            drain, or hold other weights.

    Raises:
        ValueError: there is no replica.
    """
    if not outstanding:
        raise ValueError("there is no open replica to give work to")
    loads = dict(outstanding)
    total = sum(loads.values()) + sum(item.tokens for item in items)
    limit = math.ceil(LOAD_BOUND * total / len(loads))
    rankings: dict[bytes, list[str]] = {}
    assigned = []
    for item in items:
        if item.key not in rankings:
            rankings[item.key] = rank_replicas(item.key, list(loads))
        ranking = rankings[item.key]
        below_limit = (name for name in ranking if loads[name] + item.tokens <= limit)
        # An item larger than the limit fits nowhere: the replica with the least load takes it.
        replica = next(below_limit, None) or min(ranking, key=lambda name: loads[name])
        loads[replica] += item.tokens
        assigned.append(replica)
    return assigned
