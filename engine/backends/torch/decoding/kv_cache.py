"""The keys and values of the rows that are decoded, and attention over them.

A row's own part lies in a pool, which has one place per row and is allocated once per call of the sampler. A prompt
that several rows have is stored once, outside the pool, and all of its rows attend to it in one kernel call. Attention
over a prompt and an own part is a mean of that over each, with weights from their log-sum-exps, as in flash decoding.

Axes: B row in the pool · H query head · K key/value head · R query head per key head · S cached position · P prompt
token · D head dimension · N row with a shared prompt, in the order of the groups
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch.attention import PrefillLayout
from engine.backends.torch.flash_attention import flash_kernel

SHARE_TOKENS = 128
"""A prompt is shared where this saves the keys of at least so many tokens. Separate calls for a prompt take about as
long as attention to so many keys."""
CALL_TOKENS = 64
"""A row attends in the call of its neighbours where it adds at most so many masked positions to that call."""


@dataclass(slots=True, eq=False)
class PromptKeys:
    """The keys and values of a computed prompt."""

    length: int
    keys_and_values: dict[int, tuple[Tensor, Tensor]]
    """(K, P, D) each, by layer."""

    @classmethod
    def of(cls, prefill: PrefillLayout, start: int, length: int) -> PromptKeys:
        """Copies those of the tokens [start, start + length) of a prefilled row."""
        span = slice(start, start + length)
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, (keys_KTD, values_KTD) in prefill.keys_and_values.items():
            copies[layer] = (_copied(keys_KTD[:, span]), _copied(values_KTD[:, span]))
        return cls(length, copies)


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def should_share(rows: int, tokens: int, device: torch.device) -> bool:
    """Whether a prompt of so many tokens is stored once for so many rows. It needs a kernel that returns log-sum-exps,
    which torch has in all dtypes for a CPU only."""
    return device.type == "cpu" and (rows - 1) * tokens >= SHARE_TOKENS


@dataclass(slots=True)
class _CacheRow:
    prompt: PromptKeys | None
    """The shared prompt. None: the prompt is in the row's own part."""
    length: int
    """Number of tokens of the own part."""


@dataclass(slots=True)
class _Run:
    """Neighbouring rows whose own parts attend in one call."""

    rows: slice
    longest: int
    mask_B11S: Tensor | None
    """0 for positions of the row, -inf for those after its end. None if all rows are equally long."""


@dataclass(slots=True)
class _Group:
    """Rows with the same shared prompt."""

    rows: slice | Tensor
    prompt: PromptKeys


class DecodeLayout:
    """One new token per row, over a pool of keys and values. Rows may have different lengths.

    Rows 0 to n-1 of the pool are in use. A row enters at the end, and where a row leaves, the last one takes its
    place."""

    def __init__(self, *, rows: int, capacity: int, device: torch.device) -> None:
        """`rows` is the largest number of rows, and `capacity` the largest number of tokens of an own part."""
        self._shape, self._device = (rows, capacity), device
        self._pool: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: list[_CacheRow] = []
        self.longest = 0
        # What the calls of `attend` of one token have in common.
        self._runs: list[_Run] = []
        self._rows_B = self._last_B = torch.zeros(0, dtype=torch.long, device=device)
        self._equal_length: int | None = None
        self._rows_changed = True
        self._groups: list[_Group] = []
        self._in_groups_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    # -- rows ---------------------------------------------------------------------------------------------------

    def enter(self, prompt: PromptKeys, *, shared: bool) -> None:
        """Adds a row with this prompt."""
        row = len(self._rows)
        self._rows.append(_CacheRow(prompt, 0) if shared else _CacheRow(None, prompt.length))
        rows, capacity = self._shape
        for layer, (keys_KPD, values_KPD) in prompt.keys_and_values.items():
            if layer not in self._pool:
                # Zeros, because a masked position counts 0 times its value, which must not be NaN.
                heads, _, size = keys_KPD.shape
                keys_BKSD = keys_KPD.new_zeros(rows, heads, capacity, size)
                self._pool[layer] = (keys_BKSD, values_KPD.new_zeros(rows, heads, capacity, values_KPD.shape[2]))
            if not shared:
                keys_BKSD, values_BKSD = self._pool[layer]
                keys_BKSD[row, :, : prompt.length] = keys_KPD
                values_BKSD[row, :, : prompt.length] = values_KPD
        self._rows_changed = True

    def leave(self, row: int) -> None:
        """Removes a row. The last row takes its place."""
        last = len(self._rows) - 1
        if row != last:
            length = self._rows[last].length
            for keys_BKSD, values_BKSD in self._pool.values():
                keys_BKSD[row, :, :length] = keys_BKSD[last, :, :length]
                values_BKSD[row, :, :length] = values_BKSD[last, :, :length]
            self._rows[row] = self._rows[last]
        self._rows.pop()
        self._rows_changed = True

    def _group_rows(self) -> None:
        """Finds the rows of each shared prompt."""
        self._rows_changed = False
        rows_of: dict[PromptKeys, list[int]] = {}
        for row, cached in enumerate(self._rows):
            if cached.prompt is not None:
                rows_of.setdefault(cached.prompt, []).append(row)
        self._groups, order = [], []
        for prompt, rows in rows_of.items():
            order += rows
            neighbours = rows[-1] - rows[0] + 1 == len(rows)
            where = slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows, device=self._device)
            self._groups.append(_Group(where, prompt))
        in_order = order == list(range(len(self._rows)))
        self._in_groups_N = None if in_order else torch.tensor(order, device=self._device)

    # -- steps --------------------------------------------------------------------------------------------------

    def advance(self) -> Tensor:
        """Adds one token to every row; returns its positions (B,)."""
        if self._rows_changed:
            self._group_rows()
        positions = []
        for cached in self._rows:
            before = 0 if cached.prompt is None else cached.prompt.length
            positions.append(before + cached.length)
            cached.length += 1
        self.longest = max(positions) + 1
        lengths = [cached.length for cached in self._rows]
        self._last_B = torch.tensor(lengths, device=self._device) - 1
        self._rows_B = torch.arange(len(lengths), device=self._device)
        self._equal_length = lengths[0] if len(set(lengths)) == 1 else None
        # A GPU computes all rows in one call, whatever their lengths.
        splits = [(0, len(lengths))]
        if self._device.type == "cpu":
            splits = split_by_length(lengths)
        self._runs = [self._run(lengths, start, stop) for start, stop in splits]
        return torch.tensor(positions, device=self._device)

    def _run(self, lengths: Sequence[int], start: int, stop: int) -> _Run:
        longest = max(lengths[start:stop])
        if min(lengths[start:stop]) == longest:
            return _Run(slice(start, stop), longest, None)
        keys_BKSD, _ = next(iter(self._pool.values()))
        after_end_BS = torch.arange(longest, device=self._device) > self._last_B[start:stop].unsqueeze(1)
        mask_BS = keys_BKSD.new_zeros(after_end_BS.shape).masked_fill_(after_end_BS, -torch.inf)
        return _Run(slice(start, stop), longest, mask_BS[:, None, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Write the new token's key and value.
        keys_BKSD, values_BKSD = self._pool[layer]
        rows, heads, key_heads = query.shape[0], query.shape[1], key.shape[1]
        if self._equal_length is not None:
            keys_BKSD[:rows, :, self._equal_length - 1] = key[:, :, 0]
            values_BKSD[:rows, :, self._equal_length - 1] = value[:, :, 0]
        else:
            keys_BKSD[self._rows_B, :, self._last_B] = key[:, :, 0]
            values_BKSD[self._rows_B, :, self._last_B] = value[:, :, 0]

        # The query heads of one key head take the place of the query axis, so that no key is copied per query head.
        query_BKRD = query[:, :, 0].unflatten(1, (key_heads, heads // key_heads))
        if self._groups:
            output_BKRD = self._with_prompts(layer, query_BKRD, scale)
        else:
            outputs = []
            for run in self._runs:
                keys, values = keys_BKSD[run.rows, :, : run.longest], values_BKSD[run.rows, :, : run.longest]
                outputs.append(sdpa(query_BKRD[run.rows], keys, values, attn_mask=run.mask_B11S, scale=scale))
            output_BKRD = _joined(outputs)
        return output_BKRD.flatten(1, 2).unsqueeze(1)

    def _with_prompts(self, layer: int, query_BKRD: Tensor, scale: float) -> Tensor:
        """The outputs where some rows have a shared prompt."""
        keys_BKSD, values_BKSD = self._pool[layer]
        # Each part's output is a mean over its own tokens. The log-sum-exp says how much the part counts.
        parts = []
        for run in self._runs:
            keys, values = keys_BKSD[run.rows, :, : run.longest], values_BKSD[run.rows, :, : run.longest]
            parts.append(flash_kernel(query_BKRD[run.rows], keys, values, scale, mask=run.mask_B11S))
        own_BKRD, own_BKR = (_joined(tensors) for tensors in zip(*parts, strict=True))

        # The queries of all rows of a group attend to the prompt together, as queries of one sequence.
        parts = []
        for group in self._groups:
            keys_KPD, values_KPD = group.prompt.keys_and_values[layer]
            queries_NKRD = query_BKRD[group.rows]
            count, _, per_key, _ = queries_NKRD.shape
            together = queries_NKRD.transpose(0, 1).flatten(1, 2).unsqueeze(0)
            output, weight = flash_kernel(together, keys_KPD.unsqueeze(0), values_KPD.unsqueeze(0), scale)
            shape = (count, per_key)
            parts.append((output[0].unflatten(1, shape).transpose(0, 1), weight[0].unflatten(1, shape).transpose(0, 1)))
        prompt_NKRD, prompt_NKR = (_joined(tensors) for tensors in zip(*parts, strict=True))

        if self._in_groups_N is None:  # the groups' rows are all rows, in their order
            return _merged(own_BKRD, own_BKR, prompt_NKRD, prompt_NKR)
        own_NKRD, own_NKR = own_BKRD[self._in_groups_N], own_BKR[self._in_groups_N]
        return own_BKRD.index_copy(0, self._in_groups_N, _merged(own_NKRD, own_NKR, prompt_NKRD, prompt_NKR))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _merged(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over two parts, from the outputs and log-sum-exps of each."""
    share = torch.sigmoid(second_lse - first_lse).unsqueeze(-1)
    return torch.lerp(first.to(share.dtype), second.to(share.dtype), share).to(first.dtype)


def split_by_length(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Splits rows into runs [start, stop) of neighbours. A run ends where the next row would add more than CALL_TOKENS
    masked positions to it."""
    runs: list[tuple[int, int]] = []
    start, longest = 0, lengths[0]
    for row, length in enumerate(lengths):
        added = abs(length - longest)
        if length > longest:
            added *= row - start
        if added > CALL_TOKENS:
            runs.append((start, row))
            start, longest = row, length
        longest = max(longest, length)
    return [*runs, (start, len(lengths))]
