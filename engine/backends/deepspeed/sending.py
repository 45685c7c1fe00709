"""The ranks send their weights to vLLM's replicas themselves: each rank its own part, while its other thread computes.

`RankSenders` is the engine's side, and `RankSender` that of each rank. No weights pass through the engine's process.
engine.backends.replicas.delivery decides when they are sent, and to which replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.backends.replicas.broadcast import (
    BroadcastAborted,
    BroadcastGroup,
    DeviceInfo,
    GroupMember,
    Parts,
    device_info,
    send,
)
from engine.backends.replicas.runtime import HeldWeights, Manifest, Source
from engine.cluster.rank_group import RankGroup
from engine.errors import SamplerOutOfSync, WorkerDied


class RankSenders:
    """Implements engine.backends.replicas.runtime.Senders by calls to the ranks of one start. They are the first
    members of the group, in the order of the ranks."""

    def __init__(self, group: RankGroup, start_number: int) -> None:
        self._group, self.start_number = group, start_number
        self._joined: set[str] = set()
        """Names of the broadcast groups that the ranks have joined."""
        self._lock = threading.Lock()
        """Held during a call, so that all ranks get the calls of several pools in the same order."""

    def is_in(self, group: str) -> bool:
        return group in self._joined and self._alive

    @property
    def _alive(self) -> bool:
        return self._group.alive and self._group.start_number == self.start_number

    def devices(self) -> list[DeviceInfo]:
        return self._call("sender_device")

    def join(self, group: BroadcastGroup) -> None:
        self._raise_reason(self._call("join_broadcast", asdict(group)))
        self._joined.add(group.name)

    def leave(self, group: str, reason: str) -> None:
        # The abort flag of the group tells the ranks. They leave it when they join the next one.
        self._joined.discard(group)

    def send(self, source: Source, manifest: Manifest, group: str) -> None:
        assert isinstance(source, HeldWeights)
        self._raise_reason(self._call("send_weights", source.number, group))

    def _call(self, method: str, *args: Any) -> list[Any]:
        """The results of all ranks. Raises WorkerDied if the ranks are gone, and SamplerOutOfSync if a call failed."""
        results: dict[int, Any] = {}
        with self._lock:
            if self._alive:
                results = self._group.call_beside(method, *args, lane="weights")
        if not self._alive:
            raise WorkerDied("the ranks ended before they had sent their weights; the next call starts them again")
        if len(results) < self._group.size:
            raise SamplerOutOfSync(f"{method} failed on a rank; the engine's log has the error")
        return [results[rank] for rank in range(self._group.size)]

    @staticmethod
    def _raise_reason(reasons: Sequence[str]) -> None:
        """Raises BroadcastAborted with the first reason that is not empty."""
        for reason in reasons:
            if reason:
                raise BroadcastAborted(reason)


@dataclass(frozen=True, slots=True)
class HeldParts:
    """A copy of one rank's part of the weights, for one sync."""

    manifest: Manifest
    parts: Parts
    """The parts of all ranks."""
    tensors: Sequence[tuple[str, Tensor]]
    """This rank's own parts, flattened, in the order of the manifest."""


@dataclass(slots=True)
class RankSender:
    """The sender of one rank."""

    rank: int
    device: torch.device
    held: dict[int, HeldParts] = field(default_factory=dict)
    """By number: the weights that this rank holds for a sync."""
    _members: dict[str, GroupMember] = field(default_factory=dict)
    """The broadcast groups that this rank has joined, by name. Each pool of replicas has one."""

    def device_info(self) -> DeviceInfo:
        return dict(device_info(self.device))

    def join(self, group: BroadcastGroup) -> str:
        """Joins a group. Returns why it could not, or ""."""
        for name, member in list(self._members.items()):
            if not member.usable:
                member.leave()
                del self._members[name]
        try:
            self._members[group.name] = GroupMember(group, self.rank, self.device)
        except BroadcastAborted as error:
            return str(error)
        return ""

    @torch.no_grad()
    def send(self, number: int, group_name: str) -> str:
        """Sends this rank's parts. Returns why they could not be sent, or ""."""
        member, held = self._members.get(group_name), self.held.get(number)
        if member is None or held is None:
            return f"rank {self.rank} is no member of group {group_name}, or holds no weights of number {number}"
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a setting of the thread
            send(member, held.tensors, held.manifest, held.parts)
        except BroadcastAborted as error:
            return str(error)
        return ""

    def close(self) -> None:
        for member in self._members.values():
            member.leave("the ranks were closed")
        self._members.clear()
        self.held.clear()
