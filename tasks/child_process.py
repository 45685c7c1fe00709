"""The programs by which child processes of this process end together with it, and the proxy settings of child processes
that call a server on this machine."""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"

# PR_SET_PDEATHSIG (1) stays in force after exec. The signal is SIGKILL, because no process would be left to follow a
# SIGTERM up. If the parent died before the call, getppid has changed.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Becomes `python ARGUMENTS`, after `python -c DIE_WITH_PARENT PID ARGUMENTS` was started by the process PID. On Linux
it is killed when the thread that started it ends."""

# The watcher reads from a pipe that only this process holds open for writing, so that the read ends when this process
# does. It is no child of the command, which may wait for all its children. Standard streams that it held open would
# never end.
GUARDED_COMMAND = """
import os, resource, signal, sys
pipe, memory = int(sys.argv[1]), int(sys.argv[2])
child = os.fork()
if child == 0:
    if os.fork():
        os._exit(0)
    os.closerange(0, 3)
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)
os.waitpid(child, 0)
os.close(pipe)
if memory:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"{sys.argv[3]} cannot be run: {error}")
"""
"""Becomes COMMAND, after `python -c GUARDED_COMMAND PIPE BYTES COMMAND` was started in a session of its own, with an
address space of BYTES (0: no limit). PIPE is the read end of a pipe: when its write end closes, all processes of the
group are killed."""


def no_proxy_with_loopback(name: str) -> str:
    """Returns the value of the environment variable (NO_PROXY or no_proxy) with the loopback address added."""
    # Clients read one of the two names. If only the other one is set, its hosts stay excluded.
    hosts = os.environ.get(name) or os.environ.get(name.swapcase())
    return f"{hosts},{LOOPBACK}" if hosts else LOOPBACK
