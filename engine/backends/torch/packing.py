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

import numpy as np
import torch
from torch import Tensor

from engine.errors import SampleTooLong
from engine.models.images import Images, PlacedImage, common_prefix_length
from engine.models.samples import LossMask, TokenArray


class Packable(Protocol):
    """The attributes that packing reads. engine.models.samples.Sample and engine.protocol.TokenSequence have them."""

    @property
    def token_ids(self) -> TokenArray: ...
    @property
    def loss_mask(self) -> LossMask:
        """Whether each token is trained."""
        ...

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        ...

    @property
    def group(self) -> str: ...
    @property
    def images(self) -> Images: ...
    @property
    def teacher_top_ids(self) -> TokenArray | None:
        """(n, K): further tokens whose logprobs are read before each of the n trained tokens."""
        ...


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
    choices_NK: Tensor | None = None
    """Further tokens whose logprobs are read at the same positions. None: there are none."""

    @property
    def candidates_NC(self) -> Tensor:
        """The trained token, and then the further ones, of each position."""
        target_N1 = self.target_N.unsqueeze(1)
        return target_N1 if self.choices_NK is None else torch.cat([target_N1, self.choices_NK], dim=1)


# -- micro-batches ---------------------------------------------------------------------------------------------


def micro_batches(samples: Sequence[Packable], *, max_tokens: int, whole_groups: bool = False) -> list[list[int]]:
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
        for number, run in enumerate(runs):
            length = _packed_length([samples[index] for index in run])
            # Two runs of one group in one row would be packed as one group, with a shorter common prompt.
            if current and (number > 0 or used + length > max_tokens):
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
    runs: list[list[int]] = []
    total, prefix = 0, 0
    for index in members:
        length = len(samples[index].token_ids)
        if length > max_tokens:
            group = samples[index].group
            owner = f"of the group {group!r} " if group else ""
            raise SampleTooLong(
                f"a sequence {owner}has {length} tokens, and one packed forward takes {max_tokens}; raise "
                "max_tokens_per_forward (max_batch_size), or shorten or drop the sequence"
            )
        # Add the sample to the current run, unless that makes the run too long. A prefix that all share is one that
        # each shares with the first.
        if runs:
            first = samples[runs[-1][0]]
            pair_prefix = shared_prefix([first, samples[index]])
            longer_prefix = pair_prefix if len(runs[-1]) == 1 else min(prefix, pair_prefix)
            if total + length - longer_prefix * len(runs[-1]) <= max_tokens:
                runs[-1].append(index)
                total, prefix = total + length, longer_prefix
                continue
        runs.append([index])
        total = length
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
    shared = max(min(len(sample.token_ids) for sample in samples) - 1, 0)
    first = samples[0]
    for sample in samples:
        ends_here = sample.loss_mask[:shared] | (sample.token_ids[:shared] != first.token_ids[:shared])
        shared = _first_true(ends_here)
    return shared


def _first_true(mask: LossMask) -> int:
    """Index of the first True; the length of the mask if there is none."""
    if not mask.any():
        return len(mask)
    return int(mask.argmax())


# -- the packed row --------------------------------------------------------------------------------------------


def pack(samples: Sequence[Packable], *, device: torch.device) -> Packed:
    """Lays out the samples of one micro-batch. Neighbours of one group share their prompt."""
    row = _PackedRow()
    for _, members in groupby(range(len(samples)), key=lambda index: _group_key(samples, index)):
        row.add_group([samples[index] for index in members])

    def as_tensor(parts: list[np.ndarray]) -> Tensor:
        values = np.concatenate([np.zeros(0, np.int64), *parts], dtype=np.int64)
        return torch.from_numpy(values).to(device)

    choices_NK: Tensor | None = None
    choices = [sample.teacher_top_ids for sample in samples if sample.teacher_top_ids is not None]
    if choices:
        choices_NK = torch.from_numpy(np.concatenate(choices, dtype=np.int64)).to(device)
    return Packed(
        token_ids_T=as_tensor(row.tokens),
        positions_T=as_tensor(row.positions),
        groups=tuple(row.groups),
        source_N=as_tensor(row.sources),
        target_N=as_tensor(row.targets),
        trained_S=tuple(sample.trained for sample in samples),
        images=tuple(row.images),
        choices_NK=choices_NK,
    )


class _PackedRow:
    """The parts of a packed row, in order."""

    def __init__(self) -> None:
        self.length = 0
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.groups: list[PrefixGroup] = []
        self.sources: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.images: list[PlacedImage] = []

    def add_group(self, rows: Sequence[Packable]) -> None:
        """Appends the samples of one group. A single sample is a group without branches."""
        start = self.length
        if len(rows) == 1:
            self._add_part(rows[0], 0)
            self._add_trained(rows[0], 0, start, before=start)
            self.groups.append(PrefixGroup(start, self.length - start))
            return
        # The prompt stands once in the packed row, and so do its images.
        prefix = shared_prefix(rows)
        self.tokens.append(rows[0].token_ids[:prefix])
        self.positions.append(np.arange(prefix))
        self.length += prefix
        in_prompt = [image for image in rows[0].images if image.start < prefix]
        self.images += _moved(in_prompt, start)
        # Then the rest of each sequence. The token before a branch is the last one of the prompt.
        branches = []
        for row in rows:
            branches.append((self.length, len(row.token_ids) - prefix))
            self._add_trained(row, prefix, self.length, before=start + prefix - 1)
            self._add_part(row, prefix)
        self.groups.append(PrefixGroup(start, prefix, tuple(branches)))

    def _add_part(self, row: Packable, prefix: int) -> None:
        """Appends the tokens of a sample from `prefix` on. Their positions go on from the end of the prompt."""
        self.images += _moved(row.images, self.length, after=prefix)
        self.tokens.append(row.token_ids[prefix:])
        self.positions.append(np.arange(prefix, len(row.token_ids)))
        self.length += len(row.token_ids) - prefix

    def _add_trained(self, row: Packable, prefix: int, start: int, *, before: int) -> None:
        """Appends the trained tokens of a sample, and the places of the tokens before them. The sample's token `prefix`
        is at `start`, and the token before it at `before`."""
        trained = np.flatnonzero(row.loss_mask)
        sources = trained + (start - prefix - 1)
        sources[trained == prefix] = before
        self.sources.append(sources)
        self.targets.append(row.token_ids[trained])


def _moved(images: Iterable[PlacedImage], start: int, *, after: int = 0) -> list[PlacedImage]:
    """The images of a sequence from its token `after` on, placed in the packed row, where that token is at `start`."""
    moved = []
    for image in images:
        if image.start >= after:
            moved.append(replace(image, start=start + image.start - after))
    return moved
