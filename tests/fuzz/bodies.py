"""Fuzz campaign against the decoder of Arrow bodies (engine.http.wire), in child processes.

    python -m tests.fuzz.bodies --minutes 30 --seed 0 --keep crashes/

Each child decodes some thousand damaged bodies of one kind. The campaign prints a line per child and a table at the
end. It fails when a child dies, when a decoder raises anything but BadSpec, when a case takes over a minute, or when
the memory of a child exceeds MOST_MIB or grows by more than MOST_GROWTH_MIB after its first cases. The bodies that a
decoder does not survive are written to the folder of `--keep`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.fuzz.body_decoder import LIMIT_MIB
from tests.fuzz.mutations import KINDS, case

ROOT = Path(__file__).resolve().parents[2]
CASES_PER_CHILD = 20_000
STALL_SECONDS = 60.0
START_SECONDS = 600.0
"""Longest time until the first case. On a busy machine the imports of a child take minutes."""
NO_CASE_YET = struct.pack("<qq", -1, 0)
MOST_MIB = LIMIT_MIB + 250
"""Memory of a child: what one body may decode to, the imports of some 130 MiB, and room for the allocators."""
MOST_GROWTH_MIB = 60


@dataclass
class Outcome:
    """Counts of the cases of one child process."""

    decoded: int = 0
    refused: int = 0
    defects: list[tuple[int, str]] = field(default_factory=list)
    """(case number, what the decoder raised or how the process ended)."""
    peak_mib: int = 0
    growth_mib: int = 0
    """Growth of the memory in use from the first cases to the end."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.decoded + other.decoded,
            self.refused + other.refused,
            self.defects + other.defects,
            max(self.peak_mib, other.peak_mib),
            max(self.growth_mib, other.growth_mib),
        )

    @property
    def cases(self) -> int:
        return self.decoded + self.refused + len(self.defects)


def decode_in_child(arguments: list[str]) -> Outcome:
    """Runs tests.fuzz.body_decoder with these arguments, and adds the name of its progress file."""
    with tempfile.TemporaryDirectory() as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        progress.write_bytes(NO_CASE_YET)
        place = 1 if arguments[0] == "--files" else len(arguments)
        arguments = [*arguments[:place], str(progress), *arguments[place:]]
        with log.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.body_decoder", *arguments],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
            peak, stalled = watch(child, progress)
        assert child.stdout is not None
        output = child.stdout.read()
        if child.returncode == 0:
            counts = json.loads(output.splitlines()[-1])
            defects = [(number, message) for number, message in counts["defects"]]
            decoded, refused = counts.get("decoded", 0), counts.get("refused", 0)
            return Outcome(decoded, refused, defects, max(peak, counts["peak_mib"]), counts["growth_mib"])
        number, decoded = struct.unpack("<qq", progress.read_bytes())
        reason = "one case took too long" if stalled else f"the process ended with status {child.returncode}"
        frames = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.startswith("  File")]
        return Outcome(decoded, 0, [(number, f"{reason}; {' '.join(frames[:1])}")], peak)


def watch(child: subprocess.Popen[bytes], progress: Path) -> tuple[int, bool]:
    """Waits until the child ends. Returns (its peak memory in MiB, whether it was killed because a case took too
    long)."""
    peak, number, since = 0, b"", time.monotonic()
    process = psutil.Process(child.pid)
    while True:
        try:
            child.wait(0.2)
            return peak, False
        except subprocess.TimeoutExpired:
            pass
        peak = max(peak, process.memory_info().rss >> 20)
        if (now := progress.read_bytes()) != number:
            number, since = now, time.monotonic()
        elif time.monotonic() - since > (START_SECONDS if number == NO_CASE_YET else STALL_SECONDS):
            child.kill()
            child.wait()
            return peak, True


def decode_cases(kind: str, seed: int, first: int, count: int) -> Outcome:
    """Decodes the cases [first, first + count) of a kind. If a child dies, another child continues with the next
    case."""
    total, end = Outcome(), first + count
    while first < end:
        outcome = decode_in_child([kind, str(seed), str(first), str(end - first)])
        total += outcome
        if outcome.cases == end - first:
            break
        number, _ = outcome.defects[-1]
        if number < first:
            break  # the child died before its first case
        total.refused += number - first - outcome.decoded
        first = number + 1
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="When to stop.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the mutations.")
    parser.add_argument("--keep", type=Path, help="Folder for the bodies that the decoder does not survive.")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    totals = {kind: Outcome() for kind in KINDS}
    for first in itertools.count(0, CASES_PER_CHILD):
        for kind in KINDS:
            if time.monotonic() >= deadline:
                print_table(totals)
                return int(any(map(problems, totals.values())))
            outcome = decode_cases(kind, options.seed, first, CASES_PER_CHILD)
            totals[kind] += outcome
            print(
                f"seed {options.seed} {kind}: cases {first} to {first + CASES_PER_CHILD - 1}: {outcome.decoded} "
                f"decoded, {outcome.refused} refused, peak {outcome.peak_mib} MiB, growth {outcome.growth_mib} MiB",
                flush=True,
            )
            for problem in problems(outcome):
                print(f"  PROBLEM {problem}", flush=True)
            for number, _ in outcome.defects:
                keep(options.keep, kind, options.seed, number)
    raise AssertionError("the loop has no end of its own")


def problems(outcome: Outcome) -> list[str]:
    lines = [f"case {number}: {message}" for number, message in outcome.defects]
    if outcome.peak_mib > MOST_MIB:
        lines.append(f"a child needed {outcome.peak_mib} MiB, over {MOST_MIB}")
    if outcome.growth_mib > MOST_GROWTH_MIB:
        lines.append(f"the memory of a child grew by {outcome.growth_mib} MiB, over {MOST_GROWTH_MIB}")
    return lines


def keep(folder: Path | None, kind: str, seed: int, number: int) -> None:
    if folder is not None and number >= 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind.replace(' ', '-')}.{seed}-{number}.arrow").write_bytes(case(kind, seed, number))


def print_table(totals: dict[str, Outcome]) -> None:
    print("| body | cases | decoded | refused (BadSpec) | crashes and other errors | peak MiB | growth MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, total in [*totals.items(), ("**all**", sum(totals.values(), Outcome()))]:
        print(
            f"| {kind} | {total.cases:,} | {total.decoded:,} | {total.refused:,} | {len(total.defects)} | "
            f"{total.peak_mib} | {total.growth_mib} |"
        )


if __name__ == "__main__":
    sys.exit(main())
