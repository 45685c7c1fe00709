"""Checks of samples and sequences before the first forward pass, so that a bad one costs no computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch

from engine.backends.protocol import Objective
from engine.backends.torch.packing import Packable, Packed
from engine.backends.torch.updates import count_totals, micro_batch_loss
from engine.errors import BadSpec, SampleTooLong
from engine.losses.inputs import Outputs
from engine.losses.spec import LossSpec
from engine.models.folder import CONTEXT_SOURCE
from engine.models.samples import PER_TOKEN, Sample


def check_sequences(sequences: Sequence[Packable], *, vocab_size: int, context_length: int) -> None:
    """Checks lengths and token ids. Positions beyond the context were never trained, and rotary embeddings extrapolate
    to them without an error. Ids beyond the vocabulary have no row in the embedding.

    Raises:
        SampleTooLong: a sequence is longer than the context.
        BadSpec: a token id that the model does not have.
    """
    for index, sequence in enumerate(sequences):
        token_ids = sequence.token_ids
        if len(token_ids) > context_length:
            raise SampleTooLong(
                f"a sequence of {len(token_ids)} tokens (group {sequence.group!r}) passes the model's context "
                f"of {context_length}{CONTEXT_SOURCE}; shorten it or leave it out"
            )
        is_unknown = (token_ids < 0) | (token_ids >= vocab_size)
        if is_unknown.any():
            position = int(is_unknown.argmax())
            raise BadSpec(
                f"sample {index} (group {sequence.group!r}) has the token id {token_ids[position]} at position "
                f"{position}; the model's are 0..{vocab_size - 1}. Was it rendered with another model's tokenizer?"
            )


def check_loss_fits_head(loss: LossSpec, *, scalar: bool, name: str) -> None:
    """Raises BadSpec if the model `name` does not give what the loss reads. `scalar`: it has a scalar head."""
    if (loss.reads == "values") == scalar:
        return
    if scalar:
        output, needed, fix = "one number per token", "logprobs", "a causal language model"
    else:
        output, needed, fix = "logprobs", "one number per token", "a scalar head: builder.into_scoring_model()"
    raise BadSpec(f"{name} gives {output}, and the loss {loss.kind!r} reads {needed}; train {fix}")


def check_gives(output: Literal["logprobs", "values"], *, scalar: bool, name: str) -> None:
    """Raises BadSpec if the model `name` does not give this output. `scalar`: it has a scalar head."""
    if (output == "values") == scalar:
        return
    if scalar:
        head, available, fix = "a scalar head", "values or scores", "a causal language model"
    else:
        head, available, fix = "a language head", "logprobs", "one of builder.into_scoring_model()"
    raise BadSpec(f"{name} has {head}, and no {output}; ask it for {available}, or use {fix}")


def check_pairs(samples: Sequence[Sample]) -> None:
    """Raises BadSpec, which names the pair, unless every group is a pair: two samples with trained tokens, of which one
    is preferred."""
    members: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        members[sample.group].append(sample)
    for group, pair in members.items():
        if not group:
            raise BadSpec(f"{len(pair)} samples belong to no group, and the loss is one of pairs; give each its pair")
        marks = [sample.preferred for sample in pair]
        if len(pair) != 2 or marks.count(True) != 1 or marks.count(False) != 1:
            raise BadSpec(
                f"the group {group!r} has {len(pair)} samples, preferred: {marks}; a pair has two, one of each"
            )
        for sample in pair:
            if sample.trained == 0:
                which = "preferred" if sample.preferred else "other"
                raise BadSpec(f"the {which} sample of the pair {group!r} has no trained token; leave the pair out")


def validate_batch(samples: Sequence[Sample], objective: Objective) -> None:
    """Raises the error that the loss would raise for a column that the samples lack. Every rank raises the same, before
    any of them starts a pass."""
    if not samples:
        return
    for name in PER_TOKEN:
        _check_column(samples, name)
    # Compute the loss of the shortest unit, with zeros instead of the outputs of a forward pass.
    unit = [min(samples, key=lambda sample: sample.trained)]
    if objective.loss.pairwise:
        check_pairs(samples)
        unit = [sample for sample in samples if sample.group == unit[0].group]

    def zeros(packed: Packed) -> Outputs:
        zeros_N = torch.zeros(len(packed.target_N))
        return Outputs(zeros_N, zeros_N, zeros_N)

    micro_batch_loss(zeros, unit, objective, count_totals(unit), device=torch.device("cpu"))


def _check_column(samples: Sequence[Sample], name: str) -> None:
    if len({getattr(sample, name) is None for sample in samples}) > 1:
        raise BadSpec(f"some samples of the batch have {name} and some have none; give it for all or for none")
