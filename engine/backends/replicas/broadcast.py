"""Sends weights to vLLM's workers by a broadcast. The first members of the group are the senders: the engine's process,
or the ranks of a trainer, each of which sends its own part of the weights. Every worker of the pool is another member.

The group is separate from torch's default group, which vLLM uses, and from DeepSpeed's groups. It uses NCCL if every
member has a GPU of its own, and gloo otherwise. All tensors, in the manifest's order, form one stream of bytes, which
is cut into buckets. The bytes of a bucket that one sender has are one broadcast, and all broadcasts of a bucket run at
the same time. In addition to the model, each member holds one bucket, and a receiver the current tensor. Tensors that
arrive are digested like those from files, so a bucket that is lost, doubled or garbled leads to a wrong digest.

No member waits for ever. Each exchange has a timeout. When a member aborts, it sets a flag in the store, which runs in
the engine's process, and all others abort too. They also abort if the store no longer replies. An aborted group is not
used again.

The store, gloo and NCCL have no authentication. A process that reaches the engine's address inside the cluster and
guesses the name of a group could read the weights, but could not change them without being noticed. Use a private
network.
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
FLAG_INTERVAL = 0.2
"""Seconds between two reads of the abort flag."""
EXCHANGE_INTERVAL = 0.0005
"""Seconds between two checks whether an exchange has finished."""
ABORT_FLAG = "stopped"
"""Key of the abort flag in the store. Its value is the reason."""
WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables that disable torch's watchdog, which ends the process when a member is lost. The timeout and
the abort flag replace it."""

Backend = Literal["gloo", "nccl"]
DeviceInfo = Mapping[str, Any]
"""Where a member computes: {"device": "cpu" | "cuda", "gpu": UUID of the GPU, "nccl": version of NCCL}."""
ManifestEntries = Mapping[str, Sequence[Any]]
"""A manifest as it comes out of JSON: (dtype, shape, digest) by tensor name."""
Parts = Mapping[str, Sequence[Sequence[int]]]
"""Which sender has which part of the weights. By tensor name: (rank of the sender, first element, number of elements)
of each part of the flattened tensor, in order and without gaps."""
T = TypeVar("T")


class BroadcastAborted(Exception):
    """Raised if the broadcast did not finish. The message says which member aborted and why."""


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """How the members of one group find each other. Sent to the workers as JSON."""

    name: str
    host: str
    """Host of the store."""
    port: int
    """Port of the store."""
    size: int
    """Number of members."""
    backend: Backend
    timeout: float
    """Seconds that the members may take to connect, and that each exchange may take."""
    bucket_bytes: int = BUCKET_BYTES


def device_info(device: torch.device) -> DeviceInfo:
    """What the other members need to know of this device to select a backend."""
    if device.type != "cuda":
        return {"device": device.type, "gpu": None, "nccl": None}
    version = list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None
    return {"device": "cuda", "gpu": str(torch.cuda.get_device_properties(device).uuid), "nccl": version}


def select_backend(devices: Sequence[DeviceInfo]) -> Backend:
    """NCCL requires a separate GPU for each member and the same version everywhere; otherwise gloo is used."""
    gpus: set[str] = set()
    versions: set[tuple[int, ...]] = set()
    for device in devices:
        if device["device"] != "cuda" or not device["nccl"]:
            return "gloo"
        gpus.add(device["gpu"])
        versions.add(tuple(device["nccl"]))
    if len(gpus) < len(devices) or len(versions) > 1:
        return "gloo"
    return "nccl"


def source_address(host: str) -> str:
    """The address of this machine that a connection to `host` would have."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # for a datagram socket this selects a route, and sends nothing
        return str(probe.getsockname()[0])


def open_store(host: str, timeout: float) -> tuple[Any, int]:
    """(store, port). The store runs in this process and listens only at `host`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
    return dist.TCPStore(host, port, master_listen_fd=listener.detach(), **options), port


class GroupMember:
    """One member of a group, from the connection until `leave`."""

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        """Returns when all members are connected. Raises BroadcastAborted after the group's timeout."""
        self.group, self.rank = group, rank
        self.device = device if group.backend == "nccl" else torch.device("cpu")
        self._process_group: Any = None
        self._leave_reason = ""
        """Why this member aborted; empty if it left without an error."""
        self._abort_reason = ""
        """Why another member aborted."""
        self._leaving, self._flag_thread_ended = threading.Event(), threading.Event()
        atexit.register(self.leave)  # a thread that is inside torch when Python ends would crash the process
        try:
            # Two clients of the store: one waits for keys, and the other must be usable meanwhile.
            store, flag_store = self._connect_store(), self._connect_store()
            threading.Thread(target=self._watch_flag, args=(flag_store,), name="broadcast-flag", daemon=True).start()
            _with_timeout(group.timeout, lambda: self._connect(store))
        except RuntimeError as error:
            raise self._abort(error, "could not connect to the other ranks") from error
        except BroadcastAborted as error:
            self.leave(str(error))
            raise

    def _connect(self, store: Any) -> None:
        self._process_group = _process_group(store, self.group, self.rank, self.device)
        # NCCL connects in its first exchange. Make it here, so that a failure to connect is noticed now.
        self.broadcast([(0, torch.zeros(1, dtype=torch.uint8, device=self.device))])

    def _connect_store(self) -> Any:
        timeout = timedelta(seconds=self.group.timeout)
        client = dist.TCPStore(self.group.host, self.group.port, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(self.group.name, client)

    @property
    def usable(self) -> bool:
        """Whether neither this member nor another one has left the group."""
        return not self._leaving.is_set() and not self._flag_thread_ended.is_set()

    def broadcast(self, flats: Sequence[tuple[int, Tensor]]) -> None:
        """Copies several contiguous tensors, given as (rank of the sender, tensor), from their senders into the tensors
        of every member. All members give the same senders and sizes, in the same order."""
        deadline = time.monotonic() + self.group.timeout
        try:
            # Call it in this thread, so that it is ordered after the work on this thread's CUDA stream.
            for work in [self._begin(sender, flat) for sender, flat in flats]:
                # Poll instead of waiting: a wait inside torch would not notice the abort flag.
                while not work.is_completed():
                    if not self.usable:
                        raise BroadcastAborted(self._abort_reason or self._leave_reason)
                    if time.monotonic() > deadline:
                        raise BroadcastAborted(
                            f"rank {self.rank} received nothing from another rank for {self.group.timeout:g} s"
                        )
                    time.sleep(EXCHANGE_INTERVAL)
                work.wait()
        except RuntimeError as error:
            raise self._abort(error, "lost its connection to another rank") from error

    def _begin(self, sender: int, flat: Tensor) -> Any:
        """Starts one broadcast. This method, and not its caller, refers to the process group: the traceback of an
        exception keeps the variables of the functions that it passed, and the end of the last reference to a group
        waits for all its exchanges."""
        if self._process_group is None:
            reason = self._abort_reason or self._leave_reason
            raise BroadcastAborted(reason or f"rank {self.rank} has left the group")
        return self._process_group.broadcast([flat], _options(sender))

    def _abort(self, error: Exception, event: str) -> BroadcastAborted:
        """Leaves the group after an error of torch, and returns the error to raise.

        Waits a moment for the reason of another member, which explains more than its effect on this member.
        """
        self._flag_thread_ended.wait(2 * FLAG_INTERVAL)
        own_reason = f"rank {self.rank} of {self.group.size} {event}: {str(error).splitlines()[0]}"
        reason = self._abort_reason or own_reason
        self.leave(reason)
        return BroadcastAborted(reason)

    def _watch_flag(self, flag_store: Any) -> None:
        """Reads the abort flag until this member leaves, and sets the flag if it leaves with a reason."""
        try:
            while not self._leaving.wait(FLAG_INTERVAL):
                if flag_store.check([ABORT_FLAG]):
                    self._abort_reason = flag_store.get(ABORT_FLAG).decode()
                    return
            if self._leave_reason:
                flag_store.compare_set(ABORT_FLAG, "", self._leave_reason)  # keeps the first reason
        except RuntimeError as error:
            self._abort_reason = f"the process that sends is gone: {str(error).splitlines()[0]}"
        finally:
            self._flag_thread_ended.set()

    def leave(self, reason: str = "") -> None:
        """Leaves the group. With a reason, all other members abort too. Any thread may call it, and repeatedly."""
        if not self._leaving.is_set():
            self._leave_reason = reason
            self._leaving.set()
            self._flag_thread_ended.wait(5 * FLAG_INTERVAL)
            atexit.unregister(self.leave)
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            # Abort in another thread, because an exchange that hangs can block the abort.
            thread = threading.Thread(
                target=_abort_process_group, args=(process_group,), name="broadcast-end", daemon=True
            )
            del process_group
            thread.start()
            thread.join(FLAG_INTERVAL)


def abort_group(store: Any, name: str, reason: str) -> None:
    """Makes all members of a group abort. Called in the process that has opened the store, which may be no member."""
    dist.PrefixStore(name, store).compare_set(ABORT_FLAG, "", reason)


def is_aborted(store: Any, name: str) -> bool:
    """Whether a member of the group has aborted."""
    return bool(dist.PrefixStore(name, store).check([ABORT_FLAG]))


def _options(sender: int) -> Any:
    options: Any = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = sender, True
    return options


def _process_group(store: Any, group: BroadcastGroup, rank: int, device: torch.device) -> Any:
    options: Any
    if group.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=group.timeout)
        torch.cuda.set_device(device)  # applies to this thread
        with set_environment_variables(WATCHDOG_OFF):
            return dist.ProcessGroupNCCL(store, rank, group.size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=group.timeout)
    options._devices = [gloo.create_device(hostname=source_address(group.host))]
    return gloo(store, rank, group.size, options)


def _abort_process_group(process_group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        process_group.abort()


def _with_timeout(timeout: float, call: Callable[[], T]) -> T:
    """Runs `call` in a thread and returns its result. After the timeout the thread is abandoned: NCCL connects inside
    calls without a timeout of their own."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - raised again below, in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="broadcast-call", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not results:
        raise BroadcastAborted(f"a call was not over after {timeout:g} s: another member is missing or hangs")
    return results[0]


# -- tensors ------------------------------------------------------------------------------------------------------


def send(
    member: GroupMember,
    tensors: Iterable[tuple[str, Tensor]],
    manifest: ManifestEntries,
    parts: Parts | None = None,
) -> None:
    """Sends tensors; called on every sender at the same time.

    Args:
        tensors: what this sender has, in the manifest's order and equal to its entries: whole tensors without `parts`,
            otherwise this sender's parts of them, flattened.
        parts: None if rank 0 sends everything.

    Raises BroadcastAborted. An exception of `tensors` aborts the other members too.
    """
    try:
        bucket = _bucket(member, manifest)
        own_bytes = _ByteStream(_own_bytes(member.rank, tensors, manifest, parts))
        for broadcasts in bucket_plans(manifest, parts, member.group.bucket_bytes):
            flats = _cut(bucket, broadcasts)
            for sender, flat in flats:
                if sender == member.rank:
                    own_bytes.read_into(flat)
            member.broadcast(flats)
        own_bytes.check_ended()
    except BaseException as error:
        member.leave(f"the sender gave up: {error}")
        raise


def receive(
    member: GroupMember, manifest: ManifestEntries, parts: Parts | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as they arrive; called on every receiver. `parts` as for `send`.

    Each tensor has memory of its own, on the member's device. Raises BroadcastAborted.
    """

    def buckets() -> Iterator[Tensor]:
        bucket = _bucket(member, manifest)
        for broadcasts in bucket_plans(manifest, parts, member.group.bucket_bytes):
            flats = _cut(bucket, broadcasts)
            member.broadcast(flats)
            yield bucket[: sum(len(flat) for _, flat in flats)]

    arrived = _ByteStream(buckets())
    for name, (dtype, shape, _) in manifest.items():
        tensor = torch.empty(tuple(shape), dtype=_dtype(dtype), device=member.device)
        arrived.read_into(_bytes(tensor))
        yield name, tensor


class _ByteStream:
    """Flat tensors of bytes, read as one stream."""

    def __init__(self, chunks: Iterator[Tensor]) -> None:
        self._chunks = chunks
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._position = 0
        """The next byte of the chunk to read."""

    def read_into(self, flat: Tensor) -> None:
        start = 0
        while start < len(flat):
            if self._position == len(self._chunk):
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise BroadcastAborted("fewer bytes came than the manifest has")
                self._chunk, self._position = chunk, 0
            count = min(len(self._chunk) - self._position, len(flat) - start)
            flat[start : start + count] = self._chunk[self._position : self._position + count]
            start, self._position = start + count, self._position + count

    def check_ended(self) -> None:
        """Raises BroadcastAborted if bytes are left, or as the source of the chunks."""
        for chunk in self._chunks:
            if len(chunk):
                raise BroadcastAborted("more bytes came than the manifest has")


def _own_bytes(
    rank: int, tensors: Iterable[tuple[str, Tensor]], manifest: ManifestEntries, parts: Parts | None
) -> Iterator[Tensor]:
    """The bytes of a sender's tensors. Raises BroadcastAborted for a tensor that the receivers do not expect now."""
    entries = _own_entries(rank, manifest, parts)
    for name, tensor in tensors:
        expected, dtype, shape = next(entries, (None, "", ()))
        if name != expected:
            raise BroadcastAborted(f"tensor {name} came to the sender, and the manifest's next one is {expected}")
        if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, shape):
            raise BroadcastAborted(
                f"tensor {name} came to the sender as {tensor.dtype} {list(tensor.shape)}, and the manifest has "
                f"{dtype} {list(shape)}"
            )
        yield _bytes(tensor.detach().contiguous())
    for missing, _, _ in entries:
        raise BroadcastAborted(f"tensor {missing} did not come to the sender")


def _own_entries(
    rank: int, manifest: ManifestEntries, parts: Parts | None
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor, or part of one, that the sender of this rank sends, in order."""
    for name, (dtype, shape, _) in manifest.items():
        if parts is None:
            yield name, dtype, tuple(shape)
            continue
        for sender, _, length in parts[name]:
            if sender == rank:
                yield name, dtype, (length,)


# -- the plan of a broadcast, equal on all members -----------------------------------------------------------------


def bucket_plans(
    manifest: ManifestEntries, parts: Parts | None, bucket_bytes: int
) -> Iterator[list[tuple[int, int]]]:
    """The broadcasts of each bucket: (rank of the sender, number of bytes), in the order of the bytes."""
    plan: list[tuple[int, int]] = []
    free = bucket_bytes
    for sender, nbytes in _runs(manifest, parts):
        while nbytes:
            count = min(nbytes, free)
            plan.append((sender, count))
            nbytes, free = nbytes - count, free - count
            if not free:
                yield plan
                plan, free = [], bucket_bytes
    if plan:
        yield plan


def _runs(manifest: ManifestEntries, parts: Parts | None) -> list[tuple[int, int]]:
    """(rank of the sender, number of bytes) of the successive parts of the stream that one sender has. Raises
    BroadcastAborted if the parts of a tensor are not the whole tensor."""
    if parts is None:
        return [(0, _nbytes(manifest))]
    runs: list[tuple[int, int]] = []
    for name, (dtype, shape, _) in manifest.items():
        end, itemsize = 0, _dtype(dtype).itemsize
        for sender, start, length in parts.get(name, ()):
            if start != end:
                raise BroadcastAborted(f"no rank sends element {end} of tensor {name}, or two do")
            end = start + length
            if runs and runs[-1][0] == sender:
                runs[-1] = (sender, runs[-1][1] + length * itemsize)
            else:
                runs.append((sender, length * itemsize))
        if end != prod(shape):
            raise BroadcastAborted(f"the ranks send {end} elements of tensor {name}, which has {prod(shape)}")
    return runs


def _cut(bucket: Tensor, broadcasts: Sequence[tuple[int, int]]) -> list[tuple[int, Tensor]]:
    """(rank of the sender, its slice of the bucket) of each broadcast."""
    flats: list[tuple[int, Tensor]] = []
    start = 0
    for sender, nbytes in broadcasts:
        flats.append((sender, bucket[start : start + nbytes]))
        start += nbytes
    return flats


def _bucket(member: GroupMember, manifest: ManifestEntries) -> Tensor:
    nbytes = min(member.group.bucket_bytes, _nbytes(manifest))
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=member.device)


def _nbytes(manifest: ManifestEntries) -> int:
    return sum(prod(shape) * _dtype(dtype).itemsize for dtype, shape, _ in manifest.values())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BroadcastAborted(f"the manifest names a dtype {name!r}, which torch does not have")
    return dtype


def _bytes(tensor: Tensor) -> Tensor:
    """A flat view of the bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)
