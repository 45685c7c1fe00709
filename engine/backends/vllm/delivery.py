"""How a pool has its servers take weights: from files, or by a broadcast (engine.backends.vllm.broadcast), whose other
half this is: which servers take part, that all know of each other, and what each one answered.

The group stays from sync to sync. It is formed anew when a server was started again or added, and after a broadcast
that was broken off. A server that dies in the middle costs the others a second try, not the sync.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from engine.backends.tensor_files import read_tensors
from engine.backends.vllm.answers import refuse_wrong
from engine.backends.vllm.broadcast import (
    BUCKET_BYTES,
    BrokenOff,
    Meeting,
    Member,
    kind_of,
    open_store,
    own_address,
    place_of,
    send,
)
from engine.backends.vllm.last_weights import Weights
from engine.backends.vllm.runtime import Manifest, Receipt, Source
from engine.backends.vllm.server import Server
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long a worker may take to notice that the others have given up."""

LoadInto = Callable[[Server, Weights], Awaitable[Receipt]]
Found = dict[str, Receipt | BaseException]
"""By server: what it proved, or why not."""


class Delivery(Protocol):
    """How weights reach the servers of a pool."""

    takes_tensors: bool
    """Whether `source` may be the tensors themselves."""

    def paths(self, source: Source) -> tuple[str, ...]:
        """Files from which a server that is started again can take the weights later; none where it cannot."""
        ...

    async def deliver(
        self, servers: Sequence[Server], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        """What each server proved, or why it did not; `load_into` has one load the weights that it is given."""
        ...

    def close(self) -> None: ...


class ByFiles:
    """Every server reads the staged files on its own."""

    takes_tensors = False

    def paths(self, source: Source) -> tuple[str, ...]:
        if isinstance(source, Mapping):
            raise BadSpec("servers take weights as files, not as tensors: stage them first")
        return tuple(str(path) for path in source)

    async def deliver(
        self, servers: Sequence[Server], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        return await asyncio.gather(*(load_into(server, weights) for server in servers), return_exceptions=True)

    def close(self) -> None:
        """Nothing stays open."""


BY_FILES = ByFiles()


class ByBroadcast:
    """Rank 0 of the pool's groups. `device` is where the trainer's tensors are."""

    takes_tensors = True

    def __init__(
        self, hosts: Sequence[str], device: torch.device, *, seconds: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`hosts`: the servers', to find the address by which they reach this machine."""
        self._host = own_address(hosts)
        self._device, self._seconds, self._bucket_bytes = device, seconds, bucket_bytes
        self._store: tuple[Any, int] | None = None
        self.member: Member | None = None

    def paths(self, source: Source) -> tuple[str, ...]:
        return ()

    async def deliver(
        self, servers: Sequence[Server], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        found: Found = {}
        left = list(servers)
        while left:
            found |= await self._try(left, weights, source, load_into)
            alive = [server for server in left if not isinstance(found[server.name], WorkerDied)]
            if len(alive) == len(left) or all(isinstance(found[server.name], Receipt) for server in alive):
                break
            for name in sorted({server.name for server in left} - {server.name for server in alive}):
                log.warning("%s; the weights are sent to the other servers anew", found[name])
            left = alive
        return [found[server.name] for server in servers]

    async def _try(
        self, servers: Sequence[Server], weights: Weights, source: Source, load_into: LoadInto
    ) -> Found:
        member, found = await self._meet(servers)
        if member is None:
            return found
        to_group = replace(weights, group=member.meeting.name)
        loading = {asyncio.create_task(_awaited(load_into(server, to_group))): server for server in servers}
        sending = asyncio.create_task(asyncio.to_thread(_send, member, source, weights.manifest))
        await asyncio.wait([sending, *loading], return_when=asyncio.FIRST_EXCEPTION)
        error = next((task.exception() for task in (sending, *loading) if task.done() and task.exception()), None)
        if error is None:
            return {server.name: task.result() for task, server in loading.items()}
        self._leave(f"the engine gave up: {error}")
        await asyncio.wait([sending], timeout=self._seconds + GRACE_SECONDS)
        await asyncio.wait(loading, timeout=GRACE_SECONDS)
        for task, server in loading.items():
            found[server.name] = await self._outcome(task, server)
        fault = sending.exception() if sending.done() else None
        if fault is not None and not isinstance(fault, BrokenOff):
            raise fault  # of the trainer's tensors, not of a server
        return found

    async def _outcome(self, task: asyncio.Task[Receipt], server: Server) -> Receipt | BaseException:
        if not task.done():
            process = server.process
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.fail(process)
            return WorkerDied(f"vLLM server {server.name} was silent after a broadcast was broken off: it is ended")
        return task.exception() or task.result()

    # -- the group --------------------------------------------------------------------------------------------

    async def _meet(self, servers: Sequence[Server]) -> tuple[Member | None, Found]:
        """The group of all workers of `servers`; None when it did not come about, and why it did not."""
        answered, found = await self._ask(servers, lambda server: ("ostinato_meet", ()))
        if found:
            return None, found
        firsts, size = {}, 1
        for server in servers:
            firsts[server.name] = size
            size += len(answered[server.name])
        if self.member is not None and self._is_whole(self.member, answered, firsts, size):
            return self.member, {}
        self._leave("another group is formed")
        places = [answer["place"] for answers in answered.values() for answer in answers]
        meeting = self._meeting(size, [place_of(self._device), *places])
        joining = asyncio.create_task(asyncio.to_thread(Member, meeting, 0, self._device))
        given = {server.name: ("ostinato_join", (asdict(meeting), firsts[server.name])) for server in servers}
        _, found = await self._ask(servers, lambda server: given[server.name])
        try:
            self.member = await joining
        except BrokenOff as error:
            wrong = SamplerOutOfSync(f"the workers did not form a group: {error}")
            return None, {server.name: found.get(server.name, wrong) for server in servers}
        return (self.member, {}) if not found else (None, found)

    def _meeting(self, size: int, places: Sequence[Mapping[str, Any]]) -> Meeting:
        if self._store is None:
            self._store = open_store(self._host, self._seconds)
        kind = kind_of(places)
        log.info("weights go to %d workers by %s", size - 1, kind)
        name, port = f"ostinato-{secrets.token_hex(16)}", self._store[1]
        return Meeting(name, self._host, port, size, kind, self._seconds, self._bucket_bytes)

    @staticmethod
    def _is_whole(
        member: Member, answered: Mapping[str, list[dict[str, Any]]], firsts: Mapping[str, int], size: int
    ) -> bool:
        ranks = [
            answer["member"] == [member.meeting.name, firsts[name] + answer["rank"]]
            for name, answers in answered.items()
            for answer in answers
        ]
        return member.whole and member.meeting.size == size and all(ranks)

    async def _ask(
        self, servers: Sequence[Server], call: Callable[[Server], tuple[str, tuple[Any, ...]]]
    ) -> tuple[dict[str, list[dict[str, Any]]], Found]:
        """(What the workers of each server answered, {}) or, when one did not, ({}, an error for each server)."""

        async def one(server: Server) -> list[dict[str, Any]]:
            process, (method, args) = server.process, call(server)
            try:
                answers, _ = await server.remote.rpc(method, *args)
            except WorkerDied:
                await server.fail(process)
                raise
            refuse_wrong(answers, [answer["boot"] for answer in answers], who=f"vLLM server {server.name}")
            return answers

        got = await asyncio.gather(*(one(server) for server in servers), return_exceptions=True)
        failed = [answers for answers in got if isinstance(answers, BaseException)]
        if not failed:
            return {s.name: a for s, a in zip(servers, got, strict=True) if not isinstance(a, BaseException)}, {}
        others = SamplerOutOfSync(f"another server did not take part in the broadcast: {failed[0]}")
        return {}, {
            server.name: answers if isinstance(answers, BaseException) else others
            for server, answers in zip(servers, got, strict=True)
        }

    def _leave(self, why: str) -> None:
        if self.member is not None:
            self.member.leave(why)
        self.member = None

    def close(self) -> None:
        self._leave("the pool closes")
        self._store = None


def hosts_of(urls: Sequence[str]) -> list[str]:
    return [urlsplit(url).hostname or "127.0.0.1" for url in urls]


async def _awaited(loading: Awaitable[Receipt]) -> Receipt:
    return await loading


def _send(member: Member, source: Source, manifest: Manifest) -> None:
    """Raises BrokenOff; SamplerOutOfSync when the staged files are not what they were."""
    try:
        with torch.no_grad():
            if member.device.type == "cuda":
                torch.cuda.set_device(member.device)  # of this thread
            send(member, _pairs(source, manifest), manifest)
    except BadSpec as error:
        raise SamplerOutOfSync(f"the weights could not be sent: {error}") from error


def _pairs(source: Source, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """In the manifest's order, which of files is theirs."""
    if isinstance(source, Mapping):
        yield from ((name, source[name]) for name in manifest)
        return
    for path in source:
        yield from read_tensors(path)
