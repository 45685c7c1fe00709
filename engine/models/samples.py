"""`Sample`: one row of a batch table in the form that trainers use, and the split of a batch into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from random import Random
from typing import Any

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
        # The class is frozen, so its derived field is set this way.
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
        names = ", ".join(table.column_names)[:200]
        raise BadSpec(f"a batch has the columns token_ids and weights, and this table has {names}; give a batch")

    # Read the columns that samples have fields for, as lists. A batch may have other columns.
    columns: dict[str, list[Any]] = {}
    for sample_field in fields(Sample):
        if sample_field.init and sample_field.name in table.column_names:
            columns[sample_field.name] = table.column(sample_field.name).to_pylist()
    if "images" in columns:
        columns["images"] = [images_from_rows(rows) for rows in columns["images"]]

    samples = []
    for row in zip(*columns.values(), strict=True):
        samples.append(Sample(**dict(zip(columns, row, strict=True))))
    return samples


def minibatches(
    samples: Sequence[Sample], plan: MinibatchPlan, *, whole_groups: bool = False
) -> Iterator[list[Sample]]:
    """Yields the samples of each optimizer update.

    Every epoch visits each sample once, in a shuffled order. The last minibatch of an epoch may be smaller. An update
    with the whole batch keeps the batch's order. With `whole_groups`, the plan's size counts groups (pairs), and no
    group is split.
    """
    # A pair must stay in one update, because its loss compares its two samples.
    units = _groups(samples) if whole_groups else [[sample] for sample in samples]
    size = plan.size or len(units)
    for epoch in range(plan.epochs):
        if size >= len(units):
            yield list(samples)
            continue
        # The order depends only on the plan and the epoch, so that a redo makes the same minibatches.
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
