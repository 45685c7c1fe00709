"""Samples: the rows of a `batch` table as the trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pyarrow as pa

from engine.errors import BadSpec
from storage.chain import MinibatchPlan


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable sequence of L tokens, N of them trained (weight > 0). Optional lists have length N."""

    token_ids: list[int]
    weights: list[float]
    group: str = ""
    """Samples of one group begin with the same prompt."""
    completion: int = 0
    advantages: list[float] | None = None
    old_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    sampler_logprobs: list[float] | None = None
    trained: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.token_ids):
            raise BadSpec(f"a sample has {len(self.token_ids)} tokens and {len(self.weights)} weights; give one each")
        if self.weights and self.weights[0] > 0:
            raise BadSpec("the first token of a sample is trained, but nothing predicts it; give it weight 0")
        object.__setattr__(self, "trained", sum(w > 0 for w in self.weights))
        for name in ("advantages", "old_logprobs", "reference_logprobs", "sampler_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.trained:
                raise BadSpec(
                    f"{name} of sample {self.group}/{self.completion} has {len(values)} values for {self.trained} "
                    "trained tokens; give one per token of weight > 0"
                )


def samples_of(table: pa.Table) -> list[Sample]:
    """The rows of a batch table, in their order."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return [
        Sample(
            token_ids=columns["token_ids"][row],
            weights=columns["weights"][row],
            group=columns["group"][row],
            completion=columns["completion"][row],
            advantages=columns["advantages"][row],
            old_logprobs=columns["old_logprobs"][row],
            reference_logprobs=columns["reference_logprobs"][row],
            sampler_logprobs=columns["sampler_logprobs"][row],
        )
        for row in range(table.num_rows)
    ]


def minibatches(samples: Sequence[Sample], plan: MinibatchPlan) -> list[list[Sample]]:
    """The samples of each optimizer update, in order. A single whole-batch update keeps the batch's order.

    Every epoch visits each sample once; the last minibatch of an epoch may be smaller.
    """
    size = plan.size or len(samples)
    if size >= len(samples):
        return [list(samples) for _ in range(plan.epochs)]
    updates = []
    for epoch in range(plan.epochs):
        order = list(samples)
        Random(f"{plan.shuffle_seed}/{epoch}").shuffle(order)
        updates += [order[start : start + size] for start in range(0, len(order), size)]
    return updates
