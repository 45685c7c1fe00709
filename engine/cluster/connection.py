"""The connection of this process to Ray: one, shared by the trainer's ranks, vLLM's replicas and the graders.

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
"""CPUs that a private Ray is told it has. Its actors share the cores of this machine, as all processes do; the true
count would only refuse some of them."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would report its use to its makers
}
PRIVATE_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then listens on loopback only, on Linux too
}

SIGACTION_BYTES = 256
"""At least the size of C's struct sigaction."""
LISTEN_SECONDS = 5.0
"""How long the head node may take to accept a connection. Ray itself tries for two minutes."""

_lock = threading.Lock()
_current: Cluster | None = None


class Cluster:
    """The connection to one Ray cluster. `connect` makes it."""

    def __init__(self, spec: ClusterSpec, *, ours: bool) -> None:
        """`ours`: whether `connect` opened the connection, so that the last `release` closes it."""
        self.spec = spec
        self.ours = ours
        self.users = 0
        self.thread: ThreadPoolExecutor | None = None
        """The thread that started a private Ray. Linux ends Ray's processes when this thread ends."""

    @property
    def private(self) -> bool:
        """Whether it is a Ray of this process alone, whose resources never change."""
        return self.ours and self.spec.address is None

    def release(self) -> None:
        """Tells that one user needs the connection no longer. The last one closes it."""
        global _current
        with _lock:
            self.users -= 1
            if self.users:
                return
            _current = None
            try:
                if self.ours:
                    import ray

                    ray.shutdown()
            finally:
                if self.thread is not None:
                    self.thread.shutdown()


def connect(spec: ClusterSpec, *, spare_first_gpu: bool = False, any_cluster: bool = False) -> Cluster:
    """Connects this process to Ray, or shares the connection that it has. Every call needs one `release`.

    A process that has called `ray.init` itself keeps that connection, whatever the spec says.

    Args:
        any_cluster: shares the connection that this process has to another cluster, too.
        spare_first_gpu: this process computes on its first GPU itself, so a private Ray must not give it away.

    Raises:
        BadSpec: Ray is not installed, or this process is connected to another cluster already.
        EngineUnreachable: no Ray cluster answers at the address, or it refuses the token.
    """
    global _current
    require_ray()
    with _lock:
        if _current is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
            try:
                _current = thread.submit(_open, spec, spare_first_gpu).result()
            except BaseException:
                thread.shutdown()
                raise
            _current.thread = thread
        elif _current.spec != spec and _current.ours and not any_cluster:
            raise BadSpec(
                f"cluster.address={spec.address!r} was given, but this process already uses the Ray cluster at "
                f"{_current.spec.address!r}; a process is connected to one: give every engine in it the same address"
            )
        _current.users += 1
        return _current


@contextmanager
def hold_connection() -> Iterator[bool]:
    """Tells whether this process is connected to Ray, and keeps the connection in the block. It opens none, and does
    not wait for one that another thread is opening or closing."""
    if not _lock.acquire(blocking=False):
        yield False
        return
    try:
        yield _current is not None
    finally:
        _lock.release()


def require_ray() -> None:
    """Raises BadSpec where Ray is not installed."""
    if find_spec("ray") is None:
        raise BadSpec(
            "Ray is not installed, and DeepSpeed's ranks, vLLM's replicas and graders on a cluster run on it: "
            "pip install 'ostinato[cluster]'"
        )


def _open(spec: ClusterSpec, spare_first_gpu: bool) -> Cluster:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if spec.address is None:
        os.environ.update(PRIVATE_ENVIRONMENT)  # Ray reads its environment when it is imported
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    if ray.is_initialized():
        return Cluster(spec, ours=False)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if spec.address is None:
            with _own_sigterm_handler(), set_environment_variables(_visible_gpus(spare_first_gpu)):
                # "local": without it Ray joins a cluster of $RAY_ADDRESS, or one that runs on this machine
                ray.init(address="local", num_cpus=PRIVATE_CPUS, include_dashboard=False, **options)
        else:
            _check_listens(spec.address)
            # `ray start` does so where there is a token, and a driver must do as its cluster does
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            with _own_sigterm_handler():
                ray.init(address=spec.address, **options)
    except (OSError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        if spec.address is None:
            raise EngineUnreachable(f"a private Ray did not start: {type(error).__name__}: {error}") from error
        raise EngineUnreachable(
            f"no Ray cluster answers at {spec.address}: {type(error).__name__}: {error}. Give cluster.address as "
            "HOST:PORT of a head node that runs, and the cluster's token in $RAY_AUTH_TOKEN or $RAY_AUTH_TOKEN_PATH"
        ) from error
    return Cluster(spec, ours=True)


def _check_listens(address: str) -> None:
    """Raises OSError where nothing listens at the address."""
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _latest_cluster()
    match = ADDRESS.fullmatch(address)
    if match is None:
        return  # Ray looks for a head node on this machine itself, and says at once that there is none
    host = match["host"].strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray itself does
    socket.create_connection((host, int(match["port"])), timeout=LISTEN_SECONDS).close()


def _latest_cluster() -> str:
    """The address of the cluster that `ray start` last started or joined on this machine, as Ray notes it."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return note.read_text().strip() if note.is_file() else ""


def _visible_gpus(spare_first: bool) -> dict[str, str]:
    """The environment that hides this process's first GPU from a Ray that is started in it."""
    # by name, and only for an engine: graders connect in processes without torch
    count = import_module("torch").cuda.device_count() if spare_first else 0
    if count < 2:
        return {}  # without another GPU, both must share the one there is
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[1:])}


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps the handler of SIGTERM that this process has. Ray's core replaces it by one that aborts the process three
    seconds later, in the middle of a drain. Python's `signal` could restore it from the main thread only."""
    sigaction, handler = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(SIGACTION_BYTES)
    sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, handler, None)
