"""Samples: the rows of a `batch` table as the trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from random import Random

import pyarrow as pa

from engine.errors import BadSpec
from engine.images import Images, check_images, images_of
from storage.chain import MinibatchPlan

PER_TOKEN = (
    "advantages",
    "old_logprobs",
    "reference_logprobs",
    "sampler_logprobs",
    "returns",
    "old_values",
    "tangents",
)
"""Optional columns of a batch with one value per trained token."""


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
    returns: list[float] | None = None
    old_values: list[float] | None = None
    tangents: list[float] | None = None
    preferred: bool | None = None
    """Of a pair: a group of two samples, of which one is preferred."""
    images: Images = ()
    trained: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.token_ids):
            raise BadSpec(f"a sample has {len(self.token_ids)} tokens and {len(self.weights)} weights; give one each")
        if self.weights and self.weights[0] > 0:
            raise BadSpec("the first token of a sample is trained, but nothing predicts it; give it weight 0")
        if self.images:
            check_images(self.images, len(self.token_ids))
        object.__setattr__(self, "trained", sum(w > 0 for w in self.weights))
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != self.trained:
                raise BadSpec(
                    f"{name} of sample {self.group}/{self.completion} has {len(values)} values for {self.trained} "
                    "trained tokens; give one per token of weight > 0"
                )


def samples_of(table: pa.Table) -> list[Sample]:
    """The rows of a batch table, in their order. A column that an older table does not have is None in every row."""
    names = [field.name for field in fields(Sample) if field.init and field.name in table.column_names]
    columns = [table.column(name).to_pylist() for name in names]
    if "images" in names:
        at = names.index("images")
        columns[at] = list(map(images_of, columns[at]))
    return [Sample(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def minibatches(
    samples: Sequence[Sample], plan: MinibatchPlan, *, whole_groups: bool = False
) -> list[list[Sample]]:
    """The samples of each optimizer update, in order. A single whole-batch update keeps the batch's order.

    Every epoch visits each sample once; the last minibatch of an epoch may be smaller. `whole_groups`: the plan's size
    counts groups (pairs), and none is split.
    """
    units = _groups(samples) if whole_groups else [[sample] for sample in samples]
    size = plan.size or len(units)
    if size >= len(units):
        return [list(samples) for _ in range(plan.epochs)]
    updates = []
    for epoch in range(plan.epochs):
        order = list(units)
        Random(f"{plan.shuffle_seed}/{epoch}").shuffle(order)
        updates += [list(chain(*order[start : start + size])) for start in range(0, len(order), size)]
    return updates


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The members of each group, groups in the order of their first."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())
