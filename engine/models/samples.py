"""`Sample`: one row of a batch table in the form that trainers use, and the split of a batch into minibatches."""

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
    """One trainable sequence of L tokens, of which N are trained (weight > 0). The optional lists have length N."""

    token_ids: list[int]
    weights: list[float]
    group: str = ""
    """Samples of one group start with the same prompt."""
    completion: int = 0
    advantages: list[float] | None = None
    old_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    sampler_logprobs: list[float] | None = None
    returns: list[float] | None = None
    old_values: list[float] | None = None
    tangents: list[float] | None = None
    preferred: bool | None = None
    """Whether this sample is the preferred one of a pair. A pair is a group of two samples. None outside pairs."""
    images: Images = ()
    trained: int = field(init=False)
    """Number of trained tokens (N)."""

    def __post_init__(self) -> None:
        check_weights(self.token_ids, self.weights, "a sample")
        if self.images:
            check_images(self.images, len(self.token_ids))
        object.__setattr__(self, "trained", sum(weight > 0 for weight in self.weights))
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != self.trained:
                raise BadSpec(
                    f"{name} of sample {self.group}/{self.completion} has {len(values)} values for {self.trained} "
                    "trained tokens; give one per token of weight > 0"
                )


def samples_from_table(table: pa.Table) -> list[Sample]:
    """The rows of a batch table as samples, in their order. A field without a column is None in every sample."""
    if not {"token_ids", "weights"} <= set(table.column_names):
        columns = ", ".join(table.column_names)[:200]
        raise BadSpec(f"a batch has the columns token_ids and weights, and this table has {columns}; give a batch")
    names = [field.name for field in fields(Sample) if field.init and field.name in table.column_names]
    values_by_column = [table.column(name).to_pylist() for name in names]
    if "images" in names:
        index = names.index("images")
        values_by_column[index] = [images_from_rows(rows) for rows in values_by_column[index]]
    return [Sample(**dict(zip(names, row, strict=True))) for row in zip(*values_by_column, strict=True)]


def minibatches(
    samples: Sequence[Sample], plan: MinibatchPlan, *, whole_groups: bool = False
) -> Iterator[list[Sample]]:
    """Yields the samples of each optimizer update.

    Every epoch visits each sample once, in a shuffled order. The last minibatch of an epoch may be smaller. An update
    with the whole batch keeps the batch's order. With `whole_groups`, the plan's size counts groups (pairs), and no
    group is split.
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
    """The samples of each group. Groups are in the order of their first samples."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())
