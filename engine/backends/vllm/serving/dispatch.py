"""Distributes work over the replicas of a pool, and repeats it on others when a replica fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.routing import WorkItem, assign_replicas
from engine.cluster.actors import ActorHandle
from engine.errors import SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failures of replicas that one call survives. The next failure fails the call, because one of its requests may be what
makes the replicas fail."""

Send = Callable[[Replica, list[int]], Awaitable[None]]
"""Lets a replica do the work items with these indices, from their beginning."""
ReadyReplicas = Callable[[], Awaitable[list[Replica]]]
"""Returns the replicas that may get work now, at least one."""


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


def _assignments(
    items: Sequence[WorkItem], indices: Sequence[int], replicas: Sequence[Replica]
) -> list[_Assignment]:
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
