"""Measures what a step costs when two runs do not fit into the engine's memory together.

    python bench/eviction.py [--model FOLDER] [--steps 4]        (default model: a tiny one, made here)

Two runs take GRPO steps in turn: first with memory for both, then with memory for one. `residency_seconds` is 0, so the
second case is the worst one: at every turn, the run whose turn it is evicts the other one. An evicted policy is written
to a checkpoint, and is read from it at the run's next turn.

Seconds and CPU-seconds are per step; the first step of each run is not counted. The work log says what was written,
read and redone. Both cases must end with the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from grpo_work import Shape, grpo_step, new_policy, require_model

from engine.backends.torch.tiny import build_tiny_model
from engine.local.engine import LocalEngine
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import CommitRecord

RUNS = ("a", "b")
GIB = 1 << 30


async def take_turns(
    model: Path, folder: Path, *, steps: int, gib: float | str, shape: Shape
) -> tuple[dict[str, CommitRecord], float]:
    """Runs one case and prints its figures. Returns each run's last record and the GiB in use at the end."""
    # two policies on one engine, which start from the same model
    spec = LocalEngineSpec.model_validate(
        {
            "device": "cpu",
            "deterministic": True,
            "threads": 1,
            "memory_gib": gib,
            "residency_seconds": 0,
        }
    )
    engine = LocalEngine(f"file://{folder}/store", spec)
    starts = {run: await new_policy(engine, model, run) for run in RUNS}
    shapes = {run: replace(shape, seed=number) for number, run in enumerate(RUNS)}

    # the first step of each run also loads the model, so it is not counted
    records = {}
    for run in RUNS:
        records[run] = await grpo_step(engine, engine.store, starts[run], starts[run], shapes[run])

    # the counted steps
    worklog = folder / "work.jsonl"
    os.environ["OSTINATO_WORKLOG"] = str(worklog)
    wall, cpu = time.monotonic(), time.process_time()
    for _ in range(steps):
        for run in RUNS:
            records[run] = await grpo_step(engine, engine.store, records[run].policy, starts[run], shapes[run])
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    del os.environ["OSTINATO_WORKLOG"]

    # the figures
    step_count = steps * len(RUNS)
    used_gib = (await engine.info()).memory_used_bytes / GIB
    room = "room for both" if gib == "auto" else f"room for {gib:.3f} GiB"
    print(f"{room}, {used_gib:.3f} GiB used: {wall / step_count:.2f} s and {cpu / step_count:.2f} CPU-s per step")
    print(f"  in {step_count} steps: {count_events(worklog)}", flush=True)
    await engine.close(checkpoint=False)
    return records, used_gib


def count_events(worklog: Path) -> str:
    """Counts evictions and restores of trained policies, restores of references, and steps that were redone."""
    counts = Counter[str]()
    for line in worklog.read_text().splitlines():
        event = json.loads(line)
        # only the reference of a run is restored at step 0
        is_reference = event["event"] == "restore" and event["step"] == 0
        counts["restore of a reference" if is_reference else event["event"]] += 1
    return (
        f"{counts['checkpoint']} evictions of a run in training, {counts['restore']} restores of one, "
        f"{counts['restore of a reference']} of a reference, {counts['redo']} steps redone"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each run")
    parser.add_argument("--completions", type=int, default=8, help="completions of each of 4 prompts")
    options = parser.parse_args()
    shape = Shape(completions=options.completions)
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        model = require_model(options.model) if options.model else build_tiny_model(Path(folder) / "tiny", seed=0)
        folders = [Path(folder) / "room-for-both", Path(folder) / "room-for-one"]
        for case_folder in folders:
            case_folder.mkdir()
        records_of_both, used_gib = asyncio.run(
            take_turns(model, folders[0], steps=options.steps, gib="auto", shape=shape)
        )
        # both runs use 9 copies of the weights: 4 for each run in training and 1 for the reference. One run needs 5
        records_of_one, _ = asyncio.run(
            take_turns(model, folders[1], steps=options.steps, gib=0.6 * used_gib, shape=shape)
        )

    # both cases must end with the same weights, and the two runs with different ones
    digests = {}
    for run in RUNS:
        record, record_with_evictions = records_of_both[run], records_of_one[run]
        digest = record.weights_digest
        assert record.state == record_with_evictions.state and digest == record_with_evictions.weights_digest, (
            f"the cases ended with different weights of {run}: {digest} and {record_with_evictions.weights_digest}"
        )
        digests[run] = digest
    assert None not in digests.values() and len(set(digests.values())) == len(RUNS), (
        "the weights did not change, or the two runs have the same weights"
    )
    print("weights digests of both cases:", ", ".join(f"{run} {str(digest)[:16]}" for run, digest in digests.items()))


if __name__ == "__main__":
    main()
