"""One step request applied to a trainer: the pure function behind a live step, a redo and a replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite

from pydantic import TypeAdapter, ValidationError

from engine.backends.protocol import Objective, Trainer, UpdateReport
from engine.errors import BadSpec, NonFiniteGradient, StepConflict
from engine.losses.spec import LossSpec
from engine.models.images import check_images_accepted
from engine.models.samples import Sample, minibatches, samples_from_table
from engine.validation_messages import describe_errors
from storage.chain.records import CommitRecord, StepRequest
from storage.failpoints import failpoint
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

_LOSS = TypeAdapter[LossSpec](LossSpec)


@dataclass(slots=True)
class StepEffect:
    """What applying a request did."""

    metrics: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    skipped: int = 0
    micro_batches: int = 0
    max_tokens: tuple[int, ...] = ()
    """Packed tokens per forward that each update kept to."""


def apply_request(
    trainer: Trainer,
    request: StepRequest,
    store: ObjectStore,
    *,
    max_tokens: int | Sequence[int],
    check: Callable[[], None] = lambda: None,
) -> StepEffect:
    """Makes the optimizer updates of `request`, each with at most `max_tokens` (one limit, or one per update) in one
    packed forward. `check` is called after each micro-batch; what it raises ends the step. On any error the trainer's
    weights are undefined: drop it.

    Raises:
        BadSpec: the loss is unknown, or the batch lacks a column the loss needs.
        SampleTooLong: a sample of the batch exceeds `max_tokens`.
        UnsupportedFragment: rows with images, and the trainer takes text only.
        NonFiniteGradient: NaN or Inf, when the request does not ask to skip such updates.
    """
    try:
        loss = _LOSS.validate_python(request.loss)
    except ValidationError as error:
        raise BadSpec(f"the loss of the step request: {describe_errors(error.errors(), request.loss)}") from error
    objective = Objective(
        loss=loss,
        temperature=request.temperature,
        old_logprobs=request.old_logprobs,
        skip_non_finite=request.nan_policy == "skip",
    )

    def after_micro_batch() -> None:
        failpoint("step.mid_gradient")
        check()

    samples = samples_from_table(read_table(store, request.batch))
    check_images_accepted(trainer, (sample.images for sample in samples), f"rows of the batch {request.batch.key}")
    if not loss.pairwise:
        samples = _trained(samples)
    updates = minibatches(samples, request.minibatches, whole_groups=loss.pairwise)
    reports = []
    limits = repeat(max_tokens) if isinstance(max_tokens, int) else max_tokens
    for minibatch, limit in zip(updates, limits, strict=False):
        try:
            report = trainer.update(
                minibatch,
                objective,
                request.optimizer,
                max_tokens=limit,
                on_micro_batch=after_micro_batch,
            )
        except NonFiniteGradient as error:
            raise NonFiniteGradient(
                f"step {request.parent.step + 1}: {error}, in the batch {request.batch.key}; look at its rows, lower "
                "the learning rate, or set skip_nan_gradients=true to leave such updates out"
            ) from error
        reports.append(report)
    return _effect(reports)


def _trained(samples: list[Sample]) -> list[Sample]:
    """Samples with at least one trained token: an empty completion teaches nothing and divides nothing."""
    return [sample for sample in samples if sample.trained]


def _effect(reports: list[UpdateReport]) -> StepEffect:
    """Metrics are means over the updates that have them as finite numbers; `tokens` is their sum."""
    values: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.metrics.items():
            if isfinite(value):
                values[name].append(value)
    means = {name: sum(found) / len(found) for name, found in sorted(values.items())}
    if reports:
        means["tokens"] = sum(report.metrics["tokens"] for report in reports)
    return StepEffect(
        metrics=means,
        updates=sum(not report.skipped for report in reports),
        skipped=sum(report.skipped for report in reports),
        micro_batches=sum(report.micro_batches for report in reports),
        max_tokens=tuple(report.max_tokens for report in reports),
    )


def require_same_request(committed: CommitRecord, request: StepRequest) -> CommitRecord:
    """The committed record if it answers this very request; the pure decision behind exactly-once."""
    if committed.request.digest() == request.digest():
        return committed
    mine, theirs = request.content(), committed.request.content()
    differing = sorted(name for name in mine if mine[name] != theirs[name])
    raise StepConflict(
        f"step {request.parent.step + 1} of {request.parent.run}/{request.parent.stage}/{request.parent.model} was "
        f"taken with batch {committed.request.batch.sha256[:12]}, not {request.batch.sha256[:12]} "
        f"(differing: {', '.join(differing)}); a committed step is never taken again: fork the run before it"
    )
