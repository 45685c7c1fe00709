"""The child process of the body fuzz: decodes damaged bodies, and says after each of them what became of it.

    python -m tests.fuzz.body_decoder KIND|all SEED FIRST COUNT PROGRESS_FILE
    python -m tests.fuzz.body_decoder --files PROGRESS_FILE FILE...

PROGRESS_FILE holds two integers: the number of the case that is being decoded, and how many cases were valid bodies so
far. The parent reads them when this process dies. The last line on stdout is a JSON object of counts. Each file is
decoded as a body of every kind.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engine.errors import BadSpec
from tests.fuzz.mutations import KINDS, case


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
    if arguments[0] == "--files":
        progress_file, cases = arguments[1], files(arguments[2:])
    else:
        kind, seed, first, count, progress_file = arguments
        cases = numbered_cases(kind, int(seed), int(first), int(count))
    outcomes: Counter[str] = Counter()
    defects = []
    with open(progress_file, "r+b", buffering=0) as progress:
        for number, kind, data in cases:
            progress.seek(0)
            progress.write(struct.pack("<qq", number, outcomes["decoded"]))
            try:
                KINDS[kind][1](data)
            except BadSpec:
                outcomes["refused"] += 1
            except Exception as error:  # noqa: BLE001 (what else a decoder raises is what the fuzz looks for)
                outcomes["defects"] += 1
                defects.append([number, f"{type(error).__name__}: {error}"[:300]])
            else:
                outcomes["decoded"] += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({**outcomes, "defect_cases": defects[:20], "peak_mib": peak}))


if __name__ == "__main__":
    main(sys.argv[1:])
