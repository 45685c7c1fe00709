"""Weights by a broadcast: the engine's process is rank 0 of a group, every vLLM worker of a pool is another rank.

The group is of its own: neither torch's default group, which vLLM uses, nor one that DeepSpeed knows. Between GPUs it
is NCCL; where a member has no GPU of its own it is gloo. All tensors, in the manifest's order, are one stream of bytes,
cut into buckets: each end holds one bucket, and the tensor that it is at, besides the model. What arrives is digested
like what comes in files, so a bucket that is lost, doubled or garbled is a receipt that does not fit.

No member waits for ever: each exchange has its seconds, and a flag in the store that the engine's process keeps ends
all others when one gives up. A store that no longer answers does the same. A group that was broken off is never used
again.

The store and gloo know no passwords, nor does NCCL: whoever reaches the engine's address inside the cluster and guesses
a group's name could read the weights (nobody can change them unnoticed). Run it in a network that is yours.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.environment_variables import set_environment_variables

BUCKET_BYTES = 256 << 20
LOOK_SECONDS = 0.2
"""Between two looks at the flag."""
PAUSE_SECONDS = 0.0005
STOPPED = "stopped"
"""The flag: why it was broken off."""
WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watchdog answers a lost member by ending the process; here the deadline and the flag do that work."""

Kind = Literal["gloo", "nccl"]
Place = Mapping[str, Any]
"""Where a member computes: {"device": "cpu" | "cuda", "gpu": which one in the world, "nccl": its version}."""
Entries = Mapping[str, Sequence[Any]]
"""A manifest: (dtype, shape, digest) by name."""
T = TypeVar("T")


class BrokenOff(Exception):
    """The broadcast did not come to its end; the text says who gave up and why."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of one group find each other. Goes to the workers as JSON."""

    name: str
    host: str
    port: int
    size: int
    kind: Kind
    seconds: float
    """For the meeting, and for each exchange."""
    bucket_bytes: int = BUCKET_BYTES


def place_of(device: torch.device) -> Place:
    if device.type != "cuda":
        return {"device": device.type, "gpu": None, "nccl": None}
    version = list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None
    return {"device": "cuda", "gpu": str(torch.cuda.get_device_properties(device).uuid), "nccl": version}


def kind_of(places: Sequence[Place]) -> Kind:
    """NCCL wants a GPU for each member alone, and one version for all."""
    own = all(place["device"] == "cuda" and place["nccl"] for place in places)
    apart = len({place["gpu"] for place in places}) == len(places)
    return "nccl" if own and apart and len({tuple(place["nccl"]) for place in places}) == 1 else "gloo"


def own_address(host: str) -> str:
    """The address of this machine on its way to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: asks for the way, sends nothing
        return str(probe.getsockname()[0])


def open_store(host: str, seconds: float) -> tuple[Any, int]:
    """The store of the engine's process, which listens at `host` alone, and its port."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen(socket.SOMAXCONN)
    port = int(listening.getsockname()[1])
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=seconds)}
    return dist.TCPStore(host, port, master_listen_fd=listening.detach(), **options), port


class Member:
    """One rank of a group, from the meeting until `leave`."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Returns when all have come. Raises BrokenOff when that takes longer than the meeting's seconds."""
        self.meeting, self.rank = meeting, rank
        self.device = device if meeting.kind == "nccl" else torch.device("cpu")
        self._group: Any = None
        self._why, self._told = "", ""
        self._leaving, self._stopped = threading.Event(), threading.Event()
        atexit.register(self.leave)  # a thread that is inside torch when Python ends takes the process down
        try:
            store, flags = self._store(), self._store()  # one waits for keys; the other must be able to speak meanwhile
            threading.Thread(target=self._watch, args=(flags,), name="broadcast-flag", daemon=True).start()
            _within(meeting.seconds, lambda: self._meet(store))
        except RuntimeError as error:
            raise self._broken(error, "did not meet the others") from error
        except BrokenOff as error:
            self.leave(str(error))
            raise

    def _meet(self, store: Any) -> None:
        self._group = _group(store, self.meeting, self.rank, self.device)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects in its first exchange

    def _store(self) -> Any:
        timeout = timedelta(seconds=self.meeting.seconds)
        client = dist.TCPStore(self.meeting.host, self.meeting.port, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(self.meeting.name, client)

    @property
    def whole(self) -> bool:
        """Whether it can still take part."""
        return not self._leaving.is_set() and not self._stopped.is_set()

    def broadcast(self, flat: Tensor) -> None:
        """What rank 0 has in `flat`, a contiguous tensor, is in everybody's."""
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        deadline = time.monotonic() + self.meeting.seconds
        try:
            group = self._group
            if group is None:
                raise BrokenOff(self._told or self._why or f"rank {self.rank} has left the group")
            work = group.broadcast([flat], options)  # by this thread: it is ordered behind this thread's stream
            while not work.is_completed():
                if not self.whole:
                    raise BrokenOff(self._told or self._why)
                if time.monotonic() > deadline:
                    raise BrokenOff(f"rank {self.rank} heard nothing from another for {self.meeting.seconds:g} s")
                time.sleep(PAUSE_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise self._broken(error, "lost another") from error

    def _broken(self, error: Exception, what: str) -> BrokenOff:
        """Another's reason, if one comes in time, is better than what this one saw of it."""
        self._stopped.wait(2 * LOOK_SECONDS)
        why = self._told or f"rank {self.rank} of {self.meeting.size} {what}: {str(error).splitlines()[0]}"
        self.leave(why)
        return BrokenOff(why)

    def _watch(self, flags: Any) -> None:
        try:
            while not self._leaving.wait(LOOK_SECONDS):
                if flags.check([STOPPED]):
                    self._told = flags.get(STOPPED).decode()
                    return
            if self._why:
                flags.compare_set(STOPPED, "", self._why)  # the first reason stays
        except RuntimeError as error:
            self._told = f"the process that sends is gone: {str(error).splitlines()[0]}"
        finally:
            self._stopped.set()

    def leave(self, why: str = "") -> None:
        """Ends its part; with `why`, everybody's. May be called by any thread, and again."""
        if not self._leaving.is_set():
            self._why = why
            self._leaving.set()
            self._stopped.wait(5 * LOOK_SECONDS)
            atexit.unregister(self.leave)
        group, self._group = self._group, None
        if group is not None:  # elsewhere, since an exchange that hangs holds it
            ending = threading.Thread(target=_let_go, args=(group,), name="broadcast-end", daemon=True)
            del group
            ending.start()
            ending.join(LOOK_SECONDS)


def _group(store: Any, meeting: Meeting, rank: int, device: torch.device) -> Any:
    options: Any
    if meeting.kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.seconds)
        torch.cuda.set_device(device)  # of this thread
        with set_environment_variables(WATCHDOG_OFF):
            return dist.ProcessGroupNCCL(store, rank, meeting.size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=meeting.seconds)
    options._devices = [gloo.create_device(hostname=own_address(meeting.host))]
    return gloo(store, rank, meeting.size, options)


def _let_go(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _within(seconds: float, call: Callable[[], T]) -> T:
    """NCCL connects inside calls that know no timeout: such a call is left behind in its thread."""
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, name="broadcast-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise BrokenOff(f"a call was not over after {seconds:g} s: another member did not come, or hangs")
    return found[0]


# -- tensors ------------------------------------------------------------------------------------------------------


def send(member: Member, tensors: Iterable[tuple[str, Tensor]], manifest: Entries) -> None:
    """On rank 0. `tensors` come in the manifest's order, as they are in it. Raises BrokenOff; what `tensors` raises
    ends the others too."""
    bucket, at, names = _bucket(member, manifest), 0, iter(manifest)
    try:
        for name, tensor in tensors:
            dtype, shape, _ = manifest[name]
            if name != next(names, None) or (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
                raise BrokenOff(f"tensor {name} came to the sender out of turn, or not as the manifest has it")
            flat, start = _bytes(tensor.detach().contiguous()), 0
            while start < len(flat):
                count = min(len(bucket) - at, len(flat) - start)
                bucket[at : at + count] = flat[start : start + count]
                start, at = start + count, at + count
                if at == len(bucket):
                    member.broadcast(bucket)
                    at = 0
        if (missing := next(names, None)) is not None:
            raise BrokenOff(f"tensor {missing} did not come to the sender")
        if at:
            member.broadcast(bucket[:at])
    except BaseException as error:
        member.leave(f"the sender gave up: {error}")
        raise


def receive(member: Member, manifest: Entries) -> Iterator[tuple[str, Tensor]]:
    """On every other rank: the tensors, each in memory of its own, on the member's device. Raises BrokenOff."""
    bucket, left, at, end = _bucket(member, manifest), _nbytes(manifest), 0, 0
    for name, (dtype, shape, _) in manifest.items():
        tensor = torch.empty(tuple(shape), dtype=_dtype(dtype), device=member.device)
        flat, start = _bytes(tensor), 0
        while start < len(flat):
            if at == end:
                at, end = 0, min(len(bucket), left)
                member.broadcast(bucket[:end])
                left -= end
            count = min(end - at, len(flat) - start)
            flat[start : start + count] = bucket[at : at + count]
            start, at = start + count, at + count
        yield name, tensor


def _bucket(member: Member, manifest: Entries) -> Tensor:
    nbytes = min(member.meeting.bucket_bytes, _nbytes(manifest))
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=member.device)


def _nbytes(manifest: Entries) -> int:
    return sum(prod(shape) * _dtype(dtype).itemsize for dtype, shape, _ in manifest.values())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BrokenOff(f"the manifest names a dtype {name!r}, which torch does not have")
    return dtype


def _bytes(tensor: Tensor) -> Tensor:
    """(bytes,) of a contiguous tensor, in its memory."""
    return tensor.reshape(-1).view(torch.uint8)
