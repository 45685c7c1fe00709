"""Token ids and loss masks as NumPy arrays, checked as a whole, and views of the rows of Arrow's list columns.

Axes: L token of one sequence
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.errors import BadSpec

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
        raise BadSpec(
            f"{name} has token ids that are not integers of 32 bits; give the ids of the model's tokenizer"
        )
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
