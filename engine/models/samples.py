"""`Sample`: one row of a batch table in the form that trainers use, and the split of a batch into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from engine.errors import BadSpec
from engine.models.images import Images, check_images, images_from_rows
from engine.models.token_arrays import (
    FloatArray,
    LossMask,
    TokenArray,
    as_loss_mask,
    as_numbers,
    as_token_ids,
    rows_of_lists,
)
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


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trainable sequence of L tokens, of which N are trained. The optional arrays have length N.

    Lists become arrays. `loss_mask` may be given as weights: tokens of a weight above 0 are trained. Raises BadSpec for
    arrays of wrong length, and for what `as_token_ids` and `as_loss_mask` reject."""

    token_ids: TokenArray
    loss_mask: LossMask
    group: str = ""
    """Samples of one group start with the same prompt."""
    completion: int = 0
    advantages: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    reference_logprobs: FloatArray | None = None
    sampler_logprobs: FloatArray | None = None
    returns: FloatArray | None = None
    old_values: FloatArray | None = None
    tangents: FloatArray | None = None
    preferred: bool | None = None
    """Whether this sample is the preferred one of a pair. A pair is a group of two samples. None outside pairs."""
    images: Images = ()
    trained: int = field(init=False)
    """Number of trained tokens (N)."""

    def __post_init__(self) -> None:
        # The class is frozen, so its fields are set this way.
        token_ids = as_token_ids(self.token_ids, "a sample")
        loss_mask = as_loss_mask(self.loss_mask, len(token_ids), "a sample")
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "loss_mask", loss_mask)
        object.__setattr__(self, "trained", int(np.count_nonzero(loss_mask)))
        if self.images:
            check_images(self.images, len(token_ids))
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != self.trained:
                raise BadSpec(
                    f"{name} of sample {self.group}/{self.completion} has {len(values)} values for {self.trained} "
                    "trained tokens; give one per token of weight > 0"
                )
            object.__setattr__(self, name, as_numbers(values))


def samples_from_table(table: pa.Table) -> list[Sample]:
    """The rows of a batch table as samples, in their order. A field without a column is None in every sample. The
    arrays of the samples are views of the table's values."""
    if not {"token_ids", "loss_mask"} <= set(table.column_names):
        names = ", ".join(table.column_names)[:200]
        raise BadSpec(f"a batch has the columns token_ids and loss_mask, and this table has {names}; give a batch")

    # Read the columns that samples have fields for. A batch may have other columns.
    columns: dict[str, list[Any]] = {}
    for name in ("token_ids", "loss_mask", *PER_TOKEN):
        if name in table.column_names:
            columns[name] = rows_of_lists(table.column(name))
    for name in ("group", "completion", "preferred"):
        if name in table.column_names:
            columns[name] = table.column(name).to_pylist()
    if "images" in table.column_names:
        columns["images"] = [images_from_rows(rows) for rows in table.column("images").to_pylist()]

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
    units = groups_of(samples) if whole_groups else [[sample] for sample in samples]
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


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group. Groups are in the order of their first samples."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())
