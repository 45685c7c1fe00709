"""Fuzz campaign against the decoder of Arrow bodies (engine.http.wire), in child processes.

    python -m tests.fuzz.bodies --minutes 30 --seed 0 --keep crashes/

Each child decodes some thousand damaged bodies of one kind. The campaign prints a line per child and a table at the
end. It fails when a child dies, when a decoder raises anything but BadSpec, when a case takes over a minute, or when a
child needs more memory than `--most-mib`. Bodies that did so are written to the folder of `--keep`.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.fuzz.mutations import KINDS, case

ROOT = Path(__file__).resolve().parents[2]
CASES_PER_CHILD = 5000
STALL_SECONDS = 60.0
MOST_MIB = 600
"""Memory of a child, of which the imports take some 150 MiB."""


@dataclass
class Outcome:
    """What became of the cases of one child."""

    decoded: int = 0
    refused: int = 0
    defects: list[tuple[int, str]] = field(default_factory=list)
    """Case numbers, and what the decoder raised or how the process ended."""
    peak_mib: int = 0

    @property
    def cases(self) -> int:
        return self.decoded + self.refused + len(self.defects)


def decode_in_child(arguments: list[str]) -> Outcome:
    """Runs tests.fuzz.body_decoder with these arguments, before its progress file is put in among them."""
    with tempfile.TemporaryDirectory() as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        progress.write_bytes(struct.pack("<qq", -1, 0))
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
            defects = [(number, message) for number, message in counts["defect_cases"]]
            return Outcome(counts.get("decoded", 0), counts.get("refused", 0), defects, max(peak, counts["peak_mib"]))
        number, decoded = struct.unpack("<qq", progress.read_bytes())
        reason = "one case took too long" if stalled else f"the process ended with status {child.returncode}"
        frames = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.startswith("  File")]
        return Outcome(decoded, 0, [(number, f"{reason}; {' '.join(frames[:1])}")], peak)


def watch(child: subprocess.Popen[bytes], progress: Path) -> tuple[int, bool]:
    """Waits until the child ends: (its peak memory in MiB, whether it was killed because one case took too long)."""
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
        elif time.monotonic() - since > STALL_SECONDS:
            child.kill()
            child.wait()
            return peak, True


def decode_cases(kind: str, seed: int, first: int, count: int) -> Outcome:
    """Decodes the cases [first, first + count) of a kind. After a death the next child goes on with the next case."""
    total, end = Outcome(), first + count
    while first < end:
        outcome = decode_in_child([kind, str(seed), str(first), str(end - first)])
        total.decoded += outcome.decoded
        total.refused += outcome.refused
        total.defects += outcome.defects
        total.peak_mib = max(total.peak_mib, outcome.peak_mib)
        if outcome.cases == end - first:
            break
        number, _ = outcome.defects[0]
        if number < first:
            break  # it died before its first case
        total.refused += number - first - outcome.decoded
        first = number + 1
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="When to stop.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the mutations.")
    parser.add_argument("--most-mib", type=int, default=MOST_MIB, help="Largest memory of a child.")
    parser.add_argument("--keep", type=Path, help="Folder for the bodies that the decoder does not survive.")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    first = failures = 0
    while time.monotonic() < deadline:
        for kind in KINDS:
            outcome = decode_cases(kind, options.seed, first, CASES_PER_CHILD)
            counts[kind] += Counter(
                decoded=outcome.decoded, refused=outcome.refused, defects=len(outcome.defects)
            )
            counts[kind]["peak_mib"] = max(counts[kind]["peak_mib"], outcome.peak_mib)
            too_large = outcome.peak_mib > options.most_mib
            failures += len(outcome.defects) + too_large
            print(
                f"seed {options.seed} {kind}: cases {first} to {first + CASES_PER_CHILD - 1}: {outcome.decoded} "
                f"decoded, {outcome.refused} refused, {len(outcome.defects)} defects, peak {outcome.peak_mib} MiB"
                + (" (TOO LARGE)" if too_large else ""),
                flush=True,
            )
            for number, message in outcome.defects:
                print(f"  DEFECT case {number}: {message}", flush=True)
                keep(options.keep, kind, options.seed, number)
            if time.monotonic() >= deadline:
                break
        first += CASES_PER_CHILD
    print_table(counts)
    return int(failures > 0)


def keep(folder: Path | None, kind: str, seed: int, number: int) -> None:
    if folder is not None and number >= 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind.replace(' ', '-')}.{seed}-{number}.arrow").write_bytes(case(kind, seed, number))


def print_table(counts: dict[str, Counter[str]]) -> None:
    print("| body | cases | decoded | refused (BadSpec) | defects | largest memory of a child, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind, count in counts.items():
        cases = count["decoded"] + count["refused"] + count["defects"]
        print(
            f"| {kind} | {cases} | {count['decoded']} | {count['refused']} | {count['defects']} | "
            f"{count['peak_mib']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
