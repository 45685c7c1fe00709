"""The child process of the fuzz campaigns: uses cases of one kind and counts the results.

    python -m tests.fuzz.body_decoder KIND|all SEED FIRST COUNT PROGRESS_FILE
    python -m tests.fuzz.body_decoder --files PROGRESS_FILE FILE...

PROGRESS_FILE holds two integers: the number of the case that is being used, and how many cases were valid so far. The
parent reads them when this process dies. The last line on stdout is a JSON object of counts. Each file is decoded as an
Arrow body of every kind. `all` are the kinds of Arrow bodies.

A case of another kind has a folder of its own, and what Python writes elsewhere is a defect.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from engine.http import wire
from tests.fuzz.inputs import HOSTILE, WIRE_LIMIT_MIB, Input, input_of
from tests.fuzz.mutations import KINDS

WARM_UP_CASES = 100
ADDRESS_SPACE_MIB = 4096
"""Address space of a child above that of its imports, so that a case cannot take the memory of the machine."""
WRITE_EVENTS = ("os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.truncate", "os.rmdir", "os.chmod")
REMOVALS = ("os.remove", "os.rmdir")
"""Events whose second argument is the folder that a relative path is in, as shutil.rmtree gives it."""


NumberedCase = tuple[int, str, Callable[[], bytes]]
"""(number, kind, makes the case)."""


def numbered_cases(kind: str, seed: int, first: int, count: int) -> Iterator[NumberedCase]:
    kinds = list(KINDS) if kind == "all" else [kind]
    for number in range(first, first + count):
        chosen = kinds[number % len(kinds)]
        yield number, chosen, partial(input_of(chosen).case, seed, number)


def files(paths: list[str]) -> Iterator[NumberedCase]:
    for number, path in enumerate(paths):
        for kind in KINDS:
            yield number, kind, Path(path).read_bytes


class WriteGuard:
    """Notes what Python writes outside a folder, by the interpreter's audit events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outside = os.path.realpath(folder), ""
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                mode is None and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            paths = [path] if writes else []
        elif event in WRITE_EVENTS and not (event in REMOVALS and arguments[1] != -1):
            # of a link, the second path is created
            paths = list(arguments[:2]) if event == "os.rename" else [arguments[event in ("os.symlink", "os.link")]]
        else:
            return
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                self._check(os.fsdecode(path))

    def _check(self, path: str) -> None:
        real = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
        if (
            not real.startswith((self.folder + "/", "/dev/", "/proc/"))
            and real != self.folder
            and "__pycache__" not in real
        ):
            self.outside = real


def use_cases(cases: Iterator[NumberedCase], progress_file: str, folder: Path) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    defects: list[tuple[int, str]] = []
    warm_mib = most_mib = base_mib = 0
    guard: WriteGuard | None = None
    with open(progress_file, "r+b", buffering=0) as progress:
        for done, (number, kind, make) in enumerate(cases):
            if done == WARM_UP_CASES:
                warm_mib = resident_mib()
            # Write the number of the case first: after a crash the parent knows which case it was.
            progress.seek(0)
            progress.write(struct.pack("<qq", number, outcomes["decoded"]))
            source = input_of(kind)
            if kind in HOSTILE and guard is None:
                guard = WriteGuard(folder)
            # The peak memory is counted from here. What making the case takes, and the allocators keep, does not count.
            base_mib = base_mib or psutil.Process().memory_info().rss >> 20
            data = make()
            case_folder = Path(tempfile.mkdtemp(dir=folder)) if guard else folder
            pa.default_memory_pool().release_unused()
            kept_mib = psutil.Process().memory_info().rss >> 20
            Path("/proc/self/clear_refs").write_text("5")
            if guard:
                limit_address_space(psutil.Process().memory_info().vms + (ADDRESS_SPACE_MIB << 20))
            outcome = use_case(source, data, case_folder)
            if guard:
                limit_address_space(resource.RLIM_INFINITY)
            needed_mib = peak_mib() - max(kept_mib - base_mib, 0)
            if guard and guard.outside:
                outcome, guard.outside = f"wrote outside its folder: {guard.outside}", ""
            most_mib = max(most_mib, needed_mib)
            if kind in HOSTILE and needed_mib > source.most_mib:
                outcome = f"needed {needed_mib} MiB, over {source.most_mib}"
            if outcome in ("decoded", "refused"):
                outcomes[outcome] += 1
            else:
                defects.append((number, outcome))
            if guard:
                shutil.rmtree(case_folder, ignore_errors=True)
                pa.default_memory_pool().release_unused()
    # Memory that was not given back since the warm-up.
    growth_mib = resident_mib() - warm_mib if warm_mib else 0
    return {**outcomes, "defects": defects, "peak_mib": most_mib, "growth_mib": growth_mib}


def limit_address_space(size: int) -> None:
    """Limits the address space. To make a case may take more than to use it is allowed to, so it is not limited."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size if most == resource.RLIM_INFINITY else min(size, most), most))


def use_case(source: Input, data: bytes, folder: Path) -> str:
    """ "decoded", "refused", or what is wrong."""
    try:
        source.use(data, folder)
    except source.refusals as error:
        # a refusal is read by a person
        return "refused" if 0 < len(str(error)) < 20_000 else f"a refusal of {len(str(error))} letters: {error!r:.80}"
    except Exception as error:  # noqa: BLE001 (the fuzz looks for any other error)
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return f"{type(error).__name__} at {place}: {error}"[:400]
    return "decoded"


def main(arguments: list[str]) -> None:
    faulthandler.enable()
    wire.MAX_REQUEST_BYTES = wire.MAX_RESPONSE_BYTES = WIRE_LIMIT_MIB << 20
    if arguments[0] == "--files":
        progress_file, cases = arguments[1], files(arguments[2:])
    else:
        kind, seed, first, count, progress_file = arguments
        cases = numbered_cases(kind, int(seed), int(first), int(count))
    with tempfile.TemporaryDirectory(prefix="ostinato-fuzz-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        print(json.dumps(use_cases(cases, progress_file, Path(folder))))


def peak_mib() -> int:
    """Returns the peak memory of this process. Linux's getrusage would give the parent's peak if that is larger."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    return 0


def resident_mib() -> int:
    """Returns the memory in use, without what the allocators reserve."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    return psutil.Process().memory_info().rss >> 20


if __name__ == "__main__":
    main(sys.argv[1:])
