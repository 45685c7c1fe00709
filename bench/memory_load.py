"""Measures by how much the resident memory of a DeepSpeed rank grows at most while it loads a model.

    python bench/memory_load.py [MODEL FOLDER]        (default .ostinato/models/smollm2-135m-instruct)

Each line is measured with two new ranks on this CPU. The ranks run in the environment of a trainer, except that glibc
allocates every large tensor separately (MALLOC_MMAP_THRESHOLD_), so that gaps in the heap do not count. Each rank first
loads a small model, which imports all modules. The peak is the kernel's (VmHWM), so none is missed. It includes the
pages of mapped files.

The bench prints the peak in MiB and in units of 2P bytes, which is the size of the model in bfloat16; the memory that
the rank keeps; and what `ostinato engine plan` computes for the start, without the process itself.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from bench.memory_plan import MODEL, status
from engine.backends.deepspeed.ranks import RankTrainers
from engine.cluster.rank_group import RankGroup
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import Machine, Workload
from engine.memory_plan.shape import ModelShape, read_shape
from engine.specs.engine import LocalEngineSpec

RANKS = 2
CASES = [*product(("bfloat16", "float32"), (0, 1, 2, 3))]
"""(compute dtype, ZeRO stage)"""
TARGET = "bench.memory_load:MeasuredRank"
CLEAR_PEAK = "5"
"""Written to /proc/self/clear_refs, it resets VmHWM."""
BUCKET_MIB = 16


class MeasuredRank(RankTrainers):
    """A rank that measures its memory while it loads a model."""

    def measure_load(self, small: Path, folder: Path) -> tuple[int, int, int]:
        """Returns the resident bytes (before, peak, after) of the rank that grew most. Called on all ranks."""
        import torch.distributed as dist

        self.load(1, small)
        self.free(1)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        self.load(2, folder)
        mine = (before, status("VmHWM"), status("VmRSS"))
        of_all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all_ranks, mine)
        return max(of_all_ranks, key=lambda sizes: sizes[1] - sizes[0])


def options(stage: int, dtype: str) -> dict[str, Any]:
    from engine.backends.deepspeed.options import RankOptions
    from engine.specs.engine import DeepSpeedSpec

    spec = DeepSpeedSpec(ranks=RANKS, zero_stage=stage, bucket_mib=BUCKET_MIB)  # type: ignore[arg-type]
    rank_options = RankOptions(trainer=spec, compute_dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    return rank_options.model_dump(mode="json")


def main() -> None:
    from engine.backends.torch.tiny import build_tiny_model

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else MODEL).resolve()
    shape = read_shape(folder)
    unit = 2 * shape.parameters
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small"
        build_tiny_model(small, seed=1)
        for dtype, stage in CASES:
            environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            chosen = options(stage, dtype)
            group = RankGroup(TARGET, chosen, ranks=RANKS, start_seconds=300, hang_seconds=300, environment=environment)
            try:
                before, peak, after = group.call("measure_load", small, folder)
            finally:
                group.close()
            growth = peak - before
            planned = planned_bytes(shape, stage, dtype)
            print(
                f"zero {stage} x {RANKS} {dtype:9} peak {growth / 2**20:6.0f} MiB = "
                f"{growth / unit:5.2f} x 2P   kept {(after - before) / unit:5.2f}   planned "
                f"{planned / unit:5.2f}   planned / peak {planned / growth:5.3f}",
                flush=True,
            )


def planned_bytes(shape: ModelShape, stage: int, dtype: str) -> float:
    """Returns the bytes that the memory plan computes for the start of one rank."""
    trainer = {"kind": "deepspeed", "ranks": RANKS, "zero_stage": stage, "bucket_mib": BUCKET_MIB}
    spec = LocalEngineSpec.model_validate({"device": "cpu", "compute_dtype": dtype, "trainer": trainer})
    (load,) = plan_memory(spec, Workload(shape, context=512, frozen=0), Machine.cpu(64 << 30)).pools
    left_out = ("runtime", "sampler", "kv")
    return sum(part.bytes.get("start", 0.0) for part in load.parts if part.key not in left_out) / RANKS


if __name__ == "__main__":
    main()
