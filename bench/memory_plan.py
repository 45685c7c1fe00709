"""Compares the memory plan with the memory that SFT updates of the torch trainer take on this CPU.

    python bench/memory_plan.py [MODEL FOLDER]        (default .ostinato/models/smollm2-135m-instruct)

Each line is measured in a new process. The process imports torch and reads its resident memory. Then it loads the model
and makes two updates of two micro-batches each, in which every token is trained. With a sampler, it also decodes 16
rows.

Each case is measured twice. In "process", glibc keeps a heap with gaps, as it does by default. In "tensors", it
allocates every large tensor separately, so that there are no gaps: the plan counts tensors only. The bench prints the
growth of the peak resident memory (the kernel's VmHWM), what `engine.memory_plan.plan` computes for it, and their
ratio.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.backends.protocol import sync
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import PHASES, Machine, Workload
from engine.memory_plan.shape import ModelShape, read_shape
from engine.specs.engine import LocalEngineSpec

MODEL = ".ostinato/models/smollm2-135m-instruct"
SEQUENCE = 512
ROWS = 16
NEW_TOKENS = 64
CASES = [
    ("float32", 512, False),
    ("float32", 1024, False),
    ("float32", 1024, True),
    ("bfloat16", 512, False),
    ("bfloat16", 1024, False),
    ("bfloat16", 1024, True),
]
"""(compute dtype, tokens per forward pass, with a sampler)"""
ARMS = {"tensors": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "process": {}}
"""Environments of the measured process: without and with gaps in glibc's heap."""


def status(field: str) -> int:
    """Returns the bytes of one field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def planned_bytes(shape: ModelShape, dtype: str, tokens: int, *, sampler: bool) -> float:
    """Returns the bytes that the plan computes for the measured parts: all parts except the process itself."""
    spec = LocalEngineSpec.model_validate(
        {"device": "cpu", "compute_dtype": dtype, "max_tokens_per_forward": tokens, "max_rows": ROWS, "threads": 1}
    )
    work = Workload(shape, context=SEQUENCE // 4 + NEW_TOKENS, frozen=0)
    plan = plan_memory(spec, work, Machine.cpu(64 << 30))
    left_out = ("runtime",) if sampler else ("runtime", "sampler", "kv")
    parts = [part for part in plan.pools[0].parts if part.key not in left_out]
    phase_bytes = []
    for phase in PHASES:
        phase_bytes.append(sum(part.bytes.get(phase, 0) for part in parts))
    return max(phase_bytes)


def measure(folder: Path, dtype: str, tokens: int, *, sampler: bool) -> None:
    """Measures one case in this process, and prints its line."""
    # these imports must not count, so they come before the first reading
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401 - part of the process, not of the model

    from engine.backends.protocol import Objective
    from engine.backends.torch.loading import load_model
    from engine.backends.torch.trainer import TorchTrainer
    from engine.backends.torch.trainer_samplers import WholeModelSampler
    from engine.losses.likelihood import CrossEntropySpec
    from engine.models.samples import Sample
    from engine.protocol import SamplingParams
    from storage.chain.records import OptimizerSpec

    # load the model
    torch.set_num_threads(1)
    before = status("VmRSS")
    compute = getattr(torch, dtype)
    trainer = TorchTrainer(
        load_model(folder, dtype=torch.float32, compute_dtype=compute, device=torch.device("cpu"))
    )
    # reset the peak, which does not count what loading takes
    Path("/proc/self/clear_refs").write_text("5")
    if sampler:
        draws = WholeModelSampler(trainer, compute, max_rows=ROWS, max_prefill_tokens=tokens)

    # sample and train
    ids = [list(range(5 + n, 5 + n + SEQUENCE)) for n in range(2 * tokens // SEQUENCE)]
    samples = [Sample(i, [0.0] + [1.0] * (SEQUENCE - 1)) for i in ids]
    for _ in range(2):
        if sampler:
            params = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
            prompts = [sequence[: SEQUENCE // 4] for sequence in ids[:ROWS]]
            sync(draws, trainer, "state")
            draws.sample(prompts, list(range(len(prompts))), params)
        report = trainer.update(samples, Objective(CrossEntropySpec()), OptimizerSpec(lr=0.0), max_tokens=tokens)
        assert report.micro_batches == 2, report

    # compare
    measured = status("VmHWM") - before
    planned = planned_bytes(read_shape(folder), dtype, tokens, sampler=sampler)
    print(
        f"{dtype:9} {tokens:5} tokens {'with sampler' if sampler else '':12}  planned {planned / 2**30:6.2f} GiB  "
        f"measured {measured / 2**30:6.2f} GiB  planned / measured {planned / measured:5.3f}   "
        f"(process {before / 2**30:.2f})"
    )


def main() -> None:
    if len(sys.argv) > 2:
        return measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sampler=sys.argv[4] == "True")
    folder = sys.argv[1] if len(sys.argv) > 1 else MODEL
    for case in CASES:
        for arm, environment in ARMS.items():
            print(f"{arm:8}", end="", flush=True)
            command = [sys.executable, __file__, folder, *map(str, case)]
            subprocess.run(command, check=True, env=os.environ | environment)


if __name__ == "__main__":
    main()
