"""Where the seconds and the dollars of a GRPO step go on a cluster: arithmetic only, printed as the tables of
docs/scaling.md. Every input is a constant below, with what it is: a data sheet's, assumed, or measured here.

    PYTHONPATH=. .venv/bin/python bench/cost_model.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TRAIN_FLOPS, FORWARD_FLOPS = 6, 2
"""Per parameter and token: forward and backward; forward. Attention's own are left out: below 10 % at 2k tokens."""
RECOMPUTE_FLOPS = 2
"""Activation checkpointing runs every layer forward once more."""
MFU = 0.40
"""Assumed share of the peak in training, scoring and prefill."""
HBM_SHARE = 0.60
"""Assumed share of the memory bandwidth that a decode step reaches."""
LINK_SHARE = 0.70
"""Assumed share of a link that a large broadcast reaches."""
WEIGHT_BYTES = 2
"""bfloat16."""
STATE_BYTES = 12
"""Of a checkpoint, per parameter: float32 master weights and two moments."""
TRAINER_BYTES = 18
"""In a trainer's memory, per parameter: bf16 weights and float32 gradients (2 + 4), and the 12 above."""
STORE_BYTES_PER_SECOND = 1e9
"""Assumed throughput of one node to object storage."""
COORDINATOR_SECONDS_PER_ROLLOUT = 16e-6
COORDINATOR_SECONDS_PER_TOKEN = 0.49e-6
"""Measured: CPU seconds of prepare_batch and metrics, by bench/scale_sim.py at 16 and 256 new tokens (docs/scaling.md);
a token is a sampled one, the prompt of 70 is in the first."""
START_SECONDS = 60.0
"""Assumed: a process group or a vLLM server from nothing to ready, without its weights."""
REDO_SECONDS = 300.0
"""At most: `checkpoints.recovery_seconds` (flows/configs/common.py)."""
DOLLARS_PER_GPU_HOUR = 3.0
"""Assumed."""
MAX_RUNNING = 512
"""Assumed: sequences that a vLLM server decodes together at most."""


@dataclass(frozen=True)
class Gpu:
    """Peak of one device, by its data sheet."""

    name: str
    flops: float
    """Dense bfloat16."""
    hbm: float
    """Bytes per second."""
    memory: float
    """Bytes."""
    nvlink: float = 450e9
    """Bytes per second in one direction: 900 GB/s is both."""
    network: float = 50e9
    """400 Gb/s."""


H100 = Gpu("H100", 989e12, 3.35e12, 80e9)
H200 = Gpu("H200", 989e12, 4.8e12, 141e9)


@dataclass(frozen=True)
class Shape:
    """A model: parameters, and bytes of KV cache per token (2 x layers x key heads x head size x 2 bytes)."""

    name: str
    parameters: float
    kv_bytes: int


B8 = Shape("8B", 8.03e9, 2 * 32 * 8 * 128 * 2)
B70 = Shape("70B", 70.6e9, 2 * 80 * 8 * 128 * 2)


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    train: int
    """GPUs of the trainer."""
    sample: int
    """GPUs of the samplers."""
    tensor_parallel: int = 1
    """GPUs of one sampler."""
    shared: bool = False
    """Trainer and samplers take turns on the same GPUs (sampler.sleep)."""

    @property
    def gpus(self) -> int:
        return max(self.train, self.sample) if self.shared else self.train + self.sample

    @property
    def title(self) -> str:
        split = f"{self.gpus} shared" if self.shared else f"{self.train} + {self.sample}"
        return f"{split} {self.gpu.name}, tp {self.tensor_parallel}"

    @property
    def one_node(self) -> bool:
        return self.gpus <= 8


@dataclass(frozen=True)
class Work:
    """One step."""

    prompts: int
    completions: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 1024
    scored: int = 2
    """Forward passes for logprobs: old and reference. old_logprobs="sampler" saves one, kl_beta=0 the other."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.completions

    @property
    def tokens(self) -> int:
        return self.rollouts * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True)
class Split:
    """Seconds of one step. The parts follow one another: the loop does not overlap them."""

    sample: float
    score: float
    train: float
    sync: float
    coordinator: float

    @property
    def total(self) -> float:
        return self.sample + self.score + self.train + self.sync + self.coordinator


def running(shape: Shape, cluster: Cluster, work: Work) -> int:
    """Sequences that one sampler decodes together: what 90 % of its memory holds beside the weights."""
    room = 0.9 * cluster.gpu.memory * cluster.tensor_parallel - WEIGHT_BYTES * shape.parameters
    fits = int(room / (shape.kv_bytes * (work.prompt_tokens + work.new_tokens)))
    if fits < 1:
        raise ValueError(f"{shape.name} leaves no room for a sequence on {cluster.title}; raise tensor_parallel")
    return min(fits, MAX_RUNNING)


def decode_seconds(shape: Shape, cluster: Cluster, work: Work, rows: int) -> float:
    """One decode step of a sampler: the slower of reading weights and caches, and of 2 N operations per row."""
    width = cluster.tensor_parallel
    context = work.prompt_tokens + work.new_tokens / 2
    read = WEIGHT_BYTES * shape.parameters + rows * context * shape.kv_bytes
    compute = FORWARD_FLOPS * shape.parameters * rows / (width * cluster.gpu.flops * MFU)
    return max(read / (width * cluster.gpu.hbm * HBM_SHARE), compute)


def sample_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    """Prefill of each prompt once (its completions share it), then full waves of decoding at most."""
    servers = cluster.sample // cluster.tensor_parallel
    prefill = FORWARD_FLOPS * shape.parameters * work.prompts * work.prompt_tokens
    mine = math.ceil(work.rollouts / servers)
    rows = min(running(shape, cluster, work), mine)
    waves = math.ceil(mine / rows)
    decode = waves * work.new_tokens * decode_seconds(shape, cluster, work, math.ceil(mine / waves))
    return prefill / (cluster.sample * cluster.gpu.flops * MFU) + decode


def train_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    operations = (TRAIN_FLOPS + RECOMPUTE_FLOPS) * shape.parameters * work.tokens
    return operations / (cluster.train * cluster.gpu.flops * MFU)


def score_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    """Logprobs by the trainer's GPUs."""
    operations = work.scored * FORWARD_FLOPS * shape.parameters * work.tokens
    return operations / (cluster.train * cluster.gpu.flops * MFU)


def sync_seconds(shape: Shape, cluster: Cluster, *, bytes_per_second: float | None = None) -> float:
    """bf16 weights through the slowest link of a pipelined broadcast from one rank (default: NVLink on one node, else
    the network)."""
    link = bytes_per_second or LINK_SHARE * (cluster.gpu.nvlink if cluster.one_node else cluster.gpu.network)
    return WEIGHT_BYTES * shape.parameters / link


def coordinator_seconds(work: Work) -> float:
    """CPU of the one process that prepares the batch; it is not spread over machines."""
    return work.rollouts * (COORDINATOR_SECONDS_PER_ROLLOUT + COORDINATOR_SECONDS_PER_TOKEN * work.new_tokens)


def step_split(shape: Shape, cluster: Cluster, work: Work) -> Split:
    return Split(
        sample_seconds(shape, cluster, work),
        score_seconds(shape, cluster, work),
        train_seconds(shape, cluster, work),
        sync_seconds(shape, cluster),
        coordinator_seconds(work),
    )


def gpu_hours(split: Split, cluster: Cluster, steps: int = 1000) -> float:
    return split.total * steps * cluster.gpus / 3600


def checkpoint_seconds(shape: Shape, cluster: Cluster) -> float:
    """Every trainer node writes its shards at once."""
    nodes = math.ceil(cluster.train / 8)
    return STATE_BYTES * shape.parameters / (nodes * STORE_BYTES_PER_SECOND)


def recovery_seconds(shape: Shape, cluster: Cluster) -> float:
    """From `kill -9` of the trainer to the policy being back, at worst: start, read the checkpoint, redo."""
    return START_SECONDS + checkpoint_seconds(shape, cluster) + REDO_SECONDS


def trainer_gigabytes(shape: Shape, cluster: Cluster) -> float:
    """Per GPU under ZeRO 3, without activations."""
    return TRAINER_BYTES * shape.parameters / cluster.train / 1e9


CASES = (
    (B8, Cluster(H100, 4, 4), Work(128)),
    (B8, Cluster(H100, 8, 8, shared=True), Work(128)),
    (B8, Cluster(H100, 4, 4), Work(100_000)),
    (B8, Cluster(H100, 32, 32), Work(100_000)),
    (B70, Cluster(H100, 32, 32, 4), Work(128)),
    (B70, Cluster(H100, 32, 32, 4), Work(1024)),
    (B70, Cluster(H100, 64, 64, 4, shared=True), Work(1024)),
    (B70, Cluster(H100, 32, 32, 4), Work(100_000)),
    (B70, Cluster(H200, 32, 32, 2), Work(1024)),
    (B70, Cluster(H100, 256, 256, 4), Work(100_000)),
)


def steps_table() -> str:
    """Markdown: one row per case."""
    lines = [
        "| model, GPUs (train + sample) | prompts x 8 | sample s | score s | train s | sync s | coordinator s | step s "
        "| GPU-hours, $ per 1,000 steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, cluster, work in CASES:
        split = step_split(shape, cluster, work)
        hours = gpu_hours(split, cluster)
        lines.append(
            f"| {shape.name}, {cluster.title} "
            f"| {work.prompts:,} | {split.sample:,.1f} | {split.score:,.1f} | {split.train:,.1f} | {split.sync:.2f} "
            f"| {split.coordinator:,.1f} | {split.total:,.1f} | {hours:,.0f}, ${hours * DOLLARS_PER_GPU_HOUR:,.0f} |"
        )
    return "\n".join(lines)


def machines_table() -> str:
    """Markdown: what does not depend on the work."""
    lines = [
        "| model, GPUs | trainer GB a GPU (ZeRO 3) | rows a sampler | decode step ms "
        "| sync nvlink / 400 Gb/s / folder s | checkpoint GB, s | recovery s, at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape, cluster in ((B8, Cluster(H100, 4, 4)), (B70, Cluster(H100, 32, 32, 4)), (B70, Cluster(H200, 32, 32, 2))):
        work = Work(100_000)
        rows = running(shape, cluster, work)
        paths = (LINK_SHARE * cluster.gpu.nvlink, LINK_SHARE * cluster.gpu.network, STORE_BYTES_PER_SECOND)
        syncs = " / ".join(f"{sync_seconds(shape, cluster, bytes_per_second=path):.2f}" for path in paths)
        lines.append(
            f"| {shape.name}, {cluster.title} "
            f"| {trainer_gigabytes(shape, cluster):.0f} | {rows} "
            f"| {1e3 * decode_seconds(shape, cluster, work, rows):.1f} | {syncs} "
            f"| {STATE_BYTES * shape.parameters / 1e9:,.0f}, {checkpoint_seconds(shape, cluster):,.0f} "
            f"| {recovery_seconds(shape, cluster):,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(machines_table(), steps_table(), sep="\n\n")
