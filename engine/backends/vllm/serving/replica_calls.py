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


def replicas_up(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.phase == "up"]


def holders_of_state(replicas: Sequence[Replica], state: str) -> list[Replica]:
    """The replicas that were proven to hold the weights of this state, in any phase."""
    return [replica for replica in replicas if replica.loaded_state == state]


def holders_of_adapter(replicas: Sequence[Replica], name: str) -> list[Replica]:
    """The replicas that hold this LoRA adapter, in any phase."""
    return [replica for replica in replicas if name in replica.adapters]


async def call_all(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """Runs one call per replica, all at once. Raises the first error after all calls have ended."""
    outcomes = await asyncio.gather(*map(call, replicas), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def call_surviving(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """As `call_all`, but the death of a replica is no error: the replica is restarted, and holds nothing then."""

    async def call_or_fail(replica: Replica) -> None:
        # The process before the call: `fail` must not end a later one.
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
