"""Runs a command that must not outlive whoever holds the other end of our standard input.

    python -m engine.backends.vllm.leash COMMAND ...

vLLM starts processes of its own, which a killed server leaves behind. The leash leads a process group (its parent
starts it in a new session), runs the command in it, and kills the whole group when the command ends or standard input
closes, which the kernel does for a parent that was killed. It is a process by itself because a server that hangs, or
was stopped, cannot watch over itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def main() -> None:
    if os.getpgid(0) != os.getpid():
        sys.exit("the leash must lead its own process group: start it in a new session")
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_watch_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    status = child.wait()
    print(f"leash: the server ended with status {status}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _die_with_parent() -> None:
    """In the child, before exec: a leash that is killed takes the server with it. Linux only; elsewhere the parent
    kills the group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
