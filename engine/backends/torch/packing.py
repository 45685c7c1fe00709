"""Packing: samples laid out in one row without padding, a shared prompt computed once.

A row is a list of *segments*. A plain segment attends to itself, causally. The completions of one group form a
*fan*: the prompt stands once, and every branch attends to the prompt and, causally, to itself. No token of one
sample is ever visible to another sample's tokens (the shared prompt belongs to all of its group).

Axes: T packed token · N trained token · S sequence · G branch of a fan · Q longest branch of a fan
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import SampleTooLong
from engine.models.images import Images, PlacedImage, common_prefix_length


class Packable(Protocol):
    """What packing reads: engine.models.samples.Sample and engine.protocol.TokenSequence both have it."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def weights(self) -> list[float]: ...
    @property
    def group(self) -> str: ...
    @property
    def images(self) -> Images: ...


@dataclass(frozen=True, slots=True)
class Fan:
    """A prompt at [start, start + prefix) and the branches after it; a plain segment is a fan without branches."""

    start: int
    prefix: int
    branches: tuple[tuple[int, int], ...] = ()
    """(start, length) of each branch in the packed row."""

    @property
    def tokens(self) -> int:
        return self.prefix + sum(length for _, length in self.branches)


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed forward. The logits at `source_N` predict `target_N`, trained tokens in the order of the samples."""

    token_ids_T: Tensor
    positions_T: Tensor
    fans: tuple[Fan, ...]
    source_N: Tensor
    target_N: Tensor
    trained_S: tuple[int, ...]
    images: Images = ()
    """Those of all samples, placed in the packed row."""


def shared_prefix(samples: Sequence[Packable]) -> int:
    """Tokens that all samples begin with and none trains, images included, leaving each at least one token of its
    own."""
    shared = _shared_tokens(samples)
    if not any(sample.images for sample in samples):
        return shared
    return common_prefix_length([sample.images for sample in samples], shared)


def _shared_tokens(samples: Sequence[Packable]) -> int:
    shortest = min(len(sample.token_ids) for sample in samples) - 1
    first = samples[0]
    for position in range(shortest):
        token = first.token_ids[position]
        if any(s.token_ids[position] != token or s.weights[position] > 0 for s in samples):
            return position
    return max(shortest, 0)


def micro_batches(
    samples: Sequence[Packable], *, max_tokens: int, whole_groups: bool = False
) -> list[list[int]]:
    """Indices of the samples of each packed forward, at most `max_tokens` packed tokens each.

    Samples of a group are kept together where they fit, so that their prompt is computed once; with `whole_groups`
    always, because their loss is one (a pair).

    Raises:
        SampleTooLong: one sample alone, or a group that must stay whole, is longer than `max_tokens`.
    """
    order = sorted(range(len(samples)), key=lambda i: (samples[i].group, i))
    chosen: list[list[int]] = []
    current: list[int] = []
    used = 0
    for _, members in groupby(order, key=lambda i: samples[i].group or f"#{i}"):
        runs = _split_group(list(members), samples, max_tokens)
        if whole_groups and len(runs) > 1:
            raise SampleTooLong(
                f"the {sum(map(len, runs))} sequences of the pair {samples[runs[0][0]].group!r} have more tokens than "
                f"one packed forward takes ({max_tokens}); raise max_tokens_per_forward (max_batch_size), or shorten "
                "or drop the pair"
            )
        for index in runs:
            cost = _packed_length([samples[i] for i in index])
            if current and used + cost > max_tokens:
                chosen.append(current)
                current, used = [], 0
            current, used = current + index, used + cost
    return [*chosen, current] if current else chosen


def _split_group(members: list[int], samples: Sequence[Packable], max_tokens: int) -> list[list[int]]:
    """The members of one group in runs that fit one forward."""
    runs: list[list[int]] = [[]]
    for index in members:
        length = len(samples[index].token_ids)
        if length > max_tokens:
            group = samples[index].group
            raise SampleTooLong(
                f"a sequence {f'of the group {group!r} ' if group else ''}has {length} tokens, and one packed forward "
                f"takes {max_tokens}; raise max_tokens_per_forward (max_batch_size), or shorten or drop the sequence"
            )
        if runs[-1] and _packed_length([samples[i] for i in [*runs[-1], index]]) > max_tokens:
            runs.append([])
        runs[-1].append(index)
    return runs


def _packed_length(samples: Sequence[Packable]) -> int:
    if len(samples) == 1:
        return len(samples[0].token_ids)
    prefix = shared_prefix(samples)
    return prefix + sum(len(sample.token_ids) - prefix for sample in samples)


def longest_unit(samples: Sequence[Packable], *, whole_groups: bool) -> int:
    """The least `max_tokens` that `micro_batches` takes: packed tokens of the longest sample, or of the longest group.
    0 without samples."""
    units: dict[str, list[Packable]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.group if whole_groups and sample.group else f"#{index}", []).append(sample)
    return max((_packed_length(unit) for unit in units.values()), default=0)


def pack(samples: Sequence[Packable], *, device: torch.device) -> Packed:
    """Lays out the samples of one micro-batch; neighbours of one group share their prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    fans: list[Fan] = []
    sources: list[int] = []
    targets: list[int] = []
    images: list[PlacedImage] = []
    for _, members in groupby(range(len(samples)), key=lambda i: samples[i].group or f"#{i}"):
        rows = [samples[i] for i in members]
        fan = _lay_out(rows, tokens, positions)
        fans.append(fan)
        if fan.branches:
            images += _moved([image for image in rows[0].images if image.start < fan.prefix], fan.start)
        for row, (start, _) in zip(rows, fan.branches or ((fan.start, fan.prefix),), strict=True):
            prefix = fan.prefix if fan.branches else 0
            images += _moved(row.images, start, after=prefix)
            for position, weight in enumerate(row.weights):
                if weight > 0:
                    offset = position - prefix
                    sources.append(start + offset - 1 if offset > 0 else fan.start + prefix - 1)
                    targets.append(row.token_ids[position])
    as_tensor = lambda values: torch.tensor(values, dtype=torch.long, device=device)  # noqa: E731
    return Packed(
        token_ids_T=as_tensor(tokens),
        positions_T=as_tensor(positions),
        fans=tuple(fans),
        source_N=as_tensor(sources),
        target_N=as_tensor(targets),
        trained_S=tuple(sum(w > 0 for w in sample.weights) for sample in samples),
        images=tuple(images),
    )


def _moved(images: Iterable[PlacedImage], start: int, *, after: int = 0) -> list[PlacedImage]:
    """The images from token `after` of a sequence on, whose token `after` stands at `start` of the packed row."""
    return [replace(image, start=start + image.start - after) for image in images if image.start >= after]


def _lay_out(rows: list[Packable], tokens: list[int], positions: list[int]) -> Fan:
    """Appends one group to the packed row."""
    start = len(tokens)
    if len(rows) == 1:
        tokens += rows[0].token_ids
        positions += range(len(rows[0].token_ids))
        return Fan(start, len(rows[0].token_ids))
    prefix = shared_prefix(rows)
    tokens += rows[0].token_ids[:prefix]
    positions += range(prefix)
    branches = []
    for row in rows:
        branches.append((len(tokens), len(row.token_ids) - prefix))
        tokens += row.token_ids[prefix:]
        positions += range(prefix, len(row.token_ids))
    return Fan(start, prefix, tuple(branches))
