"""Computes a loss of a committed batch without a gradient.

The trainer reads the tokens, and the loss is computed from its numbers in float64 on the CPU, with the code of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.backends.protocol import Objective, Trainer
from engine.backends.torch.batch_checks import check_loss_fits_head, validate_batch
from engine.backends.torch.updates import count_totals, loss_of_outputs, normalised_loss, update_metrics
from engine.losses.base import PairLoss
from engine.losses.inputs import Outputs
from engine.losses.spec import parse_loss
from engine.models.images import check_images_accepted
from engine.models.samples import Sample, groups_of, samples_from_table
from engine.protocol import Measurement, MeasureRequest, TokenSequence
from storage.store.objects import ObjectStore
from storage.store.tables import read_step_table

CHUNK_TOKENS = 1 << 20
"""Tokens that are read between two checks whether the call was ended."""


def measure_batch(
    trainer: Trainer,
    request: MeasureRequest,
    store: ObjectStore,
    *,
    max_tokens: int,
    deterministic: bool,
    check: Callable[[], None] = lambda: None,
) -> Measurement:
    """The loss and the metrics of the batch, and the loss of each pair or row. `max_tokens` is the limit of packed
    tokens per forward pass, `deterministic` as in `read_values`. `check` is called from time to time, and an error that
    it raises ends the call. For the errors, see engine.protocol.Engine.measure."""
    # Check everything before the first forward pass.
    loss = parse_loss(request.loss)
    check_loss_fits_head(loss, scalar=trainer.scalar, name="the policy")
    samples = samples_from_table(read_step_table(store, request.batch))
    check_images_accepted(trainer, (sample.images for sample in samples), f"rows of the batch {request.batch.key}")
    # As in a step, a row without trained tokens does not count in the mean.
    counted = [sample for sample in samples if loss.pairwise or sample.trained]
    objective, totals = Objective(loss, request.temperature, request.old_logprobs), count_totals(counted)
    validate_batch(counted, objective)

    # Read the outputs of the model and compute the loss, chunk by chunk.
    sums: dict[str, float] = defaultdict(float)
    losses: list[float] = []
    margins: list[float] = []
    units = groups_of(counted) if loss.pairwise else [[sample] for sample in counted]
    for chunk in _chunks(units):
        check()
        outputs = _read(trainer, chunk, objective, max_tokens=max_tokens, deterministic=deterministic)
        chunk_loss, inputs = loss_of_outputs(outputs, chunk, objective)
        sums["loss"] += float(normalised_loss(chunk_loss, inputs, loss, totals))
        for name, value in chunk_loss.sums.items():
            sums[name] += float(value)
        if isinstance(chunk_loss, PairLoss):
            losses += chunk_loss.values_P.tolist()
            margins += chunk_loss.margin_P.tolist()
        else:
            terms_N = 0.0 if chunk_loss.terms is None else chunk_loss.terms[0]
            losses += inputs.sum_by_sequence(chunk_loss.values_N + terms_N).tolist()

    metrics = update_metrics(sums, forward_samples=counted, totals=totals)
    if loss.pairwise:
        tokens = tuple(sum(sample.trained for sample in unit) for unit in units)
        return Measurement(metrics=metrics, losses=tuple(losses), tokens=tokens, margins=tuple(margins))
    # A row without trained tokens has a loss of 0.
    computed = iter(losses)
    all_losses = tuple(next(computed) if sample.trained else 0.0 for sample in samples)
    return Measurement(metrics=metrics, losses=all_losses, tokens=tuple(sample.trained for sample in samples))


def read_values(
    trainer: Trainer, sequences: Sequence[TokenSequence], *, max_tokens: int, deterministic: bool
) -> list[list[float]]:
    """The values of each sequence's trained tokens. With `deterministic`, their bits do not depend on which sequences
    share a forward pass, because values become grades."""
    if deterministic:
        return [trainer.values([sequence], max_tokens=max_tokens)[0] for sequence in sequences]
    return trainer.values(sequences, max_tokens=max_tokens)


def _read(
    trainer: Trainer, samples: Sequence[Sample], objective: Objective, *, max_tokens: int, deterministic: bool
) -> Outputs:
    """The outputs of the model that the loss reads, for the trained tokens of all samples."""
    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group, s.images) for s in samples]
    if objective.loss.reads == "values":
        values = read_values(trainer, sequences, max_tokens=max_tokens, deterministic=deterministic)
        return Outputs(values_N=_flat(values))
    temperature, entropies = objective.temperature, None
    logprobs = trainer.logprobs(sequences, temperature=temperature, max_tokens=max_tokens)
    if objective.loss.needs_entropy:
        entropies = _flat(trainer.entropies(sequences, temperature=temperature, max_tokens=max_tokens))
    return Outputs(logprobs_N=_flat(logprobs), entropy_N=entropies)


def _flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float64)


def _chunks(units: Sequence[list[Sample]]) -> Iterator[list[Sample]]:
    """Yields the samples of whole units in order, about CHUNK_TOKENS tokens at a time."""
    chunk: list[Sample] = []
    tokens = 0
    for unit in units:
        chunk += unit
        tokens += sum(len(sample.token_ids) for sample in unit)
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk
