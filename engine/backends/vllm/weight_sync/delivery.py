"""How a pool has its replicas take weights: from files, or by a broadcast (engine.backends.vllm.weight_sync.broadcast).

For the broadcast, this is the half of the engine's process: which replicas take part, the group of their workers, and
what each one answered. The group stays from sync to sync. It is formed again when a replica is another process than
before, and after a broadcast that was broken off. A replica that dies in the middle costs the others a second try, not
the sync.

Why the broadcast is our own (Ray 2.60, vLLM 0.32, from their sources):

- Ray's direct tensor transport (ray.experimental.rdt) moves tensors between actors. The processes that need weights are
  vLLM's engine and its workers, which are child processes of the actor and no actors themselves. The engine's process
  is no actor either: `ray.put` refuses the two-sided transports (NCCL, GLOO). The one-sided ones are NIXL, which needs
  that library, and CUDA IPC, which needs one machine. A two-sided transfer that fails cannot be aborted: Ray kills both
  actors, so that one lost replica would cost them all.
- vLLM's weight transfer (vllm.distributed.weight_transfer) has engines for GPUs alone (nccl, ipc and their variants)
  and none for the CPU. Its group is a PyNcclCommunicator, whose broadcasts have no deadline: when a member is stopped,
  all others wait for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.runtime import Manifest, Receipt, Source
from engine.backends.vllm.weight_sync.broadcast import (
    BUCKET_BYTES,
    BrokenOff,
    Meeting,
    Member,
    kind_of,
    open_store,
    place_of,
    send,
)
from engine.backends.vllm.weight_sync.last_weights import Weights
from engine.backends.vllm.weight_sync.receipts import refuse_wrong
from engine.backends.weight_files.tensor_files import read_tensors
from engine.cluster.actors import ActorHandle
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long a worker may take to notice that the others have given up."""

LoadInto = Callable[[Replica, Weights], Awaitable[Receipt]]
Outcomes = dict[str, Receipt | BaseException]
"""By replica: what it proved, or why not."""


class Delivery(Protocol):
    """How weights reach the replicas of a pool."""

    takes_tensors: bool
    """Whether `source` may be the tensors themselves."""

    def paths(self, source: Source) -> tuple[str, ...]:
        """Files from which a replica that is started again can take the weights later; none where it cannot."""
        ...

    async def deliver(
        self, replicas: Sequence[Replica], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        """What each replica proved, or why it did not; `load_into` has one load the weights that it is given."""
        ...

    def close(self) -> None: ...


class ByFiles:
    """Every replica reads the staged files on its own."""

    takes_tensors = False

    def paths(self, source: Source) -> tuple[str, ...]:
        if isinstance(source, Mapping):
            raise BadSpec("replicas take weights as files, not as tensors: stage them first")
        return tuple(str(path) for path in source)

    async def deliver(
        self, replicas: Sequence[Replica], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        return await asyncio.gather(*(load_into(replica, weights) for replica in replicas), return_exceptions=True)

    def close(self) -> None:
        """Nothing stays open."""


BY_FILES = ByFiles()


class ByBroadcast:
    """Rank 0 of the pool's groups. `device` is where the trainer's tensors are."""

    takes_tensors = True

    def __init__(
        self, host: str, device: torch.device, *, seconds: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`host`: the address by which the replicas reach this machine."""
        self._host = host
        self._device, self._seconds, self._bucket_bytes = device, seconds, bucket_bytes
        self._store: tuple[Any, int] | None = None
        self.member: Member | None = None
        self._actors: list[ActorHandle | None] = []
        """The processes that are in its group."""

    def paths(self, source: Source) -> tuple[str, ...]:
        return ()

    async def deliver(
        self, replicas: Sequence[Replica], weights: Weights, source: Source, load_into: LoadInto
    ) -> list[Receipt | BaseException]:
        outcomes: Outcomes = {}
        left = list(replicas)
        while left:
            outcomes |= await self._try(left, weights, source, load_into)
            alive = [replica for replica in left if not isinstance(outcomes[replica.name], WorkerDied)]
            if len(alive) == len(left) or all(isinstance(outcomes[replica.name], Receipt) for replica in alive):
                break
            for name in sorted({replica.name for replica in left} - {replica.name for replica in alive}):
                log.warning("%s; the weights are sent to the other replicas again", outcomes[name])
            left = alive
        return [outcomes[replica.name] for replica in replicas]

    async def _try(
        self, replicas: Sequence[Replica], weights: Weights, source: Source, load_into: LoadInto
    ) -> Outcomes:
        member, outcomes = await self._meet(replicas)
        if member is None:
            return outcomes
        to_group = replace(weights, group=member.meeting.name)
        loading = {asyncio.create_task(_awaited(load_into(replica, to_group))): replica for replica in replicas}
        sending = asyncio.create_task(asyncio.to_thread(_send, member, source, weights.manifest))
        await asyncio.wait([sending, *loading], return_when=asyncio.FIRST_EXCEPTION)
        error = next((task.exception() for task in (sending, *loading) if task.done() and task.exception()), None)
        if error is None:
            return {replica.name: task.result() for task, replica in loading.items()}
        self._leave(f"the engine gave up: {error}")
        await asyncio.wait([sending], timeout=self._seconds + GRACE_SECONDS)
        await asyncio.wait(loading, timeout=GRACE_SECONDS)
        for task, replica in loading.items():
            outcomes[replica.name] = await self._outcome(task, replica)
        fault = sending.exception() if sending.done() else None
        if fault is not None and not isinstance(fault, BrokenOff):
            raise fault  # of the trainer's tensors, not of a replica
        return outcomes

    async def _outcome(self, task: asyncio.Task[Receipt], replica: Replica) -> Receipt | BaseException:
        if not task.done():
            actor = replica.actor
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await replica.fail(actor)
            return WorkerDied(f"vLLM {replica.name} was silent after a broadcast was broken off: it is ended")
        return task.exception() or task.result()

    # -- the group --------------------------------------------------------------------------------------------

    async def _meet(self, replicas: Sequence[Replica]) -> tuple[Member | None, Outcomes]:
        """The group of all workers of `replicas`; None when it did not come about, and why it did not."""
        actors = [replica.actor for replica in replicas]
        if self.member is not None and self.member.whole and actors == self._actors:
            return self.member, {}
        self._leave("another group is formed")
        places, outcomes = await self._ask(replicas, [("ostinato_place",) for _ in replicas])
        if outcomes:
            return None, outcomes
        firsts = list(itertools.accumulate((len(answers) for answers in places), initial=1))
        meeting = self._meeting(
            firsts.pop(), [place_of(self._device), *(answer["place"] for answers in places for answer in answers)]
        )
        joining = asyncio.create_task(asyncio.to_thread(Member, meeting, 0, self._device))
        _, outcomes = await self._ask(replicas, [("ostinato_join", asdict(meeting), first) for first in firsts])
        try:
            self.member, self._actors = await joining, actors
        except BrokenOff as error:
            wrong = SamplerOutOfSync(f"the workers did not form a group: {error}")
            return None, {replica.name: outcomes.get(replica.name, wrong) for replica in replicas}
        return (self.member, {}) if not outcomes else (None, outcomes)

    def _meeting(self, size: int, places: Sequence[Mapping[str, Any]]) -> Meeting:
        if self._store is None:
            self._store = open_store(self._host, self._seconds)
        kind = kind_of(places)
        log.info("weights go to %d workers by %s", size - 1, kind)
        name, port = f"ostinato-{secrets.token_hex(16)}", self._store[1]
        return Meeting(name, self._host, port, size, kind, self._seconds, self._bucket_bytes)

    async def _ask(
        self, replicas: Sequence[Replica], calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[list[dict[str, Any]]], Outcomes]:
        """(What the workers of each replica answered, {}) or, when one did not, ([], an error for each replica)."""

        async def ask(replica: Replica, call: tuple[Any, ...]) -> list[dict[str, Any]]:
            actor = replica.running()
            try:
                answers: list[dict[str, Any]] = await actor.call("rpc", *call)
            except WorkerDied:
                await replica.fail(actor)
                raise
            refuse_wrong(answers, [answer["boot"] for answer in answers], who=f"vLLM {replica.name}")
            return answers

        answered = await asyncio.gather(*map(ask, replicas, calls), return_exceptions=True)
        errors = [answers for answers in answered if isinstance(answers, BaseException)]
        if not errors:
            return [answers for answers in answered if not isinstance(answers, BaseException)], {}
        others = SamplerOutOfSync(f"another replica did not take part in the broadcast: {errors[0]}")
        return [], {
            replica.name: answers if isinstance(answers, BaseException) else others
            for replica, answers in zip(replicas, answered, strict=True)
        }

    def _leave(self, why: str) -> None:
        if self.member is not None:
            self.member.leave(why)
        self.member = None

    def close(self) -> None:
        self._leave("the pool closes")
        self._store = None


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
