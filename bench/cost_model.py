"""Computes the seconds and the dollars of a GRPO step on a cluster, and prints the tables of docs/scaling.md.

It is arithmetic only. Every input is a constant below, which says whether it is from a data sheet, assumed or measured.

    PYTHONPATH=. .venv/bin/python bench/cost_model.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TRAIN_FLOPS, FORWARD_FLOPS = 6, 2
"""Operations per parameter and token: forward and backward pass; forward pass only. Attention's own operations are left
out; they are below 10 % at 2k tokens."""
RECOMPUTE_FLOPS = 2
"""Operations per parameter and token of activation checkpointing, which runs every layer forward once more."""
MFU = 0.40
"""Assumed share of the peak that training, scoring and prefill reach."""
HBM_SHARE = 0.60
"""Assumed share of the memory bandwidth that a decode step reaches."""
LINK_SHARE = 0.70
"""Assumed share of a link that a large broadcast reaches."""
WEIGHT_BYTES = 2
"""Bytes per parameter in bfloat16."""
STATE_BYTES = 12
"""Bytes per parameter of a checkpoint: float32 master weights and two moments."""
TRAINER_BYTES = 18
"""Bytes per parameter in a trainer's memory: bf16 weights and float32 gradients (2 + 4), and the 12 above."""
UPLOAD_BYTES_PER_SECOND, DOWNLOAD_BYTES_PER_SECOND = 0.33e9, 0.37e9
"""Rates of one process to and from object storage, which its one event loop limits, measured by bench/transfers.py
(docs/scaling.md). Each rank transfers its part of a checkpoint. It is assumed that the ranks do not slow each other."""
DIGEST_BYTES_PER_SECOND = 1.88e9
"""Bytes of weights that one thread of a host digests, measured by bench/weight_digests.py."""
GPU_DIGEST_BYTES_PER_SECOND, GPU_SKETCH_BYTES_PER_SECOND = 23.4e9, 21e9
"""Bytes of weights that an H100 digests and sketches, measured by bench/gpu (part `redo`) on 0.5B parameters."""
BROADCAST_START_SECONDS = 20e-6
"""Assumed time for starting one NCCL broadcast. Those of one bucket are started one after another."""
FOLDER_BYTES_PER_SECOND = 1e9
"""Assumed throughput of a shared folder."""
COORDINATOR_SECONDS_PER_ROLLOUT = 23e-6
COORDINATOR_SECONDS_PER_TOKEN = 0.31e-6
"""CPU seconds of prepare_batch and metrics, measured by bench/scale_sim.py at 16 and 256 new tokens (docs/scaling.md).
Only sampled tokens count; the first constant contains a prompt of 70 tokens."""
START_SECONDS = 60.0
"""Assumed time in which a process group or a vLLM server starts, without its weights."""
REDO_SECONDS = 300.0
"""Longest time for redoing steps: `checkpoints.recovery_seconds` (flows/configs/common.py)."""
DOLLARS_PER_GPU_HOUR = 3.0
"""Assumed price."""
MAX_RUNNING = 512
"""Assumed largest number of sequences that a vLLM server decodes together."""


@dataclass(frozen=True)
class Gpu:
    """Peak rates and memory of one device, from its data sheet."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    hbm: float
    """Memory bandwidth, bytes per second."""
    memory: float
    """Bytes."""
    nvlink: float = 450e9
    """Bytes per second in one direction. The data sheet's 900 GB/s is the sum of both."""
    network: float = 50e9
    """Bytes per second of a 400 Gb/s link."""


H100 = Gpu("H100", 989e12, 3.35e12, 80e9)
H200 = Gpu("H200", 989e12, 4.8e12, 141e9)


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    name: str
    parameters: float
    kv_bytes: int
    """Bytes of KV cache per token: 2 x layers x key heads x head size x 2 bytes."""


B8 = Shape("8B", 8.03e9, 2 * 32 * 8 * 128 * 2)
B70 = Shape("70B", 70.6e9, 2 * 80 * 8 * 128 * 2)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and how they are divided."""

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
    """The size of one step."""

    prompts: int
    completions: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 1024
    scored: int = 2
    """Forward passes for old and reference logprobs. A batch of one update or old_logprobs="sampler" saves one of them,
    kl_beta=0 the other."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.completions

    @property
    def tokens(self) -> int:
        return self.rollouts * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True)
class Split:
    """Seconds of the parts of one step, which the loop runs one after the other."""

    sample: float
    score: float
    train: float
    sync: float
    coordinator: float

    @property
    def total(self) -> float:
        return self.sample + self.score + self.train + self.sync + self.coordinator


def running(shape: Shape, cluster: Cluster, work: Work) -> int:
    """Returns how many sequences one sampler decodes together: what fits into 90 % of its memory, less the weights."""
    room = 0.9 * cluster.gpu.memory * cluster.tensor_parallel - WEIGHT_BYTES * shape.parameters
    fits = int(room / (shape.kv_bytes * (work.prompt_tokens + work.new_tokens)))
    if fits < 1:
        raise ValueError(f"{shape.name} leaves no room for a sequence on {cluster.title}; raise tensor_parallel")
    return min(fits, MAX_RUNNING)


def decode_seconds(shape: Shape, cluster: Cluster, work: Work, rows: int) -> float:
    """Returns the time of one decode step of a sampler: the time for reading the weights and caches, or the time for
    2 N operations per row if that is longer."""
    width = cluster.tensor_parallel
    context = work.prompt_tokens + work.new_tokens / 2
    read = WEIGHT_BYTES * shape.parameters + rows * context * shape.kv_bytes
    compute = FORWARD_FLOPS * shape.parameters * rows / (width * cluster.gpu.flops * MFU)
    return max(read / (width * cluster.gpu.hbm * HBM_SHARE), compute)


def sample_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    """Returns the time for prefill and decoding. Each prompt is prefilled once, since its completions share it."""
    prefill = FORWARD_FLOPS * shape.parameters * work.prompts * work.prompt_tokens
    # the rollouts of one server, in equal waves of at most `running` rows
    servers = cluster.sample // cluster.tensor_parallel
    rollouts = math.ceil(work.rollouts / servers)
    waves = math.ceil(rollouts / running(shape, cluster, work))
    decode = waves * work.new_tokens * decode_seconds(shape, cluster, work, math.ceil(rollouts / waves))
    return prefill / (cluster.sample * cluster.gpu.flops * MFU) + decode


def train_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    operations = (TRAIN_FLOPS + RECOMPUTE_FLOPS) * shape.parameters * work.tokens
    return operations / (cluster.train * cluster.gpu.flops * MFU)


def score_seconds(shape: Shape, cluster: Cluster, work: Work) -> float:
    """Returns the time in which the trainer's GPUs compute the logprobs."""
    operations = work.scored * FORWARD_FLOPS * shape.parameters * work.tokens
    return operations / (cluster.train * cluster.gpu.flops * MFU)


def sync_seconds(shape: Shape, cluster: Cluster, *, bytes_per_second: float | None = None) -> float:
    """Returns the time of a pipelined broadcast of the bf16 weights from one rank. The slowest link decides it: NVLink
    on one node, otherwise the network."""
    if bytes_per_second is None:
        bytes_per_second = LINK_SHARE * (cluster.gpu.nvlink if cluster.one_node else cluster.gpu.network)
    return WEIGHT_BYTES * shape.parameters / bytes_per_second


def coordinator_seconds(work: Work) -> float:
    """Returns the CPU seconds of the one process that prepares the batch. It runs on one machine."""
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
    """Returns the time in which the ranks, one per GPU that trains, upload a checkpoint."""
    return STATE_BYTES * shape.parameters / (cluster.train * UPLOAD_BYTES_PER_SECOND)


def recovery_seconds(shape: Shape, cluster: Cluster) -> float:
    """Returns the longest time until the policy is restored after `kill -9` of the trainer: the start, the download of
    the checkpoint, and the redo of the steps that were taken since it began. The next checkpoint begins when the last
    one is uploaded and `REDO_SECONDS` have passed."""
    download = STATE_BYTES * shape.parameters / (cluster.train * DOWNLOAD_BYTES_PER_SECOND)
    return START_SECONDS + download + REDO_SECONDS + 2 * checkpoint_seconds(shape, cluster)


def trainer_gigabytes(shape: Shape, cluster: Cluster) -> float:
    """Returns the GB per GPU of the trainer's states under ZeRO 3, without activations."""
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
    """Returns a Markdown table with one row for each case."""
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
    """Returns a Markdown table of what does not depend on the size of a step."""
    lines = [
        "| model, GPUs | trainer GB a GPU (ZeRO 3) | rows a sampler | decode step ms "
        "| sync nvlink / 400 Gb/s / folder s | checkpoint GB, s | recovery s, at most |",
        "|---|---|---|---|---|---|---|",
    ]
    machines = ((B8, Cluster(H100, 4, 4)), (B70, Cluster(H100, 32, 32, 4)), (B70, Cluster(H200, 32, 32, 2)))
    for shape, cluster in machines:
        work = Work(100_000)
        rows = running(shape, cluster, work)
        paths = (LINK_SHARE * cluster.gpu.nvlink, LINK_SHARE * cluster.gpu.network, FOLDER_BYTES_PER_SECOND)
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
