"""The programs by which a child process of this process ends together with it."""

from __future__ import annotations

# PR_SET_PDEATHSIG (1) stays in force after exec. The signal is SIGKILL, because no process would be left to follow a
# SIGTERM up. If the parent died before the call, getppid has changed.
_FOLLOW_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
"""

DIE_WITH_PARENT = f"""{_FOLLOW_PARENT}os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Becomes `python ARGUMENTS`, after `python -c DIE_WITH_PARENT PID ARGUMENTS` was started by the process PID. On Linux
it is killed when the thread that started it ends."""

LIMITED_COMMAND = f"""{_FOLLOW_PARENT}
import resource
memory = int(sys.argv[2])
if memory:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"{{sys.argv[3]}} cannot be run: {{error}}")
"""
"""Becomes COMMAND, after `python -c LIMITED_COMMAND PID BYTES COMMAND` was started by the process PID, with an address
space of BYTES (0: no limit). As DIE_WITH_PARENT otherwise."""
