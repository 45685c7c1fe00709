"""Compares the CPU-seconds of rollouts through our engine with those of bare vLLM on the same prompts.

    .venv-vllm/bin/python bench/rollout_throughput.py [--model FOLDER] [--pairs 6] [--dtype float32] [--replicas 1]

There is one process, one vLLM engine and one run.

- The arm "engine" is LocalEngine.generate with `sampler.kind = "vllm"`. It checks the prompts, sends the requests, ends
  abandoned calls, assembles the completions, and then proves the live weights.
- The arm "bare" is `LLM.generate` of the same vLLM engine with the same prompts, seeds and sampled logprobs.
- The arm "plain" is bare vLLM without seeds, with n=8. It shows what per-request seeds cost vLLM itself.
- With --replicas, the arm "pool" is a second engine whose vLLM runs in Ray actors. Its CPU time is that of this process
  and all its child processes, so that Ray's processes count, too. At the end, the bench measures a call to an actor
  that does nothing else.

A round is 8 prompts x 8 completions x 64 tokens, with new prompts each time. The arms have separate prefix caches, and
the sync of the weights is not part of a round. Rounds alternate: A B, B A, A B, ... The bench prints the user and
system time of the process, and wall seconds. The ratio of tokens per CPU-second, engine / bare, has a 95 % bootstrap
interval over the pairs. The goal is at least 0.90.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from grpo_work import SMOLLM, Shape, bootstrap_interval, new_policy, number, prompts_of, require_model

from engine.protocol import GenerateRequest, SamplingParams, TokenIds
from engine.specs.engine import LocalEngineSpec
from engine.workspace import connect

ARMS = ["engine", "bare", "plain"]
CALLS = 500
"""Number of calls to an actor, whose median time is printed."""
THREADS = 1
"""Threads of every arm. An idle OpenMP thread spins, which would count as work."""


@dataclass(frozen=True, slots=True)
class Round:
    """The time that one arm took for one set of prompts."""

    cpu: float
    """Seconds of all counted processes."""
    wall: float
    """Seconds."""
    tokens: list[TokenIds]
    parts: Counter[str]
    """CPU-seconds by the name of the process."""


@dataclass(slots=True)
class Arms:
    """The arms: three ways to use the same vLLM engine, and optionally a pool of replicas."""

    loop: asyncio.AbstractEventLoop
    engine: Any
    policy: Any
    shape: Shape
    pool: Any = None
    """An engine whose vLLM runs in replicas, and its policy."""
    pool_policy: Any = None

    @property
    def names(self) -> list[str]:
        return ARMS if self.pool is None else [*ARMS, "pool"]

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.shape.new_tokens, min_new_tokens=self.shape.new_tokens)

    def run(self, arm: str, step: int) -> Round:
        """Samples the completions of one step by one arm, and measures the time."""
        # one prompt and one seed for each completion
        groups = prompts_of(self.shape, step)
        each: list[TokenIds] = []
        for prompt in groups:
            each += [prompt] * self.shape.completions
        seeds = [number("completion", self.shape.seed, step, n) for n in range(len(each))]
        work: dict[str, Callable[[], list[TokenIds]]] = {
            "engine": lambda: self._engine(self.engine, self.policy, each, seeds),
            "pool": lambda: self._engine(self.pool, self.pool_policy, each, seeds),
            "bare": lambda: self._bare(each, seeds),
            "plain": lambda: self._plain(groups),
        }
        # sample
        clock = cpu_by_process if arm == "pool" else cpu_of_this_process
        before, wall = clock(), time.perf_counter()
        tokens = work[arm]()
        wall = time.perf_counter() - wall
        # reading the times of the other processes must not count: before the round this process was read last, so it is
        # read first now
        after = cpu_of_this_process()
        after.update({name: cpu for name, cpu in clock().items() if name not in after})
        after.subtract(before)
        return Round(sum(after.values()), wall, tokens, after)

    def _engine(self, engine: Any, policy: Any, prompts: list[TokenIds], seeds: list[int]) -> list[TokenIds]:
        request = GenerateRequest(policy, prompts, seeds, self.sampling())
        return [completion.token_ids for completion in self.loop.run_until_complete(engine.generate(request))]

    def _bare(self, prompts: list[TokenIds], seeds: list[int]) -> list[TokenIds]:
        # vLLM takes seeds of 63 bits
        params = [self._params(seed=seed & ((1 << 63) - 1)) for seed in seeds]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm().generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _plain(self, prompts: list[TokenIds]) -> list[TokenIds]:
        salted = [{"prompt_token_ids": ids, "cache_salt": "plain"} for ids in prompts]
        outputs = self._llm().generate(salted, self._params(n=self.shape.completions), use_tqdm=False)
        completions: list[TokenIds] = []
        for output in outputs:
            completions += [list(completion.token_ids) for completion in output.outputs]
        return completions

    def _params(self, **more: Any) -> Any:
        from vllm import SamplingParams as VllmParams

        tokens = self.shape.new_tokens
        return VllmParams(
            temperature=1.0, max_tokens=tokens, min_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True, **more
        )

    def _llm(self) -> Any:
        """Returns the vLLM engine with which our engine samples."""
        (shared,) = self.engine.samplers._runtimes.values()
        return shared.ensure_running()._llm


def cpu_of_this_process() -> Counter[str]:
    return Counter({"this process": time.process_time()})  # type: ignore[dict-item]


def cpu_by_process() -> Counter[str]:
    """Returns the CPU-seconds of this process and of all its child processes."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        seconds[process.name()] += times.user + times.system  # type: ignore[assignment]
    return seconds + cpu_of_this_process()


def call_milliseconds(pool_engine: Any) -> list[float]:
    """Returns the times of successive calls to the actor of the first replica. The calls only reply."""
    (shared,) = pool_engine.samplers._runtimes.values()
    runtime = shared.ensure_running()

    async def call() -> list[float]:
        actor, seconds = runtime.replicas[0].running_actor(), []
        for _ in range(CALLS):
            began = time.perf_counter()
            await actor.call("check_health")
            seconds.append(time.perf_counter() - began)
        return [1000 * second for second in seconds]

    return runtime._thread.run(call())


def measure(arms: Arms, pairs: int) -> dict[str, list[Round]]:
    """Runs the rounds of all arms in alternating order, and prints the figures. Returns the rounds of each arm."""
    # warm up: the engine's first call also syncs the weights to vLLM
    names = arms.names
    for arm in names:
        arms.run(arm, 0)

    # the counted rounds
    results: dict[str, list[Round]] = {arm: [] for arm in names}
    for pair in range(pairs):
        for arm in names if pair % 2 == 0 else names[::-1]:
            results[arm].append(arms.run(arm, pair + 1))
        engine_tokens, bare_tokens = results["engine"][-1].tokens, results["bare"][-1].tokens
        equal = sum(ours == theirs for ours, theirs in zip(engine_tokens, bare_tokens, strict=True))
        times = "   ".join(f"{arm} {results[arm][-1].cpu:.2f} CPU-s {results[arm][-1].wall:.2f} s" for arm in names)
        print(f"pair {pair:2}   {times}   equal completions {equal}/{len(engine_tokens)}", flush=True)

    # tokens per second of each arm
    for arm, rounds in results.items():
        tokens = 0
        for arm_round in rounds:
            tokens += sum(map(len, arm_round.tokens))
        cpu = sum(arm_round.cpu for arm_round in rounds)
        wall = sum(arm_round.wall for arm_round in rounds)
        print(f"{arm}: {tokens / cpu:.1f} tokens per CPU-second, {tokens / wall:.1f} per second of wall time")

    # ratios of two arms
    compared = [("engine", "bare"), ("engine", "plain")]
    if "pool" in names:
        compared.append(("pool", "bare"))
    for arm, other in compared:
        for clock in ("cpu", "wall"):
            round_pairs = zip(results[arm], results[other], strict=True)
            ratios = [getattr(theirs, clock) / getattr(ours, clock) for ours, theirs in round_pairs]
            low, high = bootstrap_interval(ratios)
            mean = statistics.fmean(ratios)
            print(f"throughput {arm} / {other} by {clock}: {mean:.4f}, 95 % CI {low:.4f} to {high:.4f}")

    # the processes of the pool, and a call to one of its actors
    if arms.pool is not None:
        parts = sum((arm_round.parts for arm_round in results["pool"]), Counter[str]())
        print("CPU-seconds of the pool:", ", ".join(f"{name} {cpu:.2f}" for name, cpu in parts.most_common()))
        calls = call_milliseconds(arms.pool)
        quantiles = statistics.quantiles(calls, n=20)
        print(f"a call to an actor: median {statistics.median(calls):.2f} ms, 95th percentile {quantiles[-1]:.2f} ms")
    return results


def save_rounds(results: dict[str, list[Round]], shape: Shape, path: Path) -> None:
    """Writes the rounds of the engine and of bare vLLM as a result of bench/speed. Both ran in this process."""
    from bench.speed.report import result_of, save
    from bench.speed.turns import Turn, peak_gb

    turns: dict[str, list[Turn]] = {}
    for arm, name in (("engine", "ostinato"), ("bare", "vLLM")):
        turns[name] = []
        for measured in results[arm]:
            turns[name].append(Turn(sum(map(len, measured.tokens)), measured.cpu, measured.wall, peak_gb()))
    rows = shape.prompts * shape.completions
    save(result_of(path.stem, f"rollout with vLLM, {rows} x {shape.new_tokens} tokens", turns), path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM, help="a Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="JSON file for the figures, as bench/speed writes them")
    parser.add_argument("--replicas", type=int, default=0, help='replicas of the arm "pool"; 0: no such arm')
    options = parser.parse_args()
    require_model(options.model)
    # OpenMP's setting is per thread: the bare arms compute in this thread, the engine in its own
    torch.set_num_threads(THREADS)
    shape = Shape(prompts=options.prompts, completions=options.completions, new_tokens=options.tokens)
    sampler = {"kind": "vllm", "max_context": 512}
    engine_keys = {"device": "cpu", "threads": THREADS, "compute_dtype": options.dtype}
    spec = LocalEngineSpec.model_validate(engine_keys | {"sampler": sampler})
    pool_spec = LocalEngineSpec.model_validate(engine_keys | {"sampler": sampler | {"replicas": options.replicas}})
    # the engines of the arms, all on one event loop
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        loop = asyncio.new_event_loop()
        engine = connect(f"file://{folder}", spec)
        policy = loop.run_until_complete(new_policy(engine, options.model.resolve(), "bench"))
        arms = Arms(loop, engine, policy, shape)
        if options.replicas:
            arms.pool = connect(f"file://{folder}/pool", pool_spec)
            arms.pool_policy = loop.run_until_complete(new_policy(arms.pool, options.model.resolve(), "bench"))
        try:
            results = measure(arms, options.pairs)
        finally:
            for opened in (arms.pool, engine):
                if opened is not None:
                    loop.run_until_complete(opened.close())
            loop.close()
    if options.out:
        save_rounds(results, shape, options.out)


if __name__ == "__main__":
    main()
