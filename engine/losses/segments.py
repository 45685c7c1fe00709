"""Sums over sequences of a flat axis. Axes: N trained token · S sequence"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_by_sequence(values_N: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """(S,): the sum of each sequence's values; 0 where it has none."""
    index_N = _index(lengths_S, values_N.device)
    return torch.zeros(len(lengths_S), dtype=values_N.dtype, device=values_N.device).index_add(0, index_N, values_N)


def spread(values_S: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """(N,): each sequence's value at each of its tokens."""
    return values_S.index_select(0, _index(lengths_S, values_S.device))


def _index(lengths_S: Sequence[int], device: torch.device) -> Tensor:
    lengths = torch.tensor(list(lengths_S), dtype=torch.long, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
