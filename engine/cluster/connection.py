"""The connection of this process to Ray. The trainer's ranks, vLLM's replicas and the graders share one connection.

    cluster = connect(ClusterSpec())
    ...
    cluster.release()     # the last release disconnects, which ends a private Ray
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.environment_variables import set_environment_variables
from engine.errors import BadSpec, EngineUnreachable
from engine.specs.cluster import ADDRESS, ClusterSpec

PRIVATE_CPUS = 256
"""CPUs that a private Ray is told it has. Its actors share the cores of this machine like any other processes. With
the true count Ray would refuse some of them."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else Ray reports its use to its developers
}
PRIVATE_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # with this, Ray listens on loopback only, on Linux too
}

SIGACTION_BYTES = 256
"""Size of a buffer for C's struct sigaction, which is smaller."""
CONNECT_TIMEOUT = 5.0
"""Seconds that the head node may take to accept a connection. Ray itself tries for two minutes."""

_lock = threading.Lock()
_current: Cluster | None = None


class Cluster:
    """The connection to one Ray cluster, made by `connect`."""

    def __init__(self, spec: ClusterSpec, *, opened_here: bool) -> None:
        """`opened_here`: whether `connect` opened the connection. The last `release` then closes it."""
        self.spec = spec
        self.opened_here = opened_here
        self.user_count = 0
        self.thread: ThreadPoolExecutor | None = None
        """The thread that started a private Ray. Linux ends Ray's processes when this thread ends."""

    @property
    def is_private(self) -> bool:
        """Whether this process started the Ray cluster for itself. The resources of such a cluster never change."""
        return self.opened_here and self.spec.address is None

    def release(self) -> None:
        """Ends one use of the connection. The last release closes it."""
        global _current
        with _lock:
            self.user_count -= 1
            if self.user_count:
                return
            _current = None
            try:
                if self.opened_here:
                    import ray

                    ray.shutdown()
            finally:
                if self.thread is not None:
                    self.thread.shutdown()


def connect(spec: ClusterSpec, *, exclude_first_gpu: bool = False, any_cluster: bool = False) -> Cluster:
    """Connects this process to Ray, or shares the connection that it has. Every call needs one `release`.

    A process that has called `ray.init` itself keeps that connection, whatever the spec says.

    Args:
        exclude_first_gpu: this process computes on its first GPU itself, so a private Ray must not use that GPU.
        any_cluster: accept an existing connection of this process to another cluster.

    Raises:
        BadSpec: Ray is not installed, or this process is already connected to another cluster.
        EngineUnreachable: no Ray cluster answers at the address, or it refuses the token.
    """
    global _current
    require_ray()
    with _lock:
        # Linux ends a private Ray with the thread that started it, so that thread must live as long as the connection.
        if _current is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
            try:
                _current = thread.submit(_open, spec, exclude_first_gpu).result()
            except BaseException:
                thread.shutdown()
                raise
            _current.thread = thread
        elif _current.spec != spec and _current.opened_here and not any_cluster:
            raise BadSpec(
                f"cluster.address={spec.address!r} was given, but this process already uses the Ray cluster at "
                f"{_current.spec.address!r}, and a process can use only one: give all its engines the same address"
            )
        _current.user_count += 1
        return _current


@contextmanager
def hold_connection() -> Iterator[bool]:
    """Yields whether this process is connected to Ray, and prevents a disconnect inside the block.

    Opens no connection. Yields False while another thread opens or closes one.
    """
    if not _lock.acquire(blocking=False):
        yield False
        return
    try:
        yield _current is not None
    finally:
        _lock.release()


def require_ray() -> None:
    """Raises BadSpec if Ray is not installed."""
    if find_spec("ray") is None:
        raise BadSpec(
            "Ray is not installed, and DeepSpeed's ranks, vLLM's replicas and graders on a cluster need it: "
            "pip install 'ostinato[cluster]'"
        )


def _open(spec: ClusterSpec, exclude_first_gpu: bool) -> Cluster:
    # Ray reads its environment when it is imported.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if spec.address is None:
        os.environ.update(PRIVATE_ENVIRONMENT)
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    if ray.is_initialized():
        return Cluster(spec, opened_here=False)

    # Start a private Ray, or connect to the cluster at the address.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if spec.address is None:
            with _preserved_sigterm_handler(), set_environment_variables(_visible_gpus(exclude_first_gpu)):
                # Without "local" Ray would join the cluster of $RAY_ADDRESS, or one that runs on this machine.
                ray.init(address="local", num_cpus=PRIVATE_CPUS, include_dashboard=False, **options)
        else:
            _check_listens(spec.address)
            # `ray start` enables tokens if there is one, and a driver must do the same as its cluster.
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            with _preserved_sigterm_handler():
                ray.init(address=spec.address, **options)
    except (OSError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        if spec.address is None:
            raise EngineUnreachable(f"a private Ray did not start: {type(error).__name__}: {error}") from error
        raise EngineUnreachable(
            f"no Ray cluster answers at {spec.address}: {type(error).__name__}: {error}. Give cluster.address as "
            "HOST:PORT of a head node that runs, and the cluster's token in $RAY_AUTH_TOKEN or $RAY_AUTH_TOKEN_PATH"
        ) from error
    return Cluster(spec, opened_here=True)


def _check_listens(address: str) -> None:
    """Raises OSError where nothing listens at the address."""
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _latest_cluster()
    match = ADDRESS.fullmatch(address)
    if match is None:
        # Ray itself looks for a head node on this machine, and reports at once if there is none.
        return
    host = match["host"].strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # Ray does the same replacement
    socket.create_connection((host, int(match["port"])), timeout=CONNECT_TIMEOUT).close()


def _latest_cluster() -> str:
    """The address of the cluster that `ray start` last started or joined on this machine, from the file where Ray
    stores it; empty if there is none."""
    address_file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if not address_file.is_file():
        return ""
    return address_file.read_text().strip()


def _visible_gpus(spare_first: bool) -> dict[str, str]:
    """Environment variables that hide the first GPU of this process from a Ray that is started here."""
    # torch is imported by name and only for an engine: graders connect in processes without torch.
    count = import_module("torch").cuda.device_count() if spare_first else 0
    if count < 2:
        return {}  # with a single GPU, this process and Ray's actors must share it
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[1:])}


@contextmanager
def _preserved_sigterm_handler() -> Iterator[None]:
    """Restores this process's handler of SIGTERM after the block.

    Ray's core replaces it by a handler that aborts the process three seconds later, which would interrupt a drain. C's
    sigaction is used because Python's `signal` can restore a handler only in the main thread.
    """
    sigaction, handler = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(SIGACTION_BYTES)
    sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, handler, None)
