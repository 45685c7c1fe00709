"""What it costs when two runs do not fit into the engine's memory together.

    python bench/eviction.py [--model FOLDER] [--steps 4]        (default model: a tiny one, made here)

Two runs take GRPO steps in turn, first with room for both, then with room for one and nobody protected
(`residency_seconds` 0): the worst case, in which whoever comes sends the other away at every turn. Who leaves is
checkpointed; who comes back is restored. Seconds and CPU-seconds are per step, after one step of each run; the work log
tells what was written, read and redone meanwhile. Both cases must end with the same weights.
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

from grpo_work import Shape, found_model, grpo_step, new_policy

from engine.backends.torch.tiny import build_tiny_model
from engine.local.engine import LocalEngine
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import CommitRecord

RUNS = ("a", "b")
GIB = 1 << 30


async def take_turns(
    model: Path, folder: Path, *, steps: int, gib: float | str, shape: Shape
) -> tuple[dict[str, CommitRecord], float]:
    """Prints the figures of one case. Returns each run's last record and the GiB in use at the end."""
    spec = LocalEngineSpec.model_validate(
        {
            "device": "cpu",
            "deterministic": True,
            "threads": 1,
            "memory_gib": gib,
            "residency_seconds": 0,
            "digest_every": steps + 1,
        }
    )
    engine = LocalEngine(f"file://{folder}/store", spec)
    starts = {run: await new_policy(engine, model, run) for run in RUNS}
    records = {}
    shapes = {run: replace(shape, seed=number) for number, run in enumerate(RUNS)}
    for run in RUNS:
        records[run] = await grpo_step(engine, engine.store, starts[run], starts[run], shapes[run])
    worklog = folder / "work.jsonl"
    os.environ["OSTINATO_WORKLOG"] = str(worklog)
    wall, cpu = time.monotonic(), time.process_time()
    for _ in range(steps):
        for run in RUNS:
            records[run] = await grpo_step(engine, engine.store, records[run].policy, starts[run], shapes[run])
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    del os.environ["OSTINATO_WORKLOG"]
    taken, held = steps * len(RUNS), (await engine.info()).memory_used_bytes / GIB
    room = "room for both" if gib == "auto" else f"room for {gib:.3f} GiB"
    print(f"{room}, {held:.3f} GiB used: {wall / taken:.2f} s and {cpu / taken:.2f} CPU-s per step")
    print(f"  in {taken} steps: {counts(worklog)}", flush=True)
    await engine.close(checkpoint=False)
    return records, held


def counts(worklog: Path) -> str:
    """Training copies sent away (one checkpoint each) and brought back, references read again, steps redone."""
    events = [json.loads(line) for line in worklog.read_text().splitlines()]
    seen = Counter(event["event"] for event in events)
    references = sum(event["event"] == "restore" and event["step"] == 0 for event in events)
    return (
        f"{seen['checkpoint']} evictions of a run in training, {seen['restore'] - references} restores of one, "
        f"{references} of a reference, {seen['redo']} steps redone"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=4, help="of each run, that count")
    parser.add_argument("--completions", type=int, default=8, help="of each of 4 prompts")
    options = parser.parse_args()
    shape = Shape(completions=options.completions)
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        model = found_model(options.model) if options.model else build_tiny_model(Path(folder) / "tiny", seed=0)
        ends, gib = {}, 0.0
        for case in ("room for both", "room for one"):
            (Path(folder) / case).mkdir()
            # of 9 copies of the weights, 4 for each run in training and 1 for the reference, a run needs 5
            room = "auto" if not gib else 0.6 * gib
            ends[case], gib = asyncio.run(
                take_turns(model, Path(folder) / case, steps=options.steps, gib=room, shape=shape)
            )
    both, one = ({run: (r.state, r.weights_digest) for run, r in records.items()} for records in ends.values())
    assert both == one, f"the cases ended with other weights: {both} and {one}"
    digests = {digest for _, digest in both.values()}
    assert None not in digests and len(digests) == len(RUNS), "the weights stood still, or one run is the other's copy"
    print("weights digests of both cases:", ", ".join(f"{run} {digest[:16]}" for run, (_, digest) in both.items()))


if __name__ == "__main__":
    main()
