"""The workloads: their data, and the arms that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.speed import data
from bench.speed.data import Count, Row

OURS, MACHINE = "ostinato", "machine"
"""Names of our arm, and of the arm that measures the machine."""


@dataclass(frozen=True)
class Peer:
    """An arm that ours is compared with."""

    function: str
    """A function of bench.speed.peers."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """One comparison."""

    title: str
    rows_per_step: int
    rows: Callable[[Count, int], Iterable[Row]]
    """(count of tokens, number of rows) -> the rows."""
    ours: str
    """A function of bench.speed.ours."""
    peers: dict[str, Peer]
    completions: int = 1
    new_tokens: int = 0
    unit: str = "tokens"


def rollout(batch: int) -> Workload:
    """Completions of 64 tokens for `batch` different prompts of 64 tokens."""
    peers = {"generate": Peer("generate"), "generate_batch": Peer("generate", {"continuous": True})}
    return Workload(
        f"rollout, {batch} x 64 tokens", batch, partial(data.prompts, tokens=64), "rollout", peers, new_tokens=64
    )


SFT_PEERS = {
    "TRL packed": Peer("sft", {"packing": True, "max_length": 512, "per_device_train_batch_size": 2}),
    "TRL padded": Peer("sft", {"max_length": 512}),
}
DPO_PEERS = {
    "TRL precomputed": Peer("dpo", {"precompute_ref_log_probs": True}),
    "TRL": Peer("dpo"),
}
WORKLOADS: dict[str, Workload] = {
    "sft": Workload("SFT, 8 conversations of mixed length", 8, data.conversations, "sft", SFT_PEERS),
    "sft-2k": Workload(
        "SFT, 1 conversation of 2,048 tokens", 1, partial(data.long_conversations, tokens=2048), "sft",
        {"TRL": Peer("sft", {"max_length": 2048})},
    ),
    "dpo": Workload("DPO, 4 pairs", 4, data.pairs, "dpo", DPO_PEERS),
    "grpo": Workload(
        "GRPO, 2 prompts of 64 tokens x 8 x 64 tokens", 2, partial(data.prompts, tokens=64), "grpo",
        {"TRL": Peer("grpo")}, completions=8, new_tokens=64,
    ),
    "grpo-1k": Workload(
        "GRPO, 1 prompt of 1,024 tokens x 8 x 64 tokens", 1, partial(data.prompts, tokens=1024), "grpo",
        {"TRL": Peer("grpo")}, completions=8, new_tokens=64,
    ),
    "rollout-1": rollout(1),
    "rollout-8": rollout(8),
    "rollout-64": rollout(64),
    "dataset": Workload(
        "reading a JSON lines file, rows", 1, data.file_rows, "dataset", {"datasets": Peer("dataset")}, unit="rows"
    ),
    "logprobs": Workload(
        "logprobs, 8 conversations of mixed length", 8, data.conversations, "logprobs",
        {"transformers": Peer("logprobs")},
    ),
}  # fmt: skip
