"""Work spread over the servers of a pool, and done whatever happens to single ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.backends.vllm.routing import Work, plan
from engine.backends.vllm.server import Server, ServerProcess
from engine.errors import SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

FAILURES = 3
"""So many servers may fail in one call before the call fails: a request may be what they fail on."""

Send = Callable[[Server, list[int]], Awaitable[None]]
"""Has a server do the pieces with these numbers, from their beginning."""
Ready = Callable[[], Awaitable[list[Server]]]
"""The servers that may be given work now, at least one."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one server was given, and which start of it."""

    server: Server
    boot: str
    process: ServerProcess | None
    numbers: list[int]
    tokens: int


async def spread(works: Sequence[Work], send: Send, ready: Ready) -> set[tuple[str, str]]:
    """Has all of it done; returns which servers did it, and which starts of them. All of these still ran at the end:
    what a server did that has ended since is done again by others.

    Raises:
        WorkerDied: `FAILURES` servers and one more failed.
        SamplerOutOfSync: no server is ready, nor will be.
    """
    waiting, failures = list(range(len(works))), 0
    running: dict[asyncio.Task[None], _Share] = {}
    done: list[_Share] = []
    try:
        while waiting or running:
            if waiting:
                for share in _shares(works, waiting, await ready()):
                    share.server.outstanding += share.tokens
                    share.server.needed += 1
                    running[asyncio.create_task(_sent(send, share))] = share
                waiting = []
            for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                share = running.pop(task)
                share.server.outstanding -= share.tokens
                error = task.exception()
                if error is None:
                    done.append(share)
                    continue
                share.server.needed -= 1
                failures += 1
                if not isinstance(error, WorkerDied | SamplerOutOfSync) or failures > FAILURES:
                    raise error
                log.warning("%s; %d requests go to other servers", error, len(share.numbers))
                waiting += share.numbers
                if isinstance(error, SamplerOutOfSync):
                    share.server.held = None
                else:
                    await share.server.fail(share.process)
            if not running:
                lost = [share for share in done if _ended(share)]
                done = [share for share in done if not _ended(share)]
                for share in lost:
                    share.server.needed -= 1
                    waiting += share.numbers
    finally:
        for task, share in running.items():
            task.cancel()
            share.server.outstanding -= share.tokens
        await asyncio.gather(*running, return_exceptions=True)
        for share in (*running.values(), *done):
            share.server.needed -= 1
    return {(share.server.name, share.boot) for share in done}


async def _sent(send: Send, share: _Share) -> None:
    await send(share.server, share.numbers)


def _ended(share: _Share) -> bool:
    return share.server.boot != share.boot


def _shares(works: Sequence[Work], numbers: Sequence[int], servers: Sequence[Server]) -> list[_Share]:
    outstanding = {server.name: server.outstanding for server in servers}
    places = plan([works[number] for number in numbers], outstanding)
    shares = []
    for server in servers:
        own = [number for number, place in zip(numbers, places, strict=True) if place == server.name]
        if own:
            tokens = sum(works[number].tokens for number in own)
            shares.append(_Share(server, server.boot, server.process, own, tokens))
    return shares
