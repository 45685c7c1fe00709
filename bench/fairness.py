"""Shares of one engine among four runs, one of them greedy, and how long the others wait.

    python bench/fairness.py [--model FOLDER] [--seconds 30] [--steps 8]        (default model: a tiny one, made here)

The greedy run sends long generations from eight callers without pause. Two cases, each with and without
`deterministic`: the three modest runs score sequences from two callers without pause, so that everyone always waits
(fair is a quarter each); or they take GRPO steps, one call after the other, as a flow does. A call's wait is given in
units of the longest single call of the case, and as the calls of one other run that began meanwhile, greedy or modest.
`engine.local.queue` says what it promises. Seconds are wall, as the queue counts them, in the one compute thread;
shares of CPU seconds stand beside them, for a machine that has other work.
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

from grpo_work import Shape, found_model, grpo_step, new_policy, number, prompts_of

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
    """One call in the compute thread. Times are wall seconds but `cpu`, the thread's own seconds."""

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


class Observed(LocalEngine):
    """Keeps the times of its calls."""

    def __init__(self, store_url: str, spec: LocalEngineSpec) -> None:
        super().__init__(store_url, spec)
        self.calls: list[Call] = []

    async def _compute(self, run: str, call: Callable[[], R]) -> R:
        seen = Call(run, time.monotonic())

        def timed() -> R:
            seen.begun, cpu = time.monotonic(), time.thread_time()
            try:
                return call()
            finally:
                seen.ended, seen.cpu = time.monotonic(), time.thread_time() - cpu
                self.calls.append(seen)

        return await super()._compute(run, timed)


# -- what the runs do ----------------------------------------------------------------------------------------------


async def be_greedy(engine: Observed, policy: PolicyRef, caller: int) -> None:
    """Long generations until cancelled."""
    for turn in range(1 << 30):
        prompts = prompts_of(STEP, number(caller, turn))
        await engine.generate(GenerateRequest(policy, prompts, [number(caller, turn, p) for p in range(2)], LONG))


async def score(engine: Observed, policy: PolicyRef, caller: int) -> None:
    """Logprobs of short sequences until cancelled."""
    for turn in range(1 << 30):
        prompts = prompts_of(STEP, number(policy.run, caller, turn))
        sequences = [TokenSequence(ids, [0.0] + [1.0] * (len(ids) - 1)) for ids in prompts]
        await engine.logprobs(LogprobsRequest(policy, sequences))


async def take_steps(engine: Observed, policy: PolicyRef, steps: int) -> None:
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
    """One case on an engine and a store of its own. `steps` None: everyone always waits, for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        engine = Observed(f"file://{folder}", spec)
        policies = {run: await new_policy(engine, model, run) for run in (GREEDY, *MODEST)}
        for policy in policies.values():  # every run has its weights in memory, and its kernels warm
            await take_steps(engine, policy, 1)
        heads = {run: Chain.of(engine.store, policy).head() for run, policy in policies.items()}
        engine.calls.clear()
        began = time.monotonic()
        greedy = [be_greedy(engine, heads[GREEDY], caller) for caller in range(GREEDY_CALLERS)]
        if steps is None:
            busy = [score(engine, heads[run], caller) for run in MODEST for caller in range(MODEST_CALLERS)]
            await meanwhile(asyncio.sleep(seconds), [*greedy, *busy])
        else:
            work = asyncio.gather(*(take_steps(engine, heads[run], steps) for run in MODEST))
            await meanwhile(work, greedy)
        report(title, engine.calls, began)
        await engine.close(checkpoint=False)


# -- the figures ---------------------------------------------------------------------------------------------------


def report(title: str, calls: list[Call], began: float) -> None:
    """Shares while every run still had work: until the first modest run sent its last call."""
    last = min(max(call.submitted for call in calls if call.run == run) for run in MODEST)
    window = [call for call in calls if began <= call.begun < last]
    longest = max(call.seconds for call in calls)
    print(f"{title}: {last - began:.0f} s, {len(window)} calls, the longest {longest:.2f} s")
    wall, cpu, count = Counter[str](), Counter[str](), Counter[str]()
    for call in window:
        wall[call.run] += call.seconds
        cpu[call.run] += call.cpu
        count[call.run] += 1
    for run in (GREEDY, *MODEST):
        own = [call for call in calls if call.run == run]
        wait = max(own, key=lambda call: call.wait)
        print(
            f"  {run:9} share {wall[run] / wall.total():6.1%} of wall, {cpu[run] / cpu.total():6.1%} of CPU seconds"
            f"   {count[run]:4} calls   longest wait {wait.wait / longest:5.2f} longest calls, "
            f"{overtakers(wait, calls)} of one other run"
        )


def overtakers(waiting: Call, calls: list[Call]) -> int:
    """Calls of the other run that began most often while this one waited."""
    began = Counter(c.run for c in calls if waiting.submitted < c.begun < waiting.begun and c.run != waiting.run)
    return max(began.values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--seconds", type=float, default=30, help="of the case in which everyone always waits")
    parser.add_argument("--steps", type=int, default=8, help="of each modest run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = found_model(options.model) if options.model else build_tiny_model(Path(folder) / "tiny", seed=0)
        for deterministic in (False, True):
            spec = LocalEngineSpec(device="cpu", deterministic=deterministic, threads=1)
            mode = "deterministic" if deterministic else "default"
            run = partial(case, spec, model, seconds=options.seconds)
            asyncio.run(run(f"{mode}, everyone always waits", steps=None))
            asyncio.run(run(f"{mode}, the modest take steps", steps=options.steps))


if __name__ == "__main__":
    main()
