"""Distributes work over the replicas of a pool, and repeats it on others when a replica fails.

The completions of one prompt go to one replica, which then computes the prompt once, unless that replica would get more
than its share. Rendezvous hashing (Thaler and Ravishankar 1998) ranks the replicas for a prompt: when a replica is
added or removed, only its own prompts move. Bounded loads (arXiv:1608.01350) limit what one replica gets to
`LOAD_BOUND` times the mean.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.backends.replicas.replica import Replica
from engine.cluster.actors import ActorHandle
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.protocol import TokenIds

log = logging.getLogger(__name__)

LOAD_BOUND = 1.25
"""A replica's outstanding tokens are at most this many times the mean over the open replicas."""
LEADING_TOKENS = 256
"""Number of leading tokens of a prompt that decide its replica. Longer prompts with the same beginning (a shared
document, earlier turns) then find their prefix in the same cache."""
MAX_FAILURES = 3
"""Failures of replicas that one call survives. The next failure fails the call, because one of its requests may be what
makes the replicas fail."""

Send = Callable[[Replica, list[int]], Awaitable[None]]
"""Lets a replica do the work items with these indices, from their beginning."""
ReadyReplicas = Callable[[], Awaitable[list[Replica]]]
"""Returns the replicas that may get work now, at least one."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One completion to sample, or one sequence to score."""

    key: bytes
    """Equal for prompts that should share a replica; see `affinity_key`."""
    tokens: int
    """Upper bound of its cost: tokens of the prompt and of the completion."""


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The work items that one replica got."""

    replica: Replica
    actor: ActorHandle | None
    """The process that the replica had when it got the work."""
    indices: list[int]
    tokens: int


async def dispatch_work(items: Sequence[WorkItem], send: Send, ready: ReadyReplicas) -> set[ActorHandle]:
    """Lets replicas do all work items. Returns the processes that did them.

    All returned processes still run at the end: the work of a process that has ended meanwhile is repeated by others.

    Raises:
        WorkerDied: more than `MAX_FAILURES` replicas failed.
        SamplerOutOfSync: no replica is ready, or will be.
        Exception: any other error of `send`. It is no failure of the replica, so the replica goes on.
    """
    waiting, failures = list(range(len(items))), 0
    running: dict[asyncio.Task[None], _Assignment] = {}
    done: list[_Assignment] = []
    try:
        while waiting or running:
            # Assign the waiting items to the replicas that are ready.
            if waiting:
                for assignment in _assignments(items, waiting, await ready()):
                    assignment.replica.outstanding_tokens += assignment.tokens
                    assignment.replica.active_calls += 1
                    running[asyncio.create_task(_send(send, assignment))] = assignment
                waiting = []
            # Collect what has finished. The items of a replica that failed wait again.
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                assignment = running.pop(task)
                assignment.replica.outstanding_tokens -= assignment.tokens
                error = task.exception()
                if error is None:
                    done.append(assignment)
                    continue
                assignment.replica.active_calls -= 1
                failures += 1
                if not isinstance(error, WorkerDied | SamplerOutOfSync) or failures > MAX_FAILURES:
                    raise error
                log.warning("%s; %d requests go to other replicas", error, len(assignment.indices))
                waiting += assignment.indices
                if isinstance(error, SamplerOutOfSync):
                    assignment.replica.loaded_state = None
                else:
                    await assignment.replica.fail(assignment.actor)
            # Repeat the work of processes that have ended since: their weights cannot be checked any more.
            if not running:
                completed, done = done, []
                for assignment in completed:
                    if _has_ended(assignment):
                        assignment.replica.active_calls -= 1
                        waiting += assignment.indices
                    else:
                        done.append(assignment)
    finally:
        # Also after an error, each replica's counters must return to what they were before the call.
        for task, assignment in running.items():
            task.cancel()
            assignment.replica.outstanding_tokens -= assignment.tokens
        await asyncio.gather(*running, return_exceptions=True)
        for assignment in (*running.values(), *done):
            assignment.replica.active_calls -= 1
    actors = [assignment.actor for assignment in done]
    return {actor for actor in actors if actor is not None}


async def _send(send: Send, assignment: _Assignment) -> None:
    await send(assignment.replica, assignment.indices)


def _has_ended(assignment: _Assignment) -> bool:
    return assignment.replica.actor is not assignment.actor


def _assignments(items: Sequence[WorkItem], indices: Sequence[int], replicas: Sequence[Replica]) -> list[_Assignment]:
    """The work items with these indices, distributed over the replicas."""
    outstanding = {replica.name: replica.outstanding_tokens for replica in replicas}
    names = assign_replicas([items[index] for index in indices], outstanding)
    indices_by_name: dict[str, list[int]] = {}
    for index, name in zip(indices, names, strict=True):
        indices_by_name.setdefault(name, []).append(index)

    # A replica that got no item has no assignment. The others come in the order of `replicas`.
    assignments = []
    for replica in replicas:
        replica_indices = indices_by_name.get(replica.name, [])
        if replica_indices:
            tokens = sum(items[index].tokens for index in replica_indices)
            assignments.append(_Assignment(replica, replica.actor, replica_indices, tokens))
    return assignments


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
