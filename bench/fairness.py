"""Measures how one engine divides its compute time among four runs, one of them greedy, and how long the others wait.

    python bench/fairness.py [--model FOLDER] [--seconds 30] [--steps 8]        (default model: a tiny one, made here)

The greedy run sends long generations from eight callers without a pause. There are two cases, each with and without
`deterministic`. In the first, the three modest runs compute logprobs from two callers each without a pause, so that
every run always has a waiting call; a fair share is a quarter. In the second, the modest runs take GRPO steps, one call
after the other, as a flow does.

The longest wait of a call is printed in units of the longest single call of the case, and as the number of calls of one
other run that began during the wait. `engine.local.queue` states what the queue guarantees. Seconds are wall seconds in
the engine's trainer lane, as the queue counts them. Shares of CPU seconds are printed, too, for a machine that
does other work.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo_work import Shape, grpo_step, new_policy, number, prompts_of, require_model

from engine.backends.torch.tiny import build_tiny_model
from engine.local.engine import LocalEngine
from engine.protocol import GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, PolicyRef

R = TypeVar("R")

GREEDY, MODEST = "greedy", ("modest-1", "modest-2", "modest-3")
GREEDY_CALLERS, MODEST_CALLERS = 8, 2
STEP = Shape(prompts=2, completions=4, prompt_tokens=40, new_tokens=16)
LONG = SamplingParams(max_new_tokens=128, min_new_tokens=128)


@dataclass(slots=True)
class Call:
    """One call in the trainer lane. Times are wall seconds; `cpu` is the CPU time of the thread."""

    run: str
    submitted: float
    begun: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def wait(self) -> float:
        return self.begun - self.submitted


class ObservedEngine(LocalEngine):
    """An engine that records the times of its calls."""

    def __init__(self, store_url: str, spec: LocalEngineSpec) -> None:
        super().__init__(store_url, spec)
        self.calls: list[Call] = []

    async def _compute(self, run: str, call: Callable[[], R]) -> R:
        times = Call(run, time.monotonic())

        def timed() -> R:
            times.begun, cpu = time.monotonic(), time.thread_time()
            try:
                return call()
            finally:
                times.ended, times.cpu = time.monotonic(), time.thread_time() - cpu
                self.calls.append(times)

        return await super()._compute(run, timed)


# -- what the runs do ----------------------------------------------------------------------------------------------


async def be_greedy(engine: ObservedEngine, policy: PolicyRef, caller: int) -> None:
    """Sends long generations until it is cancelled."""
    for turn in range(1 << 30):
        prompts = prompts_of(STEP, number(caller, turn))
        await engine.generate(GenerateRequest(policy, prompts, [number(caller, turn, p) for p in range(2)], LONG))


async def score(engine: ObservedEngine, policy: PolicyRef, caller: int) -> None:
    """Asks for logprobs of short sequences until it is cancelled."""
    for turn in range(1 << 30):
        prompts = prompts_of(STEP, number(policy.run, caller, turn))
        sequences = [TokenSequence(ids, [0.0] + [1.0] * (len(ids) - 1)) for ids in prompts]
        await engine.logprobs(LogprobsRequest(policy, sequences))


async def take_steps(engine: ObservedEngine, policy: PolicyRef, steps: int) -> None:
    start = policy
    for _ in range(steps):
        policy = (await grpo_step(engine, engine.store, policy, start, STEP)).policy


async def meanwhile(main: Awaitable[object], others: Iterable[Awaitable[None]]) -> None:
    """Waits for `main`, then cancels the others."""
    tasks = [asyncio.ensure_future(other) for other in others]
    try:
        await main
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def case(spec: LocalEngineSpec, model: Path, title: str, *, steps: int | None, seconds: float) -> None:
    """Runs one case on an engine and a store of its own, and prints its figures.

    With `steps` None, every run always has a waiting call, for `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        # one step of every run loads its weights and warms up its kernels
        engine = ObservedEngine(f"file://{folder}", spec)
        heads = {}
        for run in (GREEDY, *MODEST):
            policy = await new_policy(engine, model, run)
            await take_steps(engine, policy, 1)
            heads[run] = Chain.of(engine.store, policy).head()
        engine.calls.clear()
        # the counted part
        began = time.monotonic()
        greedy = [be_greedy(engine, heads[GREEDY], caller) for caller in range(GREEDY_CALLERS)]
        if steps is None:
            modest: list[Awaitable[None]] = []
            for run in MODEST:
                modest += [score(engine, heads[run], caller) for caller in range(MODEST_CALLERS)]
            await meanwhile(asyncio.sleep(seconds), [*greedy, *modest])
        else:
            work = asyncio.gather(*(take_steps(engine, heads[run], steps) for run in MODEST))
            await meanwhile(work, greedy)
        report(title, engine.calls, began)
        await engine.close(checkpoint=False)


# -- the figures ---------------------------------------------------------------------------------------------------


def report(title: str, calls: list[Call], began: float) -> None:
    """Prints the shares of the runs and their longest waits.

    Shares are counted while every run has work: until the first modest run sends its last call.
    """
    calls_of = {run: [call for call in calls if call.run == run] for run in (GREEDY, *MODEST)}
    last = min(max(call.submitted for call in calls_of[run]) for run in MODEST)
    window = [call for call in calls if began <= call.begun < last]
    longest = max(call.seconds for call in calls)
    print(f"{title}: {last - began:.0f} s, {len(window)} calls, the longest {longest:.2f} s")
    wall, cpu, count = Counter[str](), Counter[str](), Counter[str]()
    for call in window:
        wall[call.run] += call.seconds
        cpu[call.run] += call.cpu
        count[call.run] += 1
    for run, run_calls in calls_of.items():
        wait = max(run_calls, key=lambda call: call.wait)
        print(
            f"  {run:9} share {wall[run] / wall.total():6.1%} of wall, {cpu[run] / cpu.total():6.1%} of CPU seconds"
            f"   {count[run]:4} calls   longest wait {wait.wait / longest:5.2f} longest calls, "
            f"{overtakers(wait, calls)} of one other run"
        )


def overtakers(waiting: Call, calls: list[Call]) -> int:
    """Counts, for each other run, its calls that began while this one waited. Returns the largest count."""
    counts = Counter[str]()
    for call in calls:
        if call.run != waiting.run and waiting.submitted < call.begun < waiting.begun:
            counts[call.run] += 1
    return max(counts.values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--seconds", type=float, default=30, help="length of the case in which every run always waits")
    parser.add_argument("--steps", type=int, default=8, help="steps of each modest run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = require_model(options.model) if options.model else build_tiny_model(Path(folder) / "tiny", seed=0)
        for deterministic in (False, True):
            spec = LocalEngineSpec(device="cpu", deterministic=deterministic, threads=1)
            mode = "deterministic" if deterministic else "default"
            run = partial(case, spec, model, seconds=options.seconds)
            asyncio.run(run(f"{mode}, every run always waits", steps=None))
            asyncio.run(run(f"{mode}, the modest runs take steps", steps=options.steps))


if __name__ == "__main__":
    main()
