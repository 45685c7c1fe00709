"""The connection of this process to Ray. The trainer's ranks, vLLM's replicas and the graders share one connection.

cluster = connect(ClusterSpec())
...
cluster.release()     # the last release disconnects, which ends a private Ray
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.environment_variables import set_environment_variables
from engine.errors import BadSpec, EngineUnreachable
from engine.protocol import ActorCount, ClusterInfo
from engine.specs.engine import ADDRESS, ClusterSpec
from storage.temporary import mark_in_use, sweep_unused

log = logging.getLogger(__name__)

PRIVATE_CPUS = 256
"""CPUs that a private Ray is told it has. Its actors share the cores of this machine like any other processes. With
the true count Ray would refuse some of them."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0"  # else Ray reports its use to its developers
}
PRIVATE_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # with this, Ray listens on loopback only, on Linux too
    # A process whose gcs_server is gone is ended by Ray after a minute, in the middle of whatever it does. The engine
    # notices the end of its own gcs_server itself, and starts another Ray.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    # Ray gives its workers the niceness 15. Ranks do the main work of the machine: while other processes are busy, they
    # would not start in time.
    "RAY_worker_niceness": "0",
}
VITAL_PROCESSES = ("gcs_server", "raylet")
"""The processes of a private Ray without which it is of no use."""

SIGACTION_BYTES = 256
"""Size of a buffer for C's struct sigaction, which is smaller."""
CONNECT_TIMEOUT = 5.0
"""Seconds that the head node may take to accept a connection. Ray itself tries for two minutes."""

WITNESS = """
import glob, sys
folder, pid = sys.argv[1:]
if not sys.stdin.read():  # the process ended and did not say so
    for path in glob.glob(f"{glob.escape(folder)}/python-core-driver-*_{pid}.log"):
        with open(path, errors="replace") as file:
            last_line = file.readlines()[-1:]
        if last_line and "erminate" in last_line[0]:
            print(f"Ray ended this process ({pid}): {last_line[0].strip()}; start it again", file=sys.stderr)
"""
"""Program of a process that outlives this one and prints why Ray ended it. Ray's core calls C's _exit where it loses
its raylet or its gcs_server, and then nothing in this process can print a line."""

_lock = threading.Lock()
_current: Cluster | None = None

HOLDING_STATES = ("CREATED", "RESCHEDULING")
"""States in which a placement group holds resources."""


class Cluster:
    """The connection to one Ray cluster, made by `connect`."""

    def __init__(self, spec: ClusterSpec, *, opened_here: bool) -> None:
        """`opened_here`: whether `connect` opened the connection. The last `release` then closes it."""
        self.spec = spec
        self.opened_here = opened_here
        self.user_count = 0
        self.thread: ThreadPoolExecutor | None = None
        """The thread that started a private Ray. Linux ends Ray's processes when this thread ends."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """The vital processes of a private Ray, by name."""
        self.witness: subprocess.Popen[bytes] | None = None
        """Runs `WITNESS`."""
        self._loss = ""

    @property
    def is_private(self) -> bool:
        """Whether this process started the Ray cluster for itself. The resources of such a cluster never change."""
        return self.opened_here and self.spec.address is None

    def loss(self) -> str:
        """Why this connection is of no use any more; empty while it is. It asks the kernel, which takes microseconds.

        Every call of Ray is preceded by this question: Ray ends a process that uses a lost connection. After a loss,
        `connect` starts another Ray.
        """
        for name, process in self.processes.items():
            if not self._loss and process.poll() is not None:
                self.mark_lost(f"its {name} ended with status {process.returncode}")
        return self._loss

    def mark_lost(self, reason: str) -> None:
        """Records that the connection is of no use any more."""
        self._loss = f"the private Ray of this process is gone: {reason}"
        log.warning("%s; the next call starts another one", self._loss)

    def release(self) -> None:
        """Ends one use of the connection. The last release closes it."""
        with _lock:
            self.user_count -= 1
            if self is _current and not self.user_count:
                self.close()

    def close(self) -> None:
        """Disconnects this process, which ends a private Ray. Called with the lock."""
        global _current
        _current = None
        try:
            if self.opened_here:
                import ray

                ray.shutdown()
        finally:
            if self.witness is not None:
                _dismiss(self.witness)
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
        if _current is not None and _current.loss():
            _current.close()
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

    Opens no connection. Yields False while another thread opens or closes one, and after the loss of a private Ray.
    """
    if not _lock.acquire(blocking=False):
        yield False
        return
    try:
        yield _current is not None and not _current.loss()
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
    try:
        return _opened_cluster(spec)
    except BaseException as error:
        # else the next call would take this Ray, which ends with the thread of this call
        ray.shutdown()
        if not isinstance(error, OSError):
            raise
        raise EngineUnreachable(
            f"Ray has started, but this process cannot use it: {type(error).__name__}: {error}. Free disk space and "
            "processes, and run it again"
        ) from error


def _opened_cluster(spec: ClusterSpec) -> Cluster:
    """The connection that this process has just opened."""
    from ray._private import worker

    node: Any = worker._global_node
    cluster = Cluster(spec, opened_here=True)
    if cluster.is_private:
        session = Path(node.get_session_dir_path())
        sweep_unused(session.parent, "session_*")
        mark_in_use(session)
        started = node.all_processes
        cluster.processes = {name: started[name][0].process for name in VITAL_PROCESSES}
    command = [sys.executable, "-I", "-S", "-c", WITNESS, node.get_logs_dir_path(), str(os.getpid())]
    # In a session of its own, so that Ctrl-C does not end it before it has read why this process ends.
    cluster.witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(_dismiss, cluster.witness)
    return cluster


def _dismiss(witness: subprocess.Popen[bytes]) -> None:
    """Ends a witness without a message."""
    if witness.returncode is None:
        witness.communicate(b"this process ends by itself")
    atexit.unregister(_dismiss)


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


def _visible_gpus(exclude_first_gpu: bool) -> dict[str, str]:
    """Environment variables that hide the first GPU of this process from a Ray that is started here."""
    # torch is imported by name and only for an engine: graders connect in processes without torch.
    count = import_module("torch").cuda.device_count() if exclude_first_gpu else 0
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """The resources that a placement group holds on one node."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    host: str
    address: str
    cpus: float
    gpus: float
    reservations: tuple[Reservation, ...]

    @property
    def unreserved_gpus(self) -> float:
        """GPUs that no placement group holds. Actors and tasks outside of placement groups may use them."""
        return self.gpus - sum(reservation.gpus for reservation in self.reservations)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Nodes and free resources of the cluster at one moment."""

    nodes: tuple[Node, ...]
    """The nodes that are alive."""
    free_cpus: float
    free_gpus: float
    waiting: tuple[str, ...]
    """Names of the placement groups that wait for resources."""

    @property
    def gpus(self) -> float:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)


def take_inventory() -> Inventory:
    """Reads the resources of the cluster that this process is connected to."""
    import ray

    # Add up what each placement group holds, by node id and by (group name, resource).
    groups = ray.util.placement_group_table().values()
    reserved: dict[str, Counter[tuple[str, str]]] = {}
    for group in groups:
        if group["state"] not in HOLDING_STATES:
            continue
        for index, bundle in group["bundles"].items():
            amounts = reserved.setdefault(group["bundles_to_node_id"].get(index, ""), Counter())
            for resource in ("CPU", "GPU"):
                amounts[group["name"] or "unnamed", resource] += bundle.get(resource, 0.0)

    # List the nodes that are alive, with their reservations. Ray also reports nodes that have left.
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            nodes.append(_node(node, reserved.get(node["NodeID"], Counter())))
    free = ray.available_resources()
    waiting = sorted(group["name"] or "unnamed" for group in groups if group["state"] == "PENDING")
    nodes.sort(key=lambda node: (node.host, node.address, -node.gpus))
    return Inventory(tuple(nodes), free.get("CPU", 0.0), free.get("GPU", 0.0), tuple(waiting))


def draining_nodes() -> set[str]:
    """Ray's ids of the machines that will be taken away: a spot machine after its notice, for example.

    Ray places nothing new on such a machine. Blocks for milliseconds.
    """
    from ray._private.state import state  # Ray Train asks here, too: there is no public function

    return set(state.get_draining_nodes())


def inventory_of(spec: ClusterSpec) -> Inventory:
    """Connects to the cluster, reads its resources, and disconnects. Raises as `connect`."""
    cluster = connect(spec)
    try:
        return take_inventory()
    finally:
        cluster.release()


def gpu_count(spec: ClusterSpec) -> int:
    """The number of GPUs of the cluster, or of this machine if Ray is private. Raises as `connect`."""
    if spec.address is None:
        return int(import_module("torch").cuda.device_count())  # imported by name: `ostinato doctor` runs without torch
    return int(inventory_of(spec).gpus)


def inventory_if_connected() -> Inventory | None:
    """Reads the cluster that this process is connected to; None without one. Takes about two milliseconds."""
    with hold_connection() as connected:
        return take_inventory() if connected else None


def cluster_info(ranks: ActorCount, replicas: ActorCount) -> ClusterInfo | None:
    """The cluster as an engine reports it in its info; None while this process is not connected to Ray."""
    inventory = inventory_if_connected()
    if inventory is None:
        return None
    return ClusterInfo(
        nodes=len(inventory.nodes), gpus=inventory.gpus, free_gpus=inventory.free_gpus, ranks=ranks, replicas=replicas
    )


def _node(node: Mapping[str, Any], reserved: Counter[tuple[str, str]]) -> Node:
    """One node as Ray describes it, with the amounts that placement groups hold there."""
    return Node(
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        cpus=node["Resources"].get("CPU", 0.0),
        gpus=node["Resources"].get("GPU", 0.0),
        reservations=_reservations(reserved),
    )


def _reservations(amounts: Counter[tuple[str, str]]) -> tuple[Reservation, ...]:
    names = sorted({name for name, _ in amounts})
    return tuple(Reservation(name, amounts[name, "CPU"], amounts[name, "GPU"]) for name in names)
