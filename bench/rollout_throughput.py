"""CPU-seconds of rollouts through our engine beside bare vLLM on the same prompts: vLLM in its process, or in replicas.

    .venv-vllm/bin/python bench/rollout_throughput.py [--model FOLDER] [--pairs 6] [--dtype float32] [--replicas 1]

One process, one vLLM engine, one run. Arm "engine" is LocalEngine.generate with `sampler.kind = "vllm"`: prompts
checked, requests spread and streamed to the listener that ends abandoned calls, completions assembled, and the live
weights proven afterwards. Arm "bare" is `LLM.generate` of the same vLLM engine with the same prompts, seeds and sampled
logprobs. A round is 8 prompts x 8 completions x 64 tokens, with new prompts each time; the arms' prefix caches are
apart, and the sync of the weights is no part of a round. Rounds alternate: A B, B A, A B, ... What counts is CPU time,
user and system, of the process; wall seconds are told too. The ratio of tokens per CPU-second, engine / bare, comes
with a 95 % bootstrap interval over the pairs. The goal is 0.90 at least. Arm "plain" is bare vLLM
without seeds, n=8: what per-request seeds cost vLLM itself.

With --replicas there is a fourth arm, "pool": a second engine whose vLLM runs in Ray actors. Its CPU time is that of
this process and of all processes below it, so that Ray's own are counted. At the end comes the time of one call to an
actor that only answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
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
from grpo_work import SMOLLM, Shape, found_model, new_policy, number, prompts_of

from engine.connect import connect
from engine.protocol import GenerateRequest, SamplingParams, TokenIds
from engine.specs.engine import LocalEngineSpec

ARMS = ["engine", "bare", "plain"]
CALLS = 500
"""To an actor, whose median time is printed."""
THREADS = 1
"""Of every arm: an idle OpenMP thread that spins would count as work."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one arm took for one set of prompts."""

    cpu: float
    wall: float
    tokens: list[TokenIds]
    parts: Counter[str]
    """CPU-seconds by the name of the process, where there are several."""


@dataclass(slots=True)
class Arms:
    """Three ways to the same vLLM engine, and a pool."""

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
        groups = prompts_of(self.shape, step)
        each = [prompt for prompt in groups for _ in range(self.shape.completions)]
        seeds = [number("completion", self.shape.seed, step, n) for n in range(len(each))]
        work: dict[str, Callable[[], list[TokenIds]]] = {
            "engine": lambda: self._engine(self.engine, self.policy, each, seeds),
            "pool": lambda: self._engine(self.pool, self.pool_policy, each, seeds),
            "bare": lambda: self._bare(each, seeds),
            "plain": lambda: self._plain(groups),
        }
        clock = cpu_by_process if arm == "pool" else cpu_of_this_process
        before, wall = clock(), time.perf_counter()
        tokens = work[arm]()
        wall = time.perf_counter() - wall
        # The time of looking at the other processes is no part of the round: this one is looked at last, and first now.
        after = cpu_of_this_process()
        after.update({name: cpu for name, cpu in clock().items() if name not in after})
        after.subtract(before)
        return Round(sum(after.values()), wall, tokens, after)

    def _engine(self, engine: Any, policy: Any, prompts: list[TokenIds], seeds: list[int]) -> list[TokenIds]:
        request = GenerateRequest(policy, prompts, seeds, self.sampling())
        return [completion.token_ids for completion in self.loop.run_until_complete(engine.generate(request))]

    def _bare(self, prompts: list[TokenIds], seeds: list[int]) -> list[TokenIds]:
        params = [self._params(seed=seed & ((1 << 63) - 1)) for seed in seeds]
        outputs = self._llm().generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _plain(self, prompts: list[TokenIds]) -> list[TokenIds]:
        salted = [{"prompt_token_ids": ids, "cache_salt": "plain"} for ids in prompts]
        outputs = self._llm().generate(salted, self._params(n=self.shape.completions), use_tqdm=False)
        return [list(completion.token_ids) for output in outputs for completion in output.outputs]

    def _params(self, **more: Any) -> Any:
        from vllm import SamplingParams as VllmParams

        tokens = self.shape.new_tokens
        return VllmParams(
            temperature=1.0, max_tokens=tokens, min_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True, **more
        )

    def _llm(self) -> Any:
        """The vLLM engine that our own engine samples with."""
        (shared,) = self.engine.samplers._runtimes.values()
        return shared.runtime._llm


def cpu_of_this_process() -> Counter[str]:
    return Counter({"this process": time.process_time()})  # type: ignore[dict-item]


def cpu_by_process() -> Counter[str]:
    """CPU-seconds of this process and of those below it."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        seconds[process.name()] += times.user + times.system  # type: ignore[assignment]
    return seconds + cpu_of_this_process()


def call_milliseconds(pool_engine: Any) -> list[float]:
    """Of calls to the first replica's actor that only answer, one after the other, in the pool's loop."""
    (shared,) = pool_engine.samplers._runtimes.values()
    runtime = shared.runtime

    async def call() -> list[float]:
        actor, seconds = runtime.replicas[0].running_actor(), []
        for _ in range(CALLS):
            began = time.perf_counter()
            await actor.call("check_health")
            seconds.append(time.perf_counter() - began)
        return [1000 * second for second in seconds]

    return runtime._thread.run(call())


def bootstrap(ratios: list[float], *, draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of the mean ratio, over resampled pairs."""
    dice = random.Random(0)
    means = sorted(statistics.fmean(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def measure(arms: Arms, pairs: int) -> None:
    names = arms.names
    for arm in names:  # the engine's first call also brings the weights to vLLM
        arms.run(arm, 0)
    results: dict[str, list[Round]] = {arm: [] for arm in names}
    for pair in range(pairs):
        for arm in names if pair % 2 == 0 else names[::-1]:
            results[arm].append(arms.run(arm, pair + 1))
        one, two = results["engine"][-1], results["bare"][-1]
        equal = sum(a == b for a, b in zip(one.tokens, two.tokens, strict=True))
        told = "   ".join(f"{arm} {results[arm][-1].cpu:.2f} CPU-s {results[arm][-1].wall:.2f} s" for arm in names)
        print(f"pair {pair:2}   {told}   equal completions {equal}/{len(one.tokens)}", flush=True)
    for arm, rounds in results.items():
        tokens = sum(len(ids) for done in rounds for ids in done.tokens)
        cpu, wall = (sum(getattr(done, what) for done in rounds) for what in ("cpu", "wall"))
        print(f"{arm}: {tokens / cpu:.1f} tokens per CPU-second, {tokens / wall:.1f} per second of wall time")
    compared = [("engine", "bare"), ("engine", "plain"), *([("pool", "bare")] if "pool" in names else [])]
    for arm, other in compared:
        for what in ("cpu", "wall"):
            pairs_of = zip(results[arm], results[other], strict=True)
            ratios = [getattr(theirs, what) / getattr(ours, what) for ours, theirs in pairs_of]
            low, high = bootstrap(ratios)
            mean = statistics.fmean(ratios)
            print(f"throughput {arm} / {other} by {what}: {mean:.4f}, 95 % CI {low:.4f} to {high:.4f}")
    if arms.pool is not None:
        parts = sum((done.parts for done in results["pool"]), Counter[str]())
        print("CPU-seconds of the pool:", ", ".join(f"{name} {cpu:.2f}" for name, cpu in parts.most_common()))
        calls = call_milliseconds(arms.pool)
        quantiles = statistics.quantiles(calls, n=20)
        print(f"a call to an actor: median {statistics.median(calls):.2f} ms, 95th percentile {quantiles[-1]:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM, help="a Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--replicas", type=int, default=0, help="of the arm that samples with a pool; 0: no such arm")
    options = parser.parse_args()
    found_model(options.model)
    torch.set_num_threads(THREADS)  # OpenMP counts per thread: the bare arms compute in this one, the engine in its own
    shape = Shape(prompts=options.prompts, completions=options.completions, new_tokens=options.tokens)
    sampler = {"kind": "vllm", "max_context": 512}
    engine_keys = {"device": "cpu", "threads": THREADS, "compute_dtype": options.dtype}
    spec = LocalEngineSpec.model_validate(engine_keys | {"sampler": sampler})
    pool_spec = LocalEngineSpec.model_validate(engine_keys | {"sampler": sampler | {"replicas": options.replicas}})
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        loop = asyncio.new_event_loop()
        engine = connect(f"file://{folder}", spec)
        policy = loop.run_until_complete(new_policy(engine, options.model.resolve(), "bench"))
        arms = Arms(loop, engine, policy, shape)
        if options.replicas:
            arms.pool = connect(f"file://{folder}/pool", pool_spec)
            arms.pool_policy = loop.run_until_complete(new_policy(arms.pool, options.model.resolve(), "bench"))
        try:
            measure(arms, options.pairs)
        finally:
            for opened in (arms.pool, engine):
                if opened is not None:
                    loop.run_until_complete(opened.close())
            loop.close()


if __name__ == "__main__":
    main()
