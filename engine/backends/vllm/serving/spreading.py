"""Work spread over the replicas of a pool, and done whatever happens to single ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.routing import Work, plan
from engine.cluster.actors import ActorHandle
from engine.errors import SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

FAILURES = 3
"""So many replicas may fail in one call before the call fails: a request may be what they fail on."""

Send = Callable[[Replica, list[int]], Awaitable[None]]
"""Has a replica do the pieces with these numbers, from their beginning."""
Ready = Callable[[], Awaitable[list[Replica]]]
"""The replicas that may be given work now, at least one."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one replica was given, and which start of it."""

    replica: Replica
    actor: ActorHandle | None
    numbers: list[int]
    tokens: int


async def spread(works: Sequence[Work], send: Send, ready: Ready) -> set[ActorHandle]:
    """Has all of it done; returns the processes that did it. All of these still ran at the end: what a replica did that
    has ended since is done again by others.

    Raises:
        WorkerDied: `FAILURES` replicas and one more failed.
        SamplerOutOfSync: no replica is ready, nor will be.
    """
    waiting, failures = list(range(len(works))), 0
    running: dict[asyncio.Task[None], _Share] = {}
    done: list[_Share] = []
    try:
        while waiting or running:
            if waiting:
                for share in _shares(works, waiting, await ready()):
                    share.replica.outstanding += share.tokens
                    share.replica.needed += 1
                    running[asyncio.create_task(_sent(send, share))] = share
                waiting = []
            for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                share = running.pop(task)
                share.replica.outstanding -= share.tokens
                error = task.exception()
                if error is None:
                    done.append(share)
                    continue
                share.replica.needed -= 1
                failures += 1
                if not isinstance(error, WorkerDied | SamplerOutOfSync) or failures > FAILURES:
                    raise error
                log.warning("%s; %d requests go to other replicas", error, len(share.numbers))
                waiting += share.numbers
                if isinstance(error, SamplerOutOfSync):
                    share.replica.held = None
                else:
                    await share.replica.fail(share.actor)
            if not running:
                lost = [share for share in done if _ended(share)]
                done = [share for share in done if not _ended(share)]
                for share in lost:
                    share.replica.needed -= 1
                    waiting += share.numbers
    finally:
        for task, share in running.items():
            task.cancel()
            share.replica.outstanding -= share.tokens
        await asyncio.gather(*running, return_exceptions=True)
        for share in (*running.values(), *done):
            share.replica.needed -= 1
    return {share.actor for share in done if share.actor is not None}


async def _sent(send: Send, share: _Share) -> None:
    await send(share.replica, share.numbers)


def _ended(share: _Share) -> bool:
    return share.replica.actor is not share.actor


def _shares(works: Sequence[Work], numbers: Sequence[int], replicas: Sequence[Replica]) -> list[_Share]:
    outstanding = {replica.name: replica.outstanding for replica in replicas}
    places = plan([works[number] for number in numbers], outstanding)
    shares = []
    for replica in replicas:
        own = [number for number, place in zip(numbers, places, strict=True) if place == replica.name]
        if own:
            tokens = sum(works[number].tokens for number in own)
            shares.append(_Share(replica, replica.actor, own, tokens))
    return shares
