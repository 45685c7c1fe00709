"""Runs program.py and then test.py in the same namespace under limits, and prints the content of `token` at the end.

    python -I code_launcher.py MEMORY_BYTES CPU_SECONDS OUTPUT_BYTES

CodeGrader starts it in a folder with these files. It imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from types import ModuleType

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET


def limit_process(memory_bytes: int, cpu_seconds: int, output_bytes: int) -> None:
    """Limit the memory, the CPU time and the size of each file of this process, and cut off its network if the kernel
    allows that to this user."""
    # A new network namespace has no network. An ordinary user may create one only inside a new user namespace. A system
    # without `unshare` raises an error here, and the program keeps its network.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NETWORK) != 0:
            libc.unshare(NEW_USER | NEW_NETWORK)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    # A crash must not fill the disk with a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Run both files, and print the token on the last line if they ran to the end.

    A program without a test may leave by exit(0).
    """
    token, program, test = _take("token"), _take("program.py"), _take("test.py")
    memory_bytes, cpu_seconds, output_bytes = map(int, sys.argv[1:])
    # The program must not see the launcher's arguments, nor run without limits.
    sys.argv[:] = ["program.py"]
    limit_process(memory_bytes, cpu_seconds, output_bytes)

    # Run both files in one module, so that the test can use the names of the program.
    sys.modules["__main__"] = module = ModuleType("__main__")
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except SystemExit as program_exit:
        if test or program_exit.code:
            raise
    exec(compile(test, "test.py", "exec"), module.__dict__)
    # Flush first: the token must come after everything that the program printed.
    sys.stdout.flush()
    os.write(1, f"\n{token}\n".encode())


def _take(name: str) -> str:
    """Read a file and delete it, so that the program cannot read it."""
    with open(name, encoding="utf-8") as file:
        text = file.read()
    os.unlink(name)
    return text


if __name__ == "__main__":
    main()
