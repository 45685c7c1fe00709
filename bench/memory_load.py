"""What a rank of the deepspeed trainer takes while it loads a model: the highest resident memory, less what it was.

    python bench/memory_load.py [MODEL FOLDER]        (default .ostinato/models/smollm2-135m-instruct)

Two ranks on this CPU, started for each line, in the same environment as a trainer's but with glibc giving every large
tensor pages of its own (MALLOC_MMAP_THRESHOLD_), so that tensors are counted and not the gaps of a heap. Each rank has
loaded a small model before, which imports everything. Peaks are the kernel's own (VmHWM): none is missed, and pages of
files that are mapped count too. Printed: MiB, and in units of 2P bytes, which is the model in bfloat16; what the rank
keeps; and what `engine plan` says of its start, the process itself left out.
"""

from __future__ import annotations

import sys
import tempfile
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
CASES = [(stage, dtype) for dtype in ("bfloat16", "float32") for stage in (0, 1, 2, 3)]
TARGET = "bench.memory_load:Measured"
CLEAR_PEAK = "5"
BUCKET_MIB = 16


class Measured(RankTrainers):
    """A rank that says what loading took."""

    def take(self, small: Path, folder: Path) -> tuple[int, int, int]:
        """Bytes: before, at most, after; of the rank that took most. Called on all ranks."""
        import torch.distributed as dist

        self.load(1, small)
        self.free(1)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        self.load(2, folder)
        mine = (before, status("VmHWM"), status("VmRSS"))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return max(found, key=lambda one: one[1] - one[0])


def options(stage: int, dtype: str) -> dict[str, Any]:
    from engine.backends.deepspeed.options import ZeroOptions
    from engine.specs.trainer import DeepSpeedSpec

    spec = DeepSpeedSpec(ranks=RANKS, zero_stage=stage, bucket_mib=BUCKET_MIB)  # type: ignore[arg-type]
    made = ZeroOptions(trainer=spec, compute_dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    return made.model_dump(mode="json")


def main() -> None:
    from engine.backends.torch.tiny import build_tiny_model

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else MODEL).resolve()
    shape = read_shape(folder)
    unit = 2 * shape.parameters
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small"
        build_tiny_model(small, seed=1)
        for stage, dtype in CASES:
            environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            chosen = options(stage, dtype)
            group = RankGroup(TARGET, chosen, ranks=RANKS, start_seconds=300, hang_seconds=300, environment=environment)
            try:
                before, peak, after = group.call("take", small, folder)
            finally:
                group.close()
            wanted = planned(shape, stage, dtype)
            print(
                f"zero {stage} x {RANKS} {dtype:9} peak {(peak - before) / 2**20:6.0f} MiB = "
                f"{(peak - before) / unit:5.2f} x 2P   kept {(after - before) / unit:5.2f}   planned "
                f"{wanted / unit:5.2f}   planned / peak {wanted / (peak - before):5.3f}",
                flush=True,
            )


def planned(shape: ModelShape, stage: int, dtype: str) -> float:
    """Bytes of the start that the plan gives to one rank."""
    trainer = {"kind": "deepspeed", "ranks": RANKS, "zero_stage": stage, "bucket_mib": BUCKET_MIB}
    spec = LocalEngineSpec.model_validate({"device": "cpu", "compute_dtype": dtype, "trainer": trainer})
    (load,) = plan_memory(spec, Workload(shape, context=512, frozen=0), Machine.cpu(64 << 30)).pools
    left_out = ("runtime", "sampler", "kv")
    return sum(part.bytes.get("start", 0.0) for part in load.parts if part.key not in left_out) / RANKS


if __name__ == "__main__":
    main()
