"""Applies one step request to a trainer, or measures a loss without a gradient. Live steps, redos and replays all use
this function, which commits nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite, isnan

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.backends.protocol import Objective, Trainer, UpdateReport
from engine.backends.torch.updates import (
    check_loss_fits_head,
    count_totals,
    loss_of_outputs,
    normalised_loss,
    update_metrics,
    validate_batch,
)
from engine.backends.weight_files.sketches import Sketch, sketch_to_text
from engine.errors import BadSpec, NonFiniteGradient, StepConflict
from engine.local.loaded_policies import LoadedPolicy
from engine.losses.base import PairLoss
from engine.losses.inputs import Outputs
from engine.losses.spec import LossSpec, parse_loss
from engine.models.images import check_images_accepted, images_from_rows
from engine.models.samples import (
    PER_TOKEN,
    PER_TOP,
    FloatArray,
    Sample,
    groups_of,
    minibatches,
    rows_of_lists,
    samples_from_table,
)
from engine.protocol import GROUP_COLUMNS, Measurement, MeasureRequest, TableRows, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import CommitRecord, Numerics, SkippedUpdate, StepRequest
from storage.failpoints import failpoint
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_step_table, read_table, read_tables

log = logging.getLogger(__name__)

TENSOR_DIGITS = 8
"""Number of hex digits of each tensor's digest in a commit record."""

CHUNK_TOKENS = 1 << 20
"""Tokens that are read between two checks whether the call was ended."""


@dataclass(slots=True)
class StepEffect:
    """The metrics and the counts of all optimizer updates of one step."""

    metrics: dict[str, float] = field(default_factory=dict)
    """`informative_fraction` is the fraction of the samples that have an advantage other than 0; only for a batch with
    advantages. The others are means over the updates."""
    updates: int = 0
    skipped: list[SkippedUpdate] = field(default_factory=list)
    micro_batches: int = 0
    max_tokens: tuple[int, ...] = ()
    """The limit of packed tokens per forward pass in each update."""


def apply_request(
    trainer: Trainer,
    request: StepRequest,
    store: ObjectStore,
    *,
    max_tokens: int | Sequence[int],
    check: Callable[[], None] = lambda: None,
    read: Callable[[ObjectStore, ArtifactRef], pa.Table] = read_table,
) -> StepEffect:
    """Makes the optimizer updates of `request`.

    `max_tokens` is the limit of packed tokens per forward pass: one number, or one per update. `check` is called after
    each micro-batch, and an error that it raises ends the step. After any error the trainer's weights are undefined,
    so the caller must drop the trainer. `read` reads the batch: a redo reads the store, which proves that it is intact.

    Raises:
        BadSpec: the loss is unknown, the batch lacks a column that the loss needs, the old logprobs are those of the
            forward pass and the batch is more than one update, or `max_tokens` has another number of limits than the
            step has updates.
        SampleTooLong: a sample of the batch exceeds `max_tokens`.
        UnsupportedFragment: the batch has images, and the trainer accepts only text.
        NonFiniteGradient: a gradient holds NaN or infinity, and the request does not ask to skip such updates.
    """
    objective = _objective(request)
    loss = objective.loss

    # Read the batch. A sample without trained tokens, such as an empty completion, must not count in the loss's mean.
    # A pair keeps it, since both members are needed.
    samples = samples_from_table(read(store, request.batch))
    row_of_sample = {id(sample): row for row, sample in enumerate(samples)}
    check_images_accepted(trainer, (sample.images for sample in samples), f"rows of the batch {request.batch.key}")
    if not loss.pairwise:
        samples = [sample for sample in samples if sample.trained]

    # Make one optimizer update per minibatch.
    def after_micro_batch() -> None:
        failpoint("step.mid_gradient")
        check()

    updates = _updates(samples, request, loss)
    limits = _limits(max_tokens, request, updates=len(updates))
    reports = []
    for minibatch, limit in zip(updates, limits, strict=True):
        try:
            report = trainer.update(
                minibatch, objective, request.optimizer, max_tokens=limit, on_micro_batch=after_micro_batch
            )
        except NonFiniteGradient as error:
            raise _naming_the_row(error, request, _first_bad_row(minibatch, row_of_sample)) from error
        reports.append(report)
    effect = _combined_effect(reports)
    effect.skipped += _skipped_updates(updates, reports, row_of_sample)
    for update in effect.skipped:
        log.warning("step %d of %s: %s of %s", request.parent.step + 1, request.parent.run, update, request.batch.key)
    if updates and all(sample.advantages is not None for sample in samples):
        informative = sum(bool(np.any(sample.advantages)) for sample in samples)
        effect.metrics["informative_fraction"] = informative / len(samples)
    return effect


def _naming_the_row(error: NonFiniteGradient, request: StepRequest, bad: int | None) -> NonFiniteGradient:
    """The error with the batch and its first bad row, if that is known."""
    rows = "the rows" if bad is None else f"row {bad}, the first one that is not finite,"
    return NonFiniteGradient(
        f"step {request.parent.step + 1}: {error}; look at {rows} of its batch (the key {request.batch.key} counts "
        "steps from 0), lower the learning rate, or set skip_nan_gradients=true to leave such updates out"
    )


def _skipped_updates(
    updates: Sequence[Sequence[Sample]], reports: Sequence[UpdateReport], row_of_sample: dict[int, int]
) -> list[SkippedUpdate]:
    """The updates that were skipped, each with the norm of its gradient and its first bad row."""
    skipped = []
    for number, (minibatch, report) in enumerate(zip(updates, reports, strict=True), start=1):
        if report.skipped:
            norm = "nan" if isnan(report.metrics["grad_norm"]) else "inf"
            bad = _first_bad_row(minibatch, row_of_sample)
            skipped.append(SkippedUpdate(update=number, grad_norm=norm, row=bad))
    return skipped


def _updates(samples: Sequence[Sample], request: StepRequest, loss: LossSpec) -> list[list[Sample]]:
    """The samples of each update. Raises BadSpec for several updates with the old logprobs of the forward pass."""
    updates = list(minibatches(samples, request.minibatches, whole_groups=loss.pairwise))
    if request.old_logprobs == "forward" and len(updates) > 1:
        raise BadSpec(
            f"old_logprobs='forward' needs a step of one update, and this step has {len(updates)}: the weights of a "
            "later update are not those of the old policy; give a batch with old logprobs and old_logprobs='trainer'"
        )
    return updates


def _limits(max_tokens: int | Sequence[int], request: StepRequest, *, updates: int) -> Sequence[int]:
    """The limit of packed tokens of each update: a new step has one for all, a redo the recorded ones.

    Raises BadSpec if the number of recorded limits is not the number of updates."""
    if isinstance(max_tokens, int):
        return [max_tokens] * updates
    if len(max_tokens) != updates:
        raise BadSpec(
            f"step {request.parent.step + 1} of {request.parent.run}: its batch {request.batch.key} makes {updates} "
            f"updates, and its record has the token limits of {len(max_tokens)}; the record is not that of this batch: "
            "fork the run from a step before it"
        )
    return max_tokens


def _objective(request: StepRequest) -> Objective:
    """What the updates of `request` minimise. Raises BadSpec if the loss of the request is not valid."""
    return Objective(
        loss=parse_loss(request.loss),
        temperature=request.temperature,
        old_logprobs=request.old_logprobs,
        skip_nan_gradients=request.nan_policy == "skip",
    )


def _combined_effect(reports: list[UpdateReport]) -> StepEffect:
    """Averages each metric over the updates in which it is finite. `tokens` is summed instead."""
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.metrics.items():
            if isfinite(value):
                values_by_name[name].append(value)
    effect = StepEffect(max_tokens=tuple(report.max_tokens for report in reports))
    for name, values in sorted(values_by_name.items()):
        effect.metrics[name] = sum(values) / len(values)
    if reports:
        effect.metrics["tokens"] = sum(report.metrics["tokens"] for report in reports)

    # A skipped update changed no weights, so it is no update of the step.
    for report in reports:
        effect.micro_batches += report.micro_batches
        effect.updates += not report.skipped
    return effect


def _first_bad_row(minibatch: Sequence[Sample], row_of_sample: Mapping[int, int]) -> int | None:
    """The first row of the batch's table, among those of the minibatch, with NaN or infinity in a column. `None`: there
    is none."""
    bad_rows = []
    for sample in minibatch:
        columns = [getattr(sample, name) for name in (*PER_TOKEN, *PER_TOP)]
        if not all(column is None or np.isfinite(column).all() for column in columns):
            bad_rows.append(row_of_sample[id(sample)])
    return min(bad_rows, default=None)


def require_same_request(committed: CommitRecord, request: StepRequest) -> CommitRecord:
    """Returns the committed record if it belongs to this request, so that a repeated request takes no second step.

    Raises StepConflict if another request was committed for the step."""
    if committed.request.digest() == request.digest():
        return committed

    # Name the differing fields, so that the caller sees what changed since the commit.
    content, committed_content = request.content(), committed.request.content()
    differing = sorted(name for name in content if content[name] != committed_content[name])
    raise StepConflict(
        f"step {request.parent.step + 1} of {request.parent.run}/{request.parent.stage}/{request.parent.model} was "
        f"taken with batch {committed.request.batch.sha256[:12]}, not {request.batch.sha256[:12]} "
        f"(differing: {', '.join(differing)}); a committed step is never taken again: fork the run before it"
    )


def step_record(
    request: StepRequest,
    effect: StepEffect,
    loaded: LoadedPolicy,
    numerics: Numerics,
    spec: LocalEngineSpec,
    *,
    update: Sketch,
) -> CommitRecord:
    """Returns the commit record of a step that was applied to `loaded` under `numerics`. `update` is the sketch of the
    change of its weights."""
    # The limits of the updates are recorded only if one of them differs from the engine's limit.
    limits_differ = bool(set(effect.max_tokens) - {spec.max_tokens_per_forward})
    numerics = numerics.model_copy(
        update={
            "micro_batches": effect.micro_batches,
            "max_tokens_of_updates": effect.max_tokens if limits_differ else (),
        }
    )

    weights_digest, tensor_digests = loaded.trainer.weights_digest()
    return CommitRecord(
        request=request,
        state=request.next_state(),
        controllers_out=request.controllers_in,
        metrics=effect.metrics,
        updates=effect.updates,
        skipped=len(effect.skipped),
        skipped_updates=tuple(effect.skipped),
        numerics=numerics,
        rebase=loaded.rebase,
        weights_digest=weights_digest,
        tensor_digests=tuple(tensor_digests[name][:TENSOR_DIGITS] for name in sorted(tensor_digests)),
        update_sketch=sketch_to_text(update),
    )


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


def read_sequences(store: ObjectStore, tables: Sequence[TableRows]) -> list[TokenSequence]:
    """The rows of committed tables in the form that trainers score. Raises BadSpec if a table has another number of
    rows than `tables` says, and the errors of `read_table`."""
    sequences: list[TokenSequence] = []
    names = ["token_ids", "loss_mask", "images"]
    for kind, parts in groupby(tables, key=lambda part: part.table.kind):
        group = GROUP_COLUMNS[kind]
        same_kind = list(parts)
        contents = read_tables(store, [part.table for part in same_kind], [group, *names])
        for part, table in zip(same_kind, contents, strict=True):
            if table.num_rows != len(part.rows):
                raise BadSpec(
                    f"{part.table.key} has {table.num_rows} rows, and {len(part.rows)} were given; give a bool per row"
                )
            rows = table.filter(pa.array(part.rows))
            images = rows["images"].to_pylist() if "images" in rows.column_names else [None] * rows.num_rows
            columns = (rows_of_lists(rows["token_ids"]), rows_of_lists(rows["loss_mask"]), rows[group].to_pylist())
            for ids, loss_mask, name, row_images in zip(*columns, images, strict=True):
                sequences.append(TokenSequence(ids, loss_mask, name, images_from_rows(row_images)))
    return sequences


def read_values(
    trainer: Trainer, sequences: Sequence[TokenSequence], *, max_tokens: int, deterministic: bool
) -> list[FloatArray]:
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
    if objective.loss.needs_teacher_top:
        rows = trainer.choice_logprobs(samples, temperature=temperature, max_tokens=max_tokens)
        return Outputs.of_choices(torch.from_numpy(np.concatenate(rows)))
    logprobs = trainer.logprobs(sequences, temperature=temperature, max_tokens=max_tokens)
    if objective.loss.needs_entropy:
        entropies = _flat(trainer.entropies(sequences, temperature=temperature, max_tokens=max_tokens))
    return Outputs(logprobs_N=_flat(logprobs), entropy_N=entropies)


def _flat(rows: Sequence[FloatArray]) -> Tensor:
    return torch.from_numpy(flatten(rows))


def flatten(rows: Sequence[FloatArray]) -> FloatArray:
    """(T,) float64: the numbers of all rows, one row after the other."""
    return np.concatenate([np.zeros(0), *rows])


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
