"""The child process of the body fuzz: decodes damaged bodies and counts the results.

    python -m tests.fuzz.body_decoder KIND|all SEED FIRST COUNT PROGRESS_FILE
    python -m tests.fuzz.body_decoder --files PROGRESS_FILE FILE...

PROGRESS_FILE holds two integers: the number of the case that is being decoded, and how many cases were valid bodies so
far. The parent reads them when this process dies. The last line on stdout is a JSON object of counts. Each file is
decoded as a body of every kind.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa

from engine.errors import BadSpec, SampleTooLong
from engine.http import wire
from tests.fuzz.mutations import KINDS, case

LIMIT_MIB = 256
"""Most memory of a decoded body here. Damaged headers announce any size, and the announced size may be allocated."""
WARM_UP_CASES = 500


def numbered_cases(kind: str, seed: int, first: int, count: int) -> Iterator[tuple[int, str, bytes]]:
    kinds = list(KINDS) if kind == "all" else [kind]
    for number in range(first, first + count):
        chosen = kinds[number % len(kinds)]
        yield number, chosen, case(chosen, seed, number)


def files(paths: list[str]) -> Iterator[tuple[int, str, bytes]]:
    for number, path in enumerate(paths):
        for kind in KINDS:
            yield number, kind, Path(path).read_bytes()


def main(arguments: list[str]) -> None:
    faulthandler.enable()
    wire.MAX_REQUEST_BYTES = wire.MAX_RESPONSE_BYTES = LIMIT_MIB << 20
    if arguments[0] == "--files":
        progress_file, cases = arguments[1], files(arguments[2:])
    else:
        kind, seed, first, count, progress_file = arguments
        cases = numbered_cases(kind, int(seed), int(first), int(count))
    outcomes: Counter[str] = Counter()
    defects, warm_mib = [], 0
    with open(progress_file, "r+b", buffering=0) as progress:
        for done, (number, kind, data) in enumerate(cases):
            if done == WARM_UP_CASES:
                warm_mib = resident_mib()
            # Write the number of the case first: after a crash the parent knows which case it was.
            progress.seek(0)
            progress.write(struct.pack("<qq", number, outcomes["decoded"]))
            try:
                KINDS[kind][1](data)
            except (BadSpec, SampleTooLong):
                outcomes["refused"] += 1
            except Exception as error:  # noqa: BLE001 (the fuzz looks for any other error of a decoder)
                defects.append([number, f"{type(error).__name__}: {error}"[:300]])
            else:
                outcomes["decoded"] += 1
    # Memory that the decoders did not give back since the warm-up.
    growth_mib = resident_mib() - warm_mib if warm_mib else 0
    print(json.dumps({**outcomes, "defects": defects, "peak_mib": peak_mib(), "growth_mib": growth_mib}))


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
