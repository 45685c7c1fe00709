"""Operations on several replicas at once: calls to all of them, waiting for one of them, and their description."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.backends.vllm.serving.replica import Replica
from engine.errors import WorkerDied

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.05
"""Seconds between two checks of a condition."""

ReplicaCall = Callable[[Replica], Awaitable[Any]]


async def call_all(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """Runs one call per replica, all at once. Raises the first error after all calls have ended."""
    outcomes = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise errors[0]


async def call_surviving(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """As `call_all`, but the death of a replica is no error: the replica is restarted, and holds nothing then."""

    async def call_or_fail(replica: Replica) -> None:
        actor = replica.actor
        try:
            await call(replica)
        except WorkerDied as error:
            log.warning("%s", error)
            await replica.fail(actor)

    await call_all(replicas, call_or_fail)


async def wait_until(condition: Callable[[], bool], replicas: Sequence[Replica]) -> None:
    """Waits for a condition that a starting replica can fulfil. Raises WorkerDied after the start timeout."""
    timeout = max(replica.start_seconds for replica in replicas)
    for _ in range(int(timeout / POLL_INTERVAL)):
        if condition():
            return
        await asyncio.sleep(POLL_INTERVAL)
    description = describe_replicas(replicas)
    raise WorkerDied(f"no replica was ready within {timeout:.0f} s (sampler.start_seconds): {description}")


def describe_replicas(replicas: Sequence[Replica]) -> str:
    """The phase and error of each replica, for an error message."""
    return "; ".join(f"{replica.name} is {replica.phase} {replica.error}".strip() for replica in replicas)
