"""Runs program.py, then test.py in its names, under limits, and then says what the grader wrote into `token`.

    python -I code_launcher.py MEMORY_BYTES CPU_SECONDS OUTPUT_BYTES
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from types import ModuleType

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000


def limit(memory: int, seconds: int, output: int) -> None:
    """From here on: so many bytes of memory, seconds of processor and bytes per file, and no network where the kernel
    lets this user leave it."""
    with contextlib.suppress(OSError, AttributeError):  # a system without that call
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NETWORK) != 0:
            libc.unshare(NEW_USER | NEW_NETWORK)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Ends with the token on the last line if the program and its test ran to their ends. A program that leaves by
    exit(0) did, unless a test was to follow."""
    token, program, test = (_take(name) for name in ("token", "program.py", "test.py"))
    memory, seconds, output = map(int, sys.argv[1:])
    sys.argv[:] = ["program.py"]
    limit(memory, seconds, output)
    sys.modules["__main__"] = module = ModuleType("__main__")
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except SystemExit as left:
        if test or left.code:
            raise
    exec(compile(test, "test.py", "exec"), module.__dict__)
    sys.stdout.flush()
    os.write(1, f"\n{token}\n".encode())


def _take(name: str) -> str:
    """The text of a file that the program shall not find."""
    with open(name, encoding="utf-8") as file:
        text = file.read()
    os.unlink(name)
    return text


if __name__ == "__main__":
    main()
