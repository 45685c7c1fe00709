"""Samples: the rows of a `batch` table as the trainer takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from random import Random

import pyarrow as pa

from engine.errors import BadSpec
from engine.models.images import Images, check_images, images_from_rows
from engine.protocol import check_weights
from storage.chain.records import MinibatchPlan

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
        check_weights(self.token_ids, self.weights, "a sample")
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


def samples_from_table(table: pa.Table) -> list[Sample]:
    """The rows of a batch table, in their order. A column that an older table does not have is None in every row."""
    if not {"token_ids", "weights"} <= set(table.column_names):
        there = ", ".join(table.column_names)[:200]
        raise BadSpec(f"a batch has the columns token_ids and weights, and this table has {there}; give a batch")
    names = [field.name for field in fields(Sample) if field.init and field.name in table.column_names]
    columns = [table.column(name).to_pylist() for name in names]
    if "images" in names:
        at = names.index("images")
        columns[at] = list(map(images_from_rows, columns[at]))
    return [Sample(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def minibatches(
    samples: Sequence[Sample], plan: MinibatchPlan, *, whole_groups: bool = False
) -> Iterator[list[Sample]]:
    """Yields the samples of each optimizer update, in order. A single whole-batch update keeps the batch's order.

    Every epoch visits each sample once; the last minibatch of an epoch may be smaller. `whole_groups`: the plan's size
    counts groups (pairs), and none is split.
    """
    units = _groups(samples) if whole_groups else [[sample] for sample in samples]
    size = plan.size or len(units)
    for epoch in range(plan.epochs):
        if size >= len(units):
            yield list(samples)
            continue
        order = list(units)
        Random(f"{plan.shuffle_seed}/{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield list(chain(*order[start : start + size]))


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The members of each group, groups in the order of their first."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())
