"""Ulysses sequence parallelism (arXiv:2309.14509): several ranks share one packed row.

Each rank computes a run of the row's tokens. Around attention, the ranks exchange tokens for heads: there each rank has
the whole row and a part of the heads, so a layout attends as it does on one rank. The row is padded to a multiple of
the number of ranks; padding is cut off before attention and has no loss.

Axes: S rank of the sequence group · C token of one rank's run · T packed token · N trained token · n trained token of
one rank's run · H query head · K key head · X heads of one rank (queries, then keys, then values) · D head dimension
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from engine.backends.torch.attention import Layout
from engine.errors import BadSpec


class SequenceGroup:
    """The neighbouring ranks that share this rank's sequences. Every rank creates one, at the same time."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, dist.get_rank() % size
        # torch requires every rank to create all groups, in the same order, also those that it is not in.
        for first in range(0, dist.get_world_size(), size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= dist.get_rank() < first + size:
                self.group = group

    def check(self, config: Any) -> None:
        """Raises BadSpec unless every rank gets equally many heads."""
        heads = int(config.num_attention_heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if heads % self.size or key_heads % self.size:
            raise BadSpec(
                f"trainer.sequence_parallel={self.size} does not divide the model's {heads} attention heads and "
                f"{key_heads} key heads; give a divisor of both"
            )

    def run(self, row_T: Tensor) -> Tensor:
        """This rank's run (C,) of a row, padded with zeros."""
        length = self._run_length(len(row_T))
        padded = pad(row_T, (0, length * self.size - len(row_T)))
        return padded[self.rank * length : (self.rank + 1) * length]

    def within_run(self, source_N: Tensor, *, row: int) -> tuple[Tensor, Tensor]:
        """For positions in a row of `row` tokens: (indices of the positions in this rank's run, their positions within
        the run), both (n,)."""
        length = self._run_length(row)
        index_n = (source_N // length == self.rank).nonzero().squeeze(1)
        return index_n, source_N[index_n] - self.rank * length

    def gather(self, values_n: Tensor, index_n: Tensor, *, total: int) -> Tensor:
        """(N, …): the values of all ranks. Only this rank's values have a gradient, so gradients add up over the
        ranks."""
        # The values of the ranks are at different places, and all other places are zero: the sum has each value.
        zeros_N = values_n.detach().new_zeros(total, *values_n.shape[1:])
        values_N = zeros_N.index_copy(0, index_n, values_n.detach())
        dist.all_reduce(values_N, group=self.group)
        return values_N.index_copy(0, index_n, values_n)

    def _run_length(self, row: int) -> int:
        return -(-row // self.size)


class _Exchange(torch.autograd.Function):
    """Sends part s of (S, …) to rank s, and returns the parts that the ranks sent to this one. It is its own
    transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class UlyssesLayout:
    """A layout of the whole row, on ranks that each have a run of it."""

    def __init__(self, whole: Layout, sequence: SequenceGroup, *, row: int) -> None:
        """`whole` is the layout of the row of `row` tokens."""
        self.longest = whole.longest
        self._whole, self._sequence, self._row = whole, sequence, row

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(1, H, C, D), (1, K, C, D) twice -> (1, C, H, D)."""
        size, group = self._sequence.size, self._sequence.group

        # Exchange tokens for heads. Queries, keys and values go in one exchange, so that the ranks make one collective
        # per layer, in the same order.
        parts_SXCD = torch.cat([x[0].unflatten(0, (size, -1)) for x in (query, key, value)], dim=1)
        row_XTD = _Exchange.apply(parts_SXCD, group).transpose(0, 1).flatten(1, 2)[:, : self._row]
        # Attend over the whole row with this rank's heads.
        heads, key_heads = query.shape[1] // size, key.shape[1] // size
        row_query, row_key, row_value = row_XTD.unsqueeze(0).split([heads, key_heads, key_heads], dim=1)
        out_THD = self._whole.attend(layer, row_query, row_key, row_value, scale)[0]

        # Exchange heads for tokens. The row is padded again, so that all runs have the same length.
        length = query.shape[2]
        padded_SCHD = pad(out_THD, (0, 0, 0, 0, 0, size * length - self._row)).unflatten(0, (size, length))
        return _Exchange.apply(padded_SCHD, group).transpose(0, 1).flatten(1, 2).unsqueeze(0)
