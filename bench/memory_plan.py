"""The memory plan beside the memory a process really takes: SFT updates of the torch trainer on this CPU.

    python bench/memory_plan.py [MODEL FOLDER]        (default .ostinato/models/smollm2-135m-instruct)

A process of its own for each line: it imports torch, loads nothing, notes its resident memory, then loads the model and
makes two updates of two micro-batches each, whose every token is trained; with a sampler also a call that decodes 16
rows. Once with the gaps of the C library's heap, as a process is started ("process"), and once without ("tensors"): the
plan counts tensors. Printed: the highest resident memory less what it was before the model, what
`engine.memory_plan.plan` says of the same, and plan / measured. Peaks are the kernel's own (VmHWM), so none is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import PHASES, Machine, Workload
from engine.memory_plan.shape import ModelShape, read_shape
from engine.specs.engine import LocalEngineSpec

MODEL = ".ostinato/models/smollm2-135m-instruct"
SEQUENCE = 512
ROWS = 16
NEW_TOKENS = 64
CASES = [
    (dtype, tokens, sampler)
    for dtype in ("float32", "bfloat16")
    for tokens, sampler in ((512, False), (1024, False), (1024, True))
]
ARMS = {"tensors": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "process": {}}
"""Environments: glibc gives every large tensor pages of its own, which it returns; or it keeps a heap, with gaps."""


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def planned(shape: ModelShape, dtype: str, tokens: int, *, sampler: bool) -> float:
    """Bytes that the plan gives to what is measured: every part but the process itself."""
    spec = LocalEngineSpec.model_validate(
        {"device": "cpu", "compute_dtype": dtype, "max_tokens_per_forward": tokens, "max_rows": ROWS, "threads": 1}
    )
    work = Workload(shape, context=SEQUENCE // 4 + NEW_TOKENS, frozen=0)
    plan = plan_memory(spec, work, Machine.cpu(64 << 30))
    left_out = ("runtime",) if sampler else ("runtime", "sampler", "kv")
    parts = [part for part in plan.pools[0].parts if part.key not in left_out]
    return max(sum(part.bytes.get(phase, 0) for part in parts) for phase in PHASES)


def measure(folder: Path, dtype: str, tokens: int, *, sampler: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401 - part of the process, not of the model

    from engine.backends.protocol import Objective
    from engine.backends.torch.causal_lm import CausalLM, frozen_copy
    from engine.backends.torch.loading import load_model
    from engine.backends.torch.sampler import TorchSampler
    from engine.backends.torch.trainer import TorchTrainer
    from engine.losses.likelihood import CrossEntropySpec
    from engine.models.samples import Sample
    from engine.protocol import SamplingParams
    from storage.chain.records import OptimizerSpec

    torch.set_num_threads(1)
    before = status("VmRSS")
    compute = getattr(torch, dtype)
    trainer = TorchTrainer(
        load_model(folder, dtype=torch.float32, compute_dtype=compute, device=torch.device("cpu"))
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is not asked for
    if sampler:
        model = trainer.model
        if compute != torch.float32:
            model = CausalLM(frozen_copy(model.module, compute), compute_dtype=compute)
        draws = TorchSampler(model, max_rows=ROWS, max_tokens=tokens)
    ids = [list(range(5 + n, 5 + n + SEQUENCE)) for n in range(2 * tokens // SEQUENCE)]
    samples = [Sample(i, [0.0] + [1.0] * (SEQUENCE - 1)) for i in ids]
    for _ in range(2):
        if sampler:
            params = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
            draws.sample([i[: SEQUENCE // 4] for i in ids[:ROWS]], list(range(len(ids[:ROWS]))), params)
        report = trainer.update(samples, Objective(CrossEntropySpec()), OptimizerSpec(lr=0.0), max_tokens=tokens)
        assert report.micro_batches == 2, report
    taken, wanted = status("VmHWM") - before, planned(read_shape(folder), dtype, tokens, sampler=sampler)
    print(
        f"{dtype:9} {tokens:5} tokens {'with sampler' if sampler else '':12}  planned {wanted / 2**30:6.2f} GiB  "
        f"measured {taken / 2**30:6.2f} GiB  planned / measured {wanted / taken:5.3f}   (process {before / 2**30:.2f})"
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
