"""Seconds of a weight sync from DeepSpeed ranks to one vLLM replica, by the number of ranks.

    PYTHONPATH=. .venv-vllm/bin/python bench/rank_sync.py --ranks 1 2

Trainer and replica compute on the CPU, and the weights go by `transport="nccl"`, which uses gloo here. The model is a
random Llama in bfloat16. A sync is what `VllmSampler` does: `stage` (the weights leave the trainer, with their digests
and the logprobs of the probes) and `load` (they arrive, are compared and read back, and the probes are scored).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.backends.deepspeed.backend import DeepSpeedBackend
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.vllm.backend import VllmSamplers
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec


def measure(folder: Path, *, ranks: int, stage: int, syncs: int) -> tuple[float, float, float]:
    """Median seconds of (`stage`, `load`, of it what the workers spent on receiving and on vLLM's load), without the
    first sync, which forms the group."""
    spec = LocalEngineSpec(
        trainer=DeepSpeedSpec(ranks=ranks, zero_stage=stage),  # type: ignore[arg-type]
        sampler=VllmSpec(replicas=1, transport="nccl", max_context=512, kv_cache_gib=0.25, start_seconds=600),
        device="cpu", compute_dtype="bfloat16", threads=1,
    )  # fmt: skip
    trainers = DeepSpeedBackend(spec)
    samplers = VllmSamplers(spec, compute_dtype=torch.bfloat16, device=torch.device("cpu"))
    try:
        trainer = trainers.load(folder)
        sampler = samplers.new_sampler(trainer)
        seconds = []
        for number in range(syncs + 1):
            began = time.perf_counter()
            staged = sampler.stage(trainer, f"state-{number}")
            between = time.perf_counter()
            sampler.load(staged)
            ended = time.perf_counter()
            staged.close()
            seconds.append((between - began, ended - between, sampler.seconds["receive"] + sampler.seconds["load"]))
        staging, loading, workers = zip(*seconds[1:], strict=True)
        return statistics.median(staging), statistics.median(loading), statistics.median(workers)
    finally:
        samplers.close()
        trainers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stage", type=int, default=3, help="trainer.zero_stage")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rank-sync-") as scratch:
        folder = build_tiny_model(Path(scratch, "model"), seed=0, hidden=chosen.hidden, layers=chosen.layers)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2
        print(f"{size / 1e6:,.0f} MB of bfloat16 weights, zero_stage={chosen.stage}")
        print("| ranks | stage s | load s | of it, the worker's s | sync s |", "|---|---|---|---|---|", sep="\n")
        for ranks in chosen.ranks:
            staging, loading, worker = measure(folder, ranks=ranks, stage=chosen.stage, syncs=chosen.syncs)
            print(f"| {ranks} | {staging:.2f} | {loading:.2f} | {worker:.2f} | {staging + loading:.2f} |", flush=True)


if __name__ == "__main__":
    main()
