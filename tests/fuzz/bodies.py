"""Fuzz campaigns in child processes: against the decoder of Arrow bodies (engine.http.wire), or with --hostile against
what reads hubs, Parquet files, configs and judges' replies (tests.fuzz.inputs).

    python -m tests.fuzz.bodies --minutes 30 --seed 0 --keep crashes/
    python -m tests.fuzz.bodies --hostile --minutes 120 --seed 0 --keep findings/ --counts counts.json

Each child uses some hundreds or thousands of cases of one kind. The campaign prints a line per child and a table at the
end. It fails when a child dies, when a case raises anything but a refusal, when one takes over a minute or writes
outside its folder, when the memory of a child exceeds the limit of the kind, or, for bodies, when it grows by more than
MOST_GROWTH_MIB after the first cases. The cases of defects are written to the folder of `--keep`, and the counts so far
to the file of `--counts`. `--replay FILE` uses one kept case and prints what it raises.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.fuzz.inputs import HOSTILE, input_of
from tests.fuzz.mutations import KINDS

ROOT = Path(__file__).resolve().parents[2]
STALL_SECONDS = 60.0
START_SECONDS = 600.0
"""Longest time until the first case. On a busy machine the imports of a child take minutes."""
NO_CASE_YET = struct.pack("<qq", -1, 0)
MOST_GROWTH_MIB = 60
"""Growth of the memory of a child that decodes bodies. The libraries that read other inputs have caches."""


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
    # a child that is killed leaves its own folder in this one
    with tempfile.TemporaryDirectory(prefix="ostinato-fuzz-") as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        progress.write_bytes(NO_CASE_YET)
        place = 1 if arguments[0] == "--files" else len(arguments)
        arguments = [*arguments[:place], str(progress), *arguments[place:]]
        with log.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.body_decoder", *arguments],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | {"TMPDIR": folder},
            )  # fmt: skip
            peak, stalled = watch(child, progress)
        assert child.stdout is not None
        output = child.stdout.read()
        if child.returncode == 0:
            counts = json.loads(output.splitlines()[-1])
            defects = [(number, message) for number, message in counts["defects"]]
            decoded, refused = counts.get("decoded", 0), counts.get("refused", 0)
            if arguments[0] in HOSTILE:
                peak = 0  # the child leaves out what making a case took
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
    parser.add_argument("--keep", type=Path, help="Folder for the cases of defects.")
    parser.add_argument("--counts", type=Path, help="File for the counts so far, in JSON.")
    parser.add_argument("--hostile", action="store_true", help="Hubs, files, configs and judges instead of bodies.")
    parser.add_argument("--kind", action="append", help="Only this kind. May be given several times.")
    parser.add_argument("--replay", type=Path, help="A kept case.")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    deadline = time.monotonic() + 60 * options.minutes
    totals = {kind: Outcome() for kind in options.kind or (HOSTILE if options.hostile else KINDS)}
    firsts = dict.fromkeys(totals, 0)
    for kind in itertools.cycle(totals):
        if time.monotonic() >= deadline:
            print_table(totals)
            return int(any(problems(kind, total) for kind, total in totals.items()))
        first, count = firsts[kind], input_of(kind).cases_per_child
        firsts[kind] += count
        outcome = decode_cases(kind, options.seed, first, count)
        totals[kind] += outcome
        print(
            f"seed {options.seed} {kind}: cases {first} to {first + count - 1}: {outcome.decoded} decoded, "
            f"{outcome.refused} refused, peak {outcome.peak_mib} MiB, growth {outcome.growth_mib} MiB",
            flush=True,
        )
        for problem in problems(kind, outcome):
            print(f"  PROBLEM {problem}", flush=True)
        for number, message in outcome.defects:
            keep(options.keep, kind, options.seed, number, message)
        if options.counts:
            write_counts(options.counts, totals, options)
    raise AssertionError("the loop has no end of its own")


def write_counts(path: Path, totals: dict[str, Outcome], options: argparse.Namespace) -> None:
    counts = {kind: {"cases": total.cases} | asdict(total) for kind, total in totals.items()}
    path.write_text(json.dumps({"seed": options.seed, "minutes": options.minutes, "kinds": counts}, indent=1))


def problems(kind: str, outcome: Outcome) -> list[str]:
    lines = [f"case {number}: {message}" for number, message in outcome.defects]
    most_mib = input_of(kind if kind != "all" else next(iter(KINDS))).most_mib
    if outcome.peak_mib > most_mib:
        lines.append(f"a child needed {outcome.peak_mib} MiB, over {most_mib}")
    if kind not in HOSTILE and outcome.growth_mib > MOST_GROWTH_MIB:
        lines.append(f"the memory of a child grew by {outcome.growth_mib} MiB, over {MOST_GROWTH_MIB}")
    return lines


def keep(folder: Path | None, kind: str, seed: int, number: int, message: str) -> None:
    if folder is not None and number >= 0:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{kind.replace(' ', '-')}.{seed}-{number}"
        (folder / f"{stem}.case").write_bytes(input_of(kind).case(seed, number))
        (folder / f"{stem}.txt").write_text(message)


def replay(path: Path) -> int:
    source = input_of(path.name.split(".")[0].replace("-", " "))
    folder = Path(tempfile.mkdtemp(prefix="ostinato-fuzz-"))
    try:
        source.use(path.read_bytes(), folder)
    except source.refusals as error:
        print(f"refused: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder)
    return 0


def print_table(totals: dict[str, Outcome]) -> None:
    print("| input | cases | accepted | refused | crashes and other errors | peak MiB | growth MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, total in [*totals.items(), ("**all**", sum(totals.values(), Outcome()))]:
        print(
            f"| {kind} | {total.cases:,} | {total.decoded:,} | {total.refused:,} | {len(total.defects)} | "
            f"{total.peak_mib} | {total.growth_mib} |"
        )


if __name__ == "__main__":
    sys.exit(main())
