"""Packing: samples laid out in one row without padding, in which a shared prompt is computed once.

A row consists of *prefix groups*. The completions of one prompt form a group: the prompt stands once, and each branch
attends to the prompt and, causally, to itself. A single sequence is a group without branches, which attends to itself
causally. No token of one sample is visible to another sample's tokens, except the shared prompt of their group.

Axes: T packed token · N trained token · S sequence
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
    """The attributes that packing reads. engine.models.samples.Sample and engine.protocol.TokenSequence have them."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def weights(self) -> list[float]:
        """The loss mask: tokens with a weight above 0 are trained."""
        ...

    @property
    def group(self) -> str: ...
    @property
    def images(self) -> Images: ...


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prompt at [start, start + prefix) of the packed row, and the branches after it. A single sequence has no
    branches, and is the prefix."""

    start: int
    prefix: int
    branches: tuple[tuple[int, int], ...] = ()
    """(start, length) of each branch in the packed row."""

    @property
    def tokens(self) -> int:
        return self.prefix + sum(length for _, length in self.branches)


@dataclass(frozen=True, slots=True)
class Packed:
    """The inputs of one packed forward pass. The logits at the positions `source_N` predict the tokens `target_N`,
    which are the trained tokens in the order of the samples."""

    token_ids_T: Tensor
    positions_T: Tensor
    groups: tuple[PrefixGroup, ...]
    source_N: Tensor
    target_N: Tensor
    trained_S: tuple[int, ...]
    """Number of trained tokens of each sequence."""
    images: Images = ()
    """The images of all samples, placed in the packed row."""


# -- micro-batches ---------------------------------------------------------------------------------------------


def micro_batches(
    samples: Sequence[Packable], *, max_tokens: int, whole_groups: bool = False
) -> list[list[int]]:
    """Indices of the samples of each packed forward pass, which has at most `max_tokens` packed tokens.

    Samples of a group stay together where they fit, so that their prompt is computed once. With `whole_groups` they
    always do, because the loss is one of the group (a pair).

    Raises:
        SampleTooLong: a sample, or with `whole_groups` a group, has more than `max_tokens` tokens.
    """
    # Members of a group become neighbours; samples without a group come first.
    order = sorted(range(len(samples)), key=lambda index: (samples[index].group, index))
    batches: list[list[int]] = []
    current: list[int] = []
    used = 0
    for _, members in groupby(order, key=lambda index: _group_key(samples, index)):
        # The samples of a run stay together; several runs may share a micro-batch.
        runs = _split_group(list(members), samples, max_tokens)
        if whole_groups and len(runs) > 1:
            raise SampleTooLong(
                f"the {sum(map(len, runs))} sequences of the pair {samples[runs[0][0]].group!r} have more tokens than "
                f"one packed forward takes ({max_tokens}); raise max_tokens_per_forward (max_batch_size), or shorten "
                "or drop the pair"
            )
        for run in runs:
            length = _packed_length([samples[index] for index in run])
            if current and used + length > max_tokens:
                batches.append(current)
                current, used = [], 0
            current += run
            used += length
    return [*batches, current] if current else batches


def longest_unit(samples: Sequence[Packable], *, whole_groups: bool) -> int:
    """The smallest `max_tokens` that `micro_batches` accepts: packed tokens of the longest sample, or of the longest
    group. 0 without samples."""
    units: dict[str, list[Packable]] = {}
    for index, sample in enumerate(samples):
        key = _group_key(samples, index) if whole_groups else f"#{index}"
        units.setdefault(key, []).append(sample)
    return max(map(_packed_length, units.values()), default=0)


def _group_key(samples: Sequence[Packable], index: int) -> str:
    """Samples with the same key belong together. A sample without a group has a key of its own."""
    return samples[index].group or f"#{index}"


def _split_group(members: list[int], samples: Sequence[Packable], max_tokens: int) -> list[list[int]]:
    """The members of one group, in runs that fit one forward pass."""
    runs: list[list[int]] = [[]]
    for index in members:
        length = len(samples[index].token_ids)
        if length > max_tokens:
            group = samples[index].group
            owner = f"of the group {group!r} " if group else ""
            raise SampleTooLong(
                f"a sequence {owner}has {length} tokens, and one packed forward takes {max_tokens}; raise "
                "max_tokens_per_forward (max_batch_size), or shorten or drop the sequence"
            )
        # Begin another run when this sample would make the current one too long.
        longer_run = [samples[member] for member in [*runs[-1], index]]
        if runs[-1] and _packed_length(longer_run) > max_tokens:
            runs.append([])
        runs[-1].append(index)
    return runs


def _packed_length(samples: Sequence[Packable]) -> int:
    """Tokens of these samples in the packed row, in which their shared prompt stands once."""
    if len(samples) == 1:
        return len(samples[0].token_ids)
    prefix = shared_prefix(samples)
    total = sum(len(sample.token_ids) for sample in samples)
    return total - prefix * (len(samples) - 1)


def shared_prefix(samples: Sequence[Packable]) -> int:
    """Number of tokens that all samples begin with and none trains, images included. Each sample keeps at least one
    token of its own."""
    shared = _shared_tokens(samples)
    if not any(sample.images for sample in samples):
        return shared
    return common_prefix_length([sample.images for sample in samples], shared)


def _shared_tokens(samples: Sequence[Packable]) -> int:
    """Number of leading token ids that all samples have in common and none trains."""
    shortest = min(len(sample.token_ids) for sample in samples) - 1
    first = samples[0]
    for position in range(shortest):
        token = first.token_ids[position]
        for sample in samples:
            if sample.token_ids[position] != token or sample.weights[position] > 0:
                return position
    return max(shortest, 0)


# -- the packed row --------------------------------------------------------------------------------------------


def pack(samples: Sequence[Packable], *, device: torch.device) -> Packed:
    """Lays out the samples of one micro-batch. Neighbours of one group share their prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    groups: list[PrefixGroup] = []
    sources: list[int] = []
    targets: list[int] = []
    images: list[PlacedImage] = []
    for _, members in groupby(range(len(samples)), key=lambda index: _group_key(samples, index)):
        rows = [samples[index] for index in members]
        group = _lay_out(rows, tokens, positions)
        groups.append(group)
        # A shared prompt stands once in the packed row, and so do its images.
        prefix = 0
        if group.branches:
            prefix = group.prefix
            in_prompt = [image for image in rows[0].images if image.start < prefix]
            images += _moved(in_prompt, group.start)
        # The tokens that only one sample has: the whole sequence, or its branch after the shared prompt.
        own_parts = group.branches or ((group.start, group.prefix),)
        for row, (start, _) in zip(rows, own_parts, strict=True):
            images += _moved(row.images, start, after=prefix)
            for position, weight in enumerate(row.weights):
                if weight > 0:
                    sources.append(_source_of(position - prefix, start, group))
                    targets.append(row.token_ids[position])

    def as_tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Packed(
        token_ids_T=as_tensor(tokens),
        positions_T=as_tensor(positions),
        groups=tuple(groups),
        source_N=as_tensor(sources),
        target_N=as_tensor(targets),
        trained_S=tuple(_trained_tokens(sample) for sample in samples),
        images=tuple(images),
    )


def _source_of(offset: int, start: int, group: PrefixGroup) -> int:
    """Place in the packed row of the token before the one at `offset` of a part that begins at `start`."""
    if offset > 0:
        return start + offset - 1
    # The token before a branch is the last one of the prompt.
    return group.start + group.prefix - 1


def _trained_tokens(sample: Packable) -> int:
    return sum(weight > 0 for weight in sample.weights)


def _moved(images: Iterable[PlacedImage], start: int, *, after: int = 0) -> list[PlacedImage]:
    """The images of a sequence from its token `after` on, placed in the packed row, where that token is at `start`."""
    moved = []
    for image in images:
        if image.start >= after:
            moved.append(replace(image, start=start + image.start - after))
    return moved


def _lay_out(rows: list[Packable], tokens: list[int], positions: list[int]) -> PrefixGroup:
    """Appends one group to the packed row."""
    start = len(tokens)
    # A single sequence has no branches.
    if len(rows) == 1:
        length = len(rows[0].token_ids)
        tokens += rows[0].token_ids
        positions += range(length)
        return PrefixGroup(start, length)
    # The prompt once, then the rest of each sequence. The positions of each branch go on from the end of the prompt.
    prefix = shared_prefix(rows)
    tokens += rows[0].token_ids[:prefix]
    positions += range(prefix)
    branches = []
    for row in rows:
        branches.append((len(tokens), len(row.token_ids) - prefix))
        tokens += row.token_ids[prefix:]
        positions += range(prefix, len(row.token_ids))
    return PrefixGroup(start, prefix, tuple(branches))
