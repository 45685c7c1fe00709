"""One rank: `python -m engine.backends.group.rank`, started by `local_ranks`. It joins the group, builds the target's
object, and runs the calls that rank 0 hears of, together with all the others, until its parent is gone."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from engine.backends.group import messages
from engine.backends.group.messages import CUT_OFF, PIPE_ENV, Call, Launch, MasterAt, Outcome, Ready, StartFailed
from engine.backends.group.progress import REPORTER, Phase, ProgressFile
from engine.errors import EngineError, PermanentEngineError

NEVER = timedelta(days=3650)
"""Between calls the ranks wait inside a broadcast; a dead one is the parent's business, not a timeout's."""
TRACEBACK_CHARS = 4000


def die_with_parent() -> None:
    """By SIGKILL, when the thread that started this process ends (Linux). `Inbox` sees the end on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def die() -> NoReturn:
    """With everything that this rank started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class Inbox:
    """What the parent says. Its end is this process's end, in whatever the computing thread is stuck."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._first: Launch = messages.receive(pipe)  # EOFError when the parent is gone already

    def start(self) -> None:
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def launch(self) -> Launch:
        return self._first

    def get(self) -> bytes:
        return self._messages.get()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.recv_bytes())
        except (EOFError, OSError):
            die()


class Outbox:
    """What the parent is told, from any thread: `progress` may be called in one of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: messages.Message) -> None:
        with self._lock:
            messages.send(self._pipe, message)


class Control:
    """Bytes among the ranks, over a gloo group of its own: it works while NCCL is busy or broken."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._group = dist.new_group(backend="gloo", timeout=NEVER) if world_size > 1 else None

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's `data`, on every rank."""
        if self._group is None:
            assert data is not None
            return data
        size = torch.tensor([0 if data is None else len(data)])
        with lost_peers_end_us():
            dist.broadcast(size, 0, group=self._group)
            if not int(size):
                return b""
            if data is None:
                buffer = torch.empty(int(size), dtype=torch.uint8)
            else:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self._group)
        return data if data is not None else buffer.numpy().tobytes()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, by rank; b"" costs one integer."""
        if self._group is None:
            return [data]
        with lost_peers_end_us():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = max(int(size) for size in sizes)
            if not longest:
                return [b""] * self._world_size
            mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
            buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._world_size)]
            dist.all_gather(buffers, mine, group=self._group)
        return [buffer[: int(size)].numpy().tobytes() for buffer, size in zip(buffers, sizes, strict=True)]


@contextmanager
def lost_peers_end_us() -> Iterator[None]:
    """A collective of ours that fails means that another rank is gone: this one ends, and says that it is not to
    blame."""
    try:
        yield
    except RuntimeError as error:
        print(f"lost the other ranks: {error}", file=sys.stderr, flush=True)
        os._exit(CUT_OFF)


def describe(error: Exception, rank: int) -> Exception:
    """What crosses to the engine: an EngineError that pickles as it is; anything else as one that names it."""
    if isinstance(error, EngineError):
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        except Exception:  # noqa: BLE001 - pickling runs the error's own code, which may raise anything
            pass
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
    return PermanentEngineError(f"rank {rank}: {type(error).__name__}: {error}\n{trace}")


def join_group(launch: Launch, inbox: Inbox, outbox: Outbox) -> Control:
    """torch.distributed over a store that rank 0 opens on a free port of its own choice; sets the device."""
    backend = "gloo"
    if torch.cuda.is_available():
        if launch.local_rank >= torch.cuda.device_count():
            raise PermanentEngineError(
                f"rank {launch.rank} is number {launch.local_rank} on its node, which has {torch.cuda.device_count()} "
                "GPUs; give at most one rank per GPU"
            )
        torch.cuda.set_device(launch.local_rank)
        backend = "nccl"
    timeout = timedelta(seconds=launch.start_seconds)
    if launch.rank == 0:
        # bound here and handed over: torch itself would listen on every interface, and the port cannot be lost
        family = socket.AF_INET6 if ":" in launch.master_host else socket.AF_INET
        listener = socket.create_server((launch.master_host, 0), family=family)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            launch.master_host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        master = MasterAt(launch.master_host, port)
        outbox.send(master)
    else:
        master = pickle.loads(inbox.get())
        store = dist.TCPStore(master.host, master.port, None, False, timeout, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=master.host, MASTER_PORT=str(master.port))
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=launch.collective_seconds),
    )
    return Control(launch.rank, launch.world_size)


def build(launch: Launch) -> Any:
    module, _, name = launch.target.partition(":")
    target = getattr(import_module(module), name)
    return target(
        launch.options, rank=launch.rank, world_size=launch.world_size, local_rank=launch.local_rank
    )  # fmt: skip


def start(launch: Launch, inbox: Inbox, outbox: Outbox) -> tuple[Control, Any]:
    """Ends the process when it cannot."""
    try:
        control = join_group(launch, inbox, outbox)
        target = build(launch)
    except Exception as error:  # noqa: BLE001 - the boundary of the rank: the parent is told, with blame
        traceback.print_exc()
        outbox.send(StartFailed(describe(error, launch.rank), on_purpose=isinstance(error, EngineError)))
        os._exit(1)
    return control, target


def run_call(target: Any, command: bytes, rank: int) -> tuple[bytes, bytes]:
    """(pickled result of rank 0, pickled error): one of the two is empty, or both."""
    try:
        call: Call = pickle.loads(command)
        method: Callable[..., Any] = getattr(target, call.method)
        result = method(*call.args, **call.kwargs)
        return (pickle.dumps(result, protocol=5) if rank == 0 else b""), b""
    except Exception as error:  # noqa: BLE001 - the boundary of the rank: the engine raises it, with blame
        traceback.print_exc()
        return b"", pickle.dumps(describe(error, rank), protocol=5)


def serve(launch: Launch, control: Control, target: Any, inbox: Inbox, outbox: Outbox) -> None:
    """Call after call, until the empty one."""
    while command := control.broadcast(inbox.get() if launch.rank == 0 else None):
        REPORTER.enter(Phase.COMPUTING)
        result, error = run_call(target, command, launch.rank)
        REPORTER.enter(Phase.FINISHED)
        errors = control.all_gather(error)
        REPORTER.enter(Phase.IDLE)
        if launch.rank == 0:
            failed = tuple((rank, pickle.loads(error)) for rank, error in enumerate(errors) if error)
            outbox.send(Outcome(b"" if failed else result, failed))


def main() -> None:
    die_with_parent()
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe_fd, progress_fd = (int(fd) for fd in os.environ.pop(PIPE_ENV).split(","))
    pipe = Connection(pipe_fd)
    inbox = Inbox(pipe)
    inbox.start()
    launch = inbox.launch()
    outbox = Outbox(pipe)
    listener = (lambda: outbox.send(messages.Progressed())) if launch.rank == 0 else None
    REPORTER.attach(ProgressFile(progress_fd, launch.local_world_size), launch.local_rank, listener)
    control, target = start(launch, inbox, outbox)
    outbox.send(Ready())
    try:
        serve(launch, control, target, inbox, outbox)
    except (BrokenPipeError, ConnectionResetError):
        die()  # the engine is gone
    close = getattr(target, "close", None)
    if close is not None:
        close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the libraries would do at exit can hang, and the processes of a group end together


if __name__ == "__main__":
    main()
