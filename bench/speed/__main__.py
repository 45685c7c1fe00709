"""Measures our speed against TRL's and transformers' on the same data, in turns: A B, A B, ...

    python -m bench.speed [WORKLOAD ...] [--pairs 5] [--model FOLDER] [--out FOLDER]
    python -m bench.speed sft --ours        measure only our side
    python -m bench.speed --tables          print the tables of the results that are there

Without names, all workloads run one after the other. The results go to bench/results/WORKLOAD.json, and a profile of
one step of ours, which is not part of the measurement, to WORKLOAD.profile.txt.

Every arm is a process with one thread, which stays alive and idle between its turns. The figures are tokens per
CPU-second of the arm's process, and per wall second. The ratio is the mean over the pairs, with a 95 % bootstrap
interval. In bold: the peer's setting that is the fastest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.grpo_work import SMOLLM, require_model
from bench.speed import report
from bench.speed.data import counter
from bench.speed.turns import ArmFailed, Setting, take_turns
from bench.speed.workloads import MACHINE, OURS, WORKLOADS

VLLM = "rollout-vllm"
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def measure(name: str, model: Path, pairs: int, out: Path, *, with_peers: bool) -> None:
    """Measures one workload and writes its result."""
    workload = WORKLOADS[name]
    print(f"{name}: {workload.title}", flush=True)
    # the warm-up and the profile are steps as well
    rows = list(workload.rows(counter(str(model)), workload.rows_per_step * (pairs + 2)))
    functions: dict[str, tuple[str, dict[str, Any]]] = {OURS: (f"bench.speed.ours:{workload.ours}", {})}
    if with_peers:
        for peer_name, peer in workload.peers.items():
            functions[peer_name] = (f"bench.speed.peers:{peer.function}", peer.options)
    functions[MACHINE] = ("bench.speed.roofline:machine", {})

    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as scratch:
        arms = {}
        for number, (arm, (function, options)) in enumerate(functions.items()):
            setting = Setting(
                model=str(model.resolve()),
                folder=str(Path(scratch, str(number))),
                rows=rows,
                rows_per_step=workload.rows_per_step,
                completions=workload.completions,
                new_tokens=workload.new_tokens,
                options=options,
            )
            arms[arm] = function, setting
        turns, profile = take_turns(arms, pairs, profiled=OURS)
    result = report.result_of(name, workload.title, turns, unit=workload.unit)
    report.save(result, out)
    (out / f"{name}.profile.txt").write_text(profile + "\n")


def measure_vllm(model: Path, pairs: int, out: Path) -> None:
    """Runs bench/rollout_throughput.py, which measures vLLM through our engine against bare vLLM in one process."""
    if not VLLM_PYTHON.is_file():
        print(f"{VLLM}: not run, because {VLLM_PYTHON} is missing; `make .venv-vllm/.ready` makes it")
        return
    out.mkdir(parents=True, exist_ok=True)
    command = [VLLM_PYTHON, "bench/rollout_throughput.py", "--model", model, "--dtype", "bfloat16"]
    subprocess.run(
        [*map(str, command), "--pairs", str(pairs), "--out", str(out / f"{VLLM}.json")],
        env=os.environ | {"PYTHONPATH": "."},
        check=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKLOADS, VLLM]
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(names))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", type=Path, default=SMOLLM, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--ours", action="store_true", help="measure only our side")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads) - set(names)
    if unknown:
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; give one of {', '.join(names)}")

    chosen, failed = options.workloads or names, []
    if not options.tables:
        require_model(options.model)
        # set before the arms start: OpenMP reads it when torch is imported
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        for name in chosen:
            try:
                if name == VLLM:
                    measure_vllm(options.model, options.pairs, options.out)
                else:
                    measure(name, options.model, options.pairs, options.out, with_peers=not options.ours)
            except (ArmFailed, subprocess.CalledProcessError) as error:
                # the other workloads are still measured
                print(f"{name} failed: {error}", flush=True)
                failed.append(name)
    print(report.tables(report.load([name for name in chosen if name not in failed], options.out)))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
