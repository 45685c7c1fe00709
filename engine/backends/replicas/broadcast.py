"""Sends weights to vLLM's workers by a broadcast. The engine's process is rank 0 of the group, and every worker of the
pool is another rank.

The group is separate from torch's default group, which vLLM uses, and from DeepSpeed's groups. It uses NCCL if every
member has a GPU of its own, and gloo otherwise. All tensors, in the manifest's order, form one stream of bytes, which
is cut into buckets. In addition to the model, each member holds one bucket and the current tensor. Tensors that arrive
are digested like those from files, so a bucket that is lost, doubled or garbled leads to a wrong digest.

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
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def _connect_store(self) -> Any:
        timeout = timedelta(seconds=self.group.timeout)
        client = dist.TCPStore(self.group.host, self.group.port, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(self.group.name, client)

    @property
    def usable(self) -> bool:
        """Whether neither this member nor another one has left the group."""
        return not self._leaving.is_set() and not self._flag_thread_ended.is_set()

    def broadcast(self, flat: Tensor) -> None:
        """Copies rank 0's `flat`, a contiguous tensor, into the `flat` of every member."""
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        deadline = time.monotonic() + self.group.timeout
        try:
            process_group = self._process_group
            if process_group is None:
                reason = self._abort_reason or self._leave_reason
                raise BroadcastAborted(reason or f"rank {self.rank} has left the group")
            # Call it in this thread, so that it is ordered after the work on this thread's CUDA stream.
            work = process_group.broadcast([flat], options)
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


def send(member: GroupMember, tensors: Iterable[tuple[str, Tensor]], manifest: ManifestEntries) -> None:
    """Sends tensors; called on rank 0. They must come in the manifest's order and be equal to its entries.

    Raises BroadcastAborted. An exception of `tensors` aborts the other members too.
    """
    bucket, filled, names = _bucket(member, manifest), 0, iter(manifest)
    try:
        for name, tensor in tensors:
            # Refuse a tensor that the receivers do not expect now.
            if name != (expected := next(names, None)):
                raise BroadcastAborted(f"tensor {name} came to the sender, and the manifest's next one is {expected}")
            dtype, shape, _ = manifest[name]
            if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
                raise BroadcastAborted(
                    f"tensor {name} came to the sender as {tensor.dtype} {list(tensor.shape)}, and the manifest has "
                    f"{dtype} {list(shape)}"
                )
            # Copy its bytes into the bucket, and broadcast the bucket whenever it is full.
            flat, start = _bytes(tensor.detach().contiguous()), 0
            while start < len(flat):
                count = min(len(bucket) - filled, len(flat) - start)
                bucket[filled : filled + count] = flat[start : start + count]
                start, filled = start + count, filled + count
                if filled == len(bucket):
                    member.broadcast(bucket)
                    filled = 0
        if (missing := next(names, None)) is not None:
            raise BroadcastAborted(f"tensor {missing} did not come to the sender")
        if filled:
            member.broadcast(bucket[:filled])
    except BaseException as error:
        member.leave(f"the sender gave up: {error}")
        raise


def receive(member: GroupMember, manifest: ManifestEntries) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as they arrive; called on every rank but 0.

    Each tensor has memory of its own, on the member's device. Raises BroadcastAborted.
    """
    bucket, remaining = _bucket(member, manifest), _nbytes(manifest)
    # `filled` is the number of bytes in the bucket, and `position` the next one to copy.
    position, filled = 0, 0
    for name, (dtype, shape, _) in manifest.items():
        tensor = torch.empty(tuple(shape), dtype=_dtype(dtype), device=member.device)
        flat, start = _bytes(tensor), 0
        while start < len(flat):
            # The bucket is used up: receive the next one. Only the last one is not full.
            if position == filled:
                position, filled = 0, min(len(bucket), remaining)
                member.broadcast(bucket[:filled])
                remaining -= filled
            count = min(filled - position, len(flat) - start)
            flat[start : start + count] = bucket[position : position + count]
            start, position = start + count, position + count
        yield name, tensor


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
