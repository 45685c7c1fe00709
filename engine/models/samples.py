"""`Sample`: one row of a batch table in the form that trainers use, and the split of a batch into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.errors import BadSpec
from engine.models.images import Images, check_images, images_from_rows
from storage.chain.records import MinibatchPlan

PER_TOKEN = (
    "advantages",
    "old_logprobs",
    "reference_logprobs",
    "sampler_logprobs",
    "returns",
    "old_values",
    "tangents",
    "selected",
)
"""Optional columns of a batch with one value per trained token."""
PER_TOP = ("teacher_top_ids", "teacher_top_logprobs")
"""Optional columns of a batch with K values per trained token, of the teacher's K most probable tokens."""
PER_SAMPLE = ("preferred", "kl_baseline")
"""Optional columns of a batch with one value per row."""


TokenArray = npt.NDArray[np.int32]
"""Token ids of one sequence, (L,)."""
LossMask = npt.NDArray[np.bool_]
"""Whether each token of one sequence is trained, (L,)."""
FloatArray = npt.NDArray[np.floating[Any]]
"""One number per trained token of one sequence."""

MAX_TOKEN_ID = (1 << 31) - 1


def as_token_ids(values: Any, name: str) -> TokenArray:
    """The token ids as an int32 array, without a copy if they are one. Raises BadSpec for anything but integers that
    fit int32. `name` names the owner of the tokens in the message."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values
    # NumPy makes a float array of an empty list.
    if len(values) == 0:
        return np.zeros(0, np.int32)
    try:
        array = np.asarray(values)
        is_integer = array.ndim == 1 and array.dtype.kind in "iu"
    except ValueError:
        is_integer = False
    if not is_integer or array.min() < -MAX_TOKEN_ID - 1 or array.max() > MAX_TOKEN_ID:
        raise BadSpec(f"{name} has token ids that are not integers of 32 bits; give the ids of the model's tokenizer")
    return array.astype(np.int32)


def as_loss_mask(weights: Any, length: int, name: str) -> LossMask:
    """Which of `length` tokens are trained: those of a weight above 0. `weights` are numbers or bools.

    Raises BadSpec unless there is one finite weight >= 0 per token, and the weight of the first token is 0."""
    try:
        array = np.asarray(weights)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise BadSpec(f"{name} has weights that are not a list of numbers; give one weight per token")
    if len(array) != length:
        raise BadSpec(f"{name} has {length} tokens and {len(array)} weights; give one weight per token")
    if length == 0:
        return np.zeros(0, bool)
    mask = array
    if array.dtype != bool:
        numbers = array.astype(np.float64)
        is_bad = ~(np.isfinite(numbers) & (numbers >= 0))
        if is_bad.any():
            raise BadSpec(f"{name} has a token of weight {numbers[is_bad][0]}; give finite weights of at least 0")
        mask = numbers > 0
    if mask[0]:
        raise BadSpec(f"the first token of {name} has a weight above 0, but nothing predicts it; give it weight 0")
    return mask


def as_numbers(values: Any) -> FloatArray:
    """The numbers as a float array: float arrays unchanged, anything else as float64."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return values
    return np.asarray(values, dtype=np.float64)


def rows_of_lists(column: pa.ChunkedArray | pa.ListArray) -> list[Any]:
    """The list of each row of a list column, as a view of the column's values. None for a null.

    The values are not copied, except bools, which Arrow stores as bits, and columns of several chunks."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if lists.null_count == len(lists):
        return [None] * len(lists)
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy()
    rows: list[Any] = [values[start:end] for start, end in pairwise(offsets)]
    if lists.null_count:
        for index in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)):
            rows[index] = None
    return rows


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
    selected: FloatArray | None = None
    teacher_top_ids: TokenArray | None = None
    """The teacher's K most probable tokens before each trained token, (N, K). They are distinct."""
    teacher_top_logprobs: FloatArray | None = None
    """Their logprobs under the teacher, in nats, (N, K)."""
    preferred: bool | None = None
    """Whether this sample is the preferred one of a pair, which is a group of two samples, or is labelled as desirable.
    None if it has neither."""
    kl_baseline: float | None = None
    """KL baseline of KTO, in nats, equal for all samples of the batch."""
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
        self._check_teacher_top()

    def _check_teacher_top(self) -> None:
        """Gives the teacher's columns the shape (N, K). Raises BadSpec unless both have K values per trained token."""
        ids, logprobs = self.teacher_top_ids, self.teacher_top_logprobs
        if ids is None and logprobs is None:
            return
        size = -1 if ids is None else np.size(ids)
        other = -1 if logprobs is None else np.size(logprobs)
        width, rest = divmod(size, max(1, self.trained))
        if ids is None or size != other or rest or (width == 0) != (self.trained == 0):
            raise BadSpec(
                f"teacher_top_ids and teacher_top_logprobs of sample {self.group}/{self.completion} have "
                f"{max(size, 0)} and {max(other, 0)} values for {self.trained} trained tokens; give equally many per "
                "token in both"
            )
        shape = (self.trained, width)
        object.__setattr__(self, "teacher_top_ids", as_token_ids(np.ravel(ids), "a teacher").reshape(shape))
        object.__setattr__(self, "teacher_top_logprobs", as_numbers(logprobs).reshape(shape))


def samples_from_table(table: pa.Table) -> list[Sample]:
    """The rows of a batch table as samples, in their order. A field without a column is None in every sample. The
    arrays of the samples are views of the table's values."""
    if not {"token_ids", "loss_mask"} <= set(table.column_names):
        names = ", ".join(table.column_names)[:200]
        raise BadSpec(f"a batch has the columns token_ids and loss_mask, and this table has {names}; give a batch")

    # Read the columns that samples have fields for. A batch may have other columns.
    columns: dict[str, list[Any]] = {}
    for name in ("token_ids", "loss_mask", *PER_TOKEN, *PER_TOP):
        if name in table.column_names:
            columns[name] = rows_of_lists(table.column(name))
    for name in ("group", "completion", *PER_SAMPLE):
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
