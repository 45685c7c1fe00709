"""Delivers weights to the replicas of a pool: from files, or by a broadcast (`broadcast`).

This module is the engine's side of the broadcast: it decides which replicas take part, forms the group of the senders
and of the replicas' workers, and collects the outcome of each replica. The engine's process sends tensors and files. A
trainer in several processes sends its weights itself (`HeldWeights`). The group is used for many syncs. A new group is
formed if a replica or a sender has another process than before, and after an aborted broadcast. If a replica dies
during a broadcast, the others get the weights at a second attempt, and the sync does not fail. If a sender dies, the
sync fails.

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
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.backends.replicas.broadcast import (
    BUCKET_BYTES,
    BroadcastAborted,
    BroadcastGroup,
    DeviceInfo,
    GroupMember,
    Parts,
    abort_group,
    device_info,
    is_aborted,
    open_store,
    select_backend,
    send,
)
from engine.backends.replicas.replica import Replica
from engine.backends.replicas.runtime import (
    HeldWeights,
    LoadProof,
    Manifest,
    Senders,
    Source,
    check_replies,
    worker_ids_of,
)
from engine.backends.weight_files.tensor_files import read_tensors
from engine.cluster.actors import ActorHandle
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied

log = logging.getLogger(__name__)

ABORT_TIMEOUT = 10.0
"""Seconds that a worker may take to notice that the broadcast was aborted."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one `load`."""

    paths: tuple[str, ...]
    """The safetensors files. Empty if the weights were broadcast; they cannot be loaded again then."""
    manifest: Manifest
    state: str
    full: bool
    """Whether every column is read back, instead of a sample."""
    link_folder: Path | None = None
    """Folder of links to the files, which keep them after the caller has removed its own; see `link_files`."""
    group: str = ""
    """Name of the broadcast group that the weights are sent to."""
    parts: Parts | None = None
    """Which sender broadcasts which part. None if one process sends everything."""

    @property
    def source(self) -> list[str] | str:
        """The `source` argument of `Extension.ostinato_load`: paths, or the name of a broadcast group."""
        return list(self.paths) if self.paths else self.group

    @property
    def files_exist(self) -> bool:
        """Whether a replica can load the weights again."""
        return bool(self.paths) and all(Path(path).is_file() for path in self.paths)

    def link_files(self) -> LoadRequest:
        """Makes hard links to the files in a new folder next to the caller's, and returns a request for the links.

        The links take no space while the original files exist. Without support for links in the file system, this
        returns the request itself.
        """
        if not self.paths:
            return self
        # A hard link must be in the file system of its file. The caller deletes the files' own folder.
        folder = Path(tempfile.mkdtemp(prefix="ostinato-base-", dir=Path(self.paths[0]).parent.parent))
        links: list[str] = []
        try:
            for number, path in enumerate(self.paths):
                link = folder / f"{number}.safetensors"
                os.link(path, link)
                links.append(str(link))
        except OSError as error:
            log.warning("the weights are not kept for replicas that are started again: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return self
        return replace(self, paths=tuple(links), link_folder=folder)

    def remove_links(self) -> None:
        """Deletes the links of `link_files`."""
        if self.link_folder is not None:
            shutil.rmtree(self.link_folder, ignore_errors=True)


LoadInto = Callable[[Replica, LoadRequest], Awaitable[LoadProof]]
"""Lets one replica load the weights of a request."""
Outcomes = dict[str, LoadProof | BaseException]
"""By name of the replica: its proof, or the error of its load."""


class WeightDelivery(Protocol):
    """How weights reach the replicas of a pool."""

    def paths(self, source: Source) -> tuple[str, ...]:
        """Files from which a replica that is started again can load the weights; empty if it cannot."""
        ...

    async def deliver(
        self, replicas: Sequence[Replica], request: LoadRequest, source: Source, load_into: LoadInto
    ) -> list[LoadProof | BaseException]:
        """Delivers the weights. Returns for each replica its proof, or the error of its load."""
        ...

    def close(self) -> None: ...


class FileDelivery:
    """Every replica reads the staged files itself."""

    def paths(self, source: Source) -> tuple[str, ...]:
        if isinstance(source, Mapping | HeldWeights):
            raise BadSpec("replicas take weights as files, not as tensors: stage them first")
        return tuple(str(path) for path in source)

    async def deliver(
        self, replicas: Sequence[Replica], request: LoadRequest, source: Source, load_into: LoadInto
    ) -> list[LoadProof | BaseException]:
        return await asyncio.gather(*(load_into(replica, request) for replica in replicas), return_exceptions=True)

    def close(self) -> None:
        """Does nothing: no resource is open."""


FILE_DELIVERY = FileDelivery()


class EngineSender:
    """Implements runtime.Senders: this process sends everything, as rank 0 of the group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.member: GroupMember | None = None

    def is_in(self, group: str) -> bool:
        return self.member is not None and self.member.group.name == group and self.member.usable

    def devices(self) -> list[DeviceInfo]:
        return [device_info(self._device)]

    def join(self, group: BroadcastGroup) -> None:
        self.member = GroupMember(group, 0, self._device)

    def leave(self, group: str, reason: str) -> None:
        if self.member is not None:
            self.member.leave(reason)
        self.member = None

    def send(self, source: Source, manifest: Manifest, group: str) -> None:
        if self.member is None:
            raise BroadcastAborted("the engine's process has left the group")
        try:
            with torch.no_grad():
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a setting of the thread, and this one is new
                send(self.member, _named_tensors(source, manifest), manifest)
        except BadSpec as error:
            raise SamplerOutOfSync(f"the weights could not be sent: {error}") from error


def _named_tensors(source: Source, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the manifest's order. The manifest of files has the order of the files."""
    assert not isinstance(source, HeldWeights)
    if isinstance(source, Mapping):
        yield from ((name, source[name]) for name in manifest)
        return
    for path in source:
        yield from read_tensors(path)


class BroadcastDelivery:
    """Sends the weights to a group with all workers of the replicas."""

    def __init__(self, host: str, device: torch.device, *, timeout: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Nothing is opened yet.

        Args:
            host: address by which the replicas reach this machine.
            device: where the trainer's tensors are.
            timeout: seconds that the members may take to connect, and that each exchange may take.
        """
        self._store_host = host
        self._timeout, self._bucket_bytes = timeout, bucket_bytes
        self._store: tuple[Any, int] | None = None
        """(store, port)."""
        self._engine_sender = EngineSender(device)
        self.group: BroadcastGroup | None = None
        """The group that the last weights were sent to. None before the first sync, and after an aborted one."""
        self._senders: Senders = self._engine_sender
        self._actors: list[ActorHandle | None] = []
        """The replicas' processes in the group."""

    def paths(self, source: Source) -> tuple[str, ...]:
        return ()

    async def deliver(
        self, replicas: Sequence[Replica], request: LoadRequest, source: Source, load_into: LoadInto
    ) -> list[LoadProof | BaseException]:
        outcomes: Outcomes = {}
        remaining = list(replicas)
        while remaining:
            outcomes |= await self._broadcast(remaining, request, source, load_into)
            # Separate the replicas that died from the others.
            alive: list[Replica] = []
            deaths: list[WorkerDied] = []
            all_loaded = True
            for replica in remaining:
                outcome = outcomes[replica.name]
                if isinstance(outcome, WorkerDied):
                    deaths.append(outcome)
                else:
                    alive.append(replica)
                    all_loaded = all_loaded and isinstance(outcome, LoadProof)
            # The death of a replica aborted the broadcast for the others: repeat it without the dead.
            if not deaths or all_loaded:
                break
            for death in deaths:
                log.warning("%s; the weights are sent to the other replicas again", death)
            remaining = alive
        return [outcomes[replica.name] for replica in replicas]

    async def _broadcast(
        self, replicas: Sequence[Replica], request: LoadRequest, source: Source, load_into: LoadInto
    ) -> Outcomes:
        """Makes one attempt to send the weights to these replicas."""
        senders = source.senders if isinstance(source, HeldWeights) else self._engine_sender
        group, outcomes = await self._join_group(replicas, senders)
        if group is None:
            return outcomes

        # Send in a thread, while each replica receives and loads.
        group_request = replace(request, group=group.name)
        loading: dict[asyncio.Task[LoadProof], Replica] = {}
        for replica in replicas:
            loading[asyncio.create_task(_awaited(load_into(replica, group_request)))] = replica
        sending = asyncio.create_task(asyncio.to_thread(senders.send, source, request.manifest, group.name))
        await asyncio.wait([sending, *loading], return_when=asyncio.FIRST_EXCEPTION)
        error = _first_error([sending, *loading])
        if error is None:
            return {replica.name: task.result() for task, replica in loading.items()}

        # After an error all members abort. Wait for them, since each replica's own error says more than the abort.
        self._leave_group(f"the engine gave up: {error}")
        await asyncio.wait([sending], timeout=self._timeout + ABORT_TIMEOUT)
        await asyncio.wait(loading, timeout=ABORT_TIMEOUT)
        for task, replica in loading.items():
            outcomes[replica.name] = await self._settle(task, replica)
        # If a sender died or could not read its tensors, no replica is at fault, and the whole sync fails.
        sender_error = _first_error([sending])
        if sender_error is not None and not isinstance(sender_error, BroadcastAborted):
            raise sender_error
        return outcomes

    async def _settle(self, task: asyncio.Task[LoadProof], replica: Replica) -> LoadProof | BaseException:
        """Kills a replica that is still loading after an abort. Returns the outcome of the load."""
        if not task.done():
            actor = replica.actor
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await replica.fail(actor)
            return WorkerDied(f"vLLM {replica.name} was silent after a broadcast was aborted, and was killed")
        return task.exception() or task.result()

    # -- the group --------------------------------------------------------------------------------------------

    async def _join_group(
        self, replicas: Sequence[Replica], senders: Senders
    ) -> tuple[BroadcastGroup | None, Outcomes]:
        """(the group of the senders and of all workers, {}), or (None, an error for each replica). Raises WorkerDied if
        a sender is gone."""
        # Reuse the group if it has the same processes.
        actors = [replica.actor for replica in replicas]
        if self._is_usable() and senders is self._senders and actors == self._actors:
            return self.group, {}
        self._leave_group("another group is formed")

        # Ask the workers for their devices, which decide the backend. Their replies also tell how many they are.
        replies_by_replica, outcomes = await self._call_workers(replicas, [("ostinato_device",) for _ in replicas])
        if outcomes:
            return None, outcomes
        devices = await asyncio.to_thread(senders.devices)
        first_ranks = []
        for replies in replies_by_replica:
            first_ranks.append(len(devices))
            devices += [reply["device_info"] for reply in replies]
        store, group = self._new_group(devices)

        # All join at the same time. The workers of a replica have consecutive ranks.
        joining = asyncio.create_task(asyncio.to_thread(senders.join, group))
        calls = [("ostinato_join_group", asdict(group), first_rank) for first_rank in first_ranks]
        _, outcomes = await self._call_workers(replicas, calls)
        try:
            await asyncio.wait_for(joining, self._timeout + ABORT_TIMEOUT)
        except (BroadcastAborted, TimeoutError) as error:
            abort_group(store, group.name, "the group was not formed")
            not_formed = SamplerOutOfSync(f"the workers did not form a group: {error or 'a sender is silent'}")
            return None, {replica.name: outcomes.get(replica.name, not_formed) for replica in replicas}
        self.group, self._senders, self._actors = group, senders, actors
        return (None, outcomes) if outcomes else (group, {})

    def _is_usable(self) -> bool:
        """Whether no process of the group has left it."""
        if self.group is None or self._store is None or not self._senders.is_in(self.group.name):
            return False
        return not is_aborted(self._store[0], self.group.name)

    def _new_group(self, devices: Sequence[DeviceInfo]) -> tuple[Any, BroadcastGroup]:
        """(the store of this process, a group in it)."""
        if self._store is None:
            self._store = open_store(self._store_host, self._timeout)
        backend = select_backend(devices)
        log.info("weights are broadcast in a group of %d processes by %s", len(devices), backend)
        (store, port), name = self._store, f"ostinato-{secrets.token_hex(16)}"
        size, timeout, bucket_bytes = len(devices), self._timeout, self._bucket_bytes
        return store, BroadcastGroup(name, self._store_host, port, size, backend, timeout, bucket_bytes)

    async def _call_workers(
        self, replicas: Sequence[Replica], calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[list[dict[str, Any]]], Outcomes]:
        """Calls a method on the workers of each replica.

        Returns (replies of the workers by replica, {}), or ([], an error for each replica) if a worker failed.
        """

        async def call_replica(replica: Replica, call: tuple[Any, ...]) -> list[dict[str, Any]]:
            actor = replica.running_actor()
            try:
                replies: list[dict[str, Any]] = await actor.call("rpc", *call)
            except WorkerDied:
                await replica.fail(actor)
                raise
            check_replies(replies, worker_ids_of(replies), who=f"vLLM {replica.name}")
            return replies

        results = await asyncio.gather(*map(call_replica, replicas, calls), return_exceptions=True)
        replies_by_replica: list[list[dict[str, Any]]] = []
        errors: Outcomes = {}
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, BaseException):
                errors[replica.name] = result
            else:
                replies_by_replica.append(result)
        if not errors:
            return replies_by_replica, {}

        # If one replica failed, the others cannot form the group without it.
        first_error = next(iter(errors.values()))
        outcomes: Outcomes = {}
        for replica in replicas:
            message = f"another replica did not take part in the broadcast: {first_error}"
            outcomes[replica.name] = errors.get(replica.name, SamplerOutOfSync(message))
        return [], outcomes

    def _leave_group(self, reason: str) -> None:
        if self.group is not None and self._store is not None:
            # Senders in other processes read the flag. This process is no member of their group.
            abort_group(self._store[0], self.group.name, reason)
            self._senders.leave(self.group.name, reason)
        self.group = None

    def close(self) -> None:
        self._leave_group("the pool closes")
        self._store = None


async def _awaited(loading: Awaitable[LoadProof]) -> LoadProof:
    """A coroutine of an awaitable, because a task cannot be made from every awaitable."""
    return await loading


def _first_error(tasks: Sequence[asyncio.Task[Any]]) -> BaseException | None:
    """The exception of the first task that has ended with one."""
    for task in tasks:
        if task.done() and task.exception() is not None:
            return task.exception()
    return None

