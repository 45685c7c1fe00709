"""Computes the loss of a policy on held-out rows: conversations, pairs, or rated conversations.

The held-out rows are committed as a batch once per stage. The engine measures the loss of that batch for each policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pydantic import Field, JsonValue

from engine.errors import BadSpec
from engine.losses.spec import LossSpec
from engine.protocol import Measurement, MeasureRequest
from engine.text.stored_models import renderer_of
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.tables import SCHEMAS, TableWriter, commit_table, read_rows
from tasks.batches.pairs import add_reference_logprobs, unit_chunks, unit_rows, unit_sequences, with_kl_baseline
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, check_uncut, cut
from tasks.datasets.naming import row_name
from tasks.evaluation.validation_curve import validation_entry
from tasks.reports.clock import timed
from tasks.task_runs import durable_task

Row = dict[str, Any]

UNMEASURED: Row = {"tokens": 0, "loss": 0.0, "margin": None}
"""The table row of a conversation or pair that is not measured."""


class ValidationLossPlan(Frozen):
    """Rows and loss of a validation. Equal plans of one policy give one artifact."""

    base: ArtifactRef
    """The model whose tokenizer renders the conversations."""
    dataset: ArtifactRef
    """Pairs for a loss of pairs, else conversations; for a loss that reads ratings or labels, with these in
    metadata["res"]."""
    loss: LossSpec
    reference: PolicyRef | None = None
    """The reference policy, for a loss that needs one."""
    lengths: LengthPlan = Field(ANY_LENGTH, exclude_if=lambda lengths: lengths == ANY_LENGTH)
    """How long a conversation may be. A row with a longer one is an error, or is dropped and not measured."""
    label: str = "validation"
    """Name for readers. It is not part of the artifact's key."""

    def name(self, policy: PolicyRef) -> str:
        """The name of the validation of a policy."""
        # Losses of scalar models never had a reference, and their names keep that form.
        content = self._content()
        return f"{policy.step:06d}-{_short_digest(content[0] if self.loss.reads == 'values' else content)}"

    def batch_name(self, policy: PolicyRef) -> str:
        """The name of the batch of the held-out rows, which is the same for all policies of a stage, unless it has a
        baseline of the policy."""
        name = f"held-out-{_short_digest(self._content())}"
        return f"{name}-{policy.step:06d}" if self.loss.labelled else name

    def _content(self) -> list[Any]:
        reference = self.reference.state if self.reference else None
        return [self.model_dump(mode="json", exclude={"label", "reference"}), reference]


def _short_digest(content: Any) -> str:
    return digest(canonical_json(content))[:12]


@durable_task("evaluate", "validate-{policy.step:06d}")
async def validate_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """The committed `validation` table of a policy on held-out rows. It has a row per conversation or pair.

    Its measures are `loss`, the mean over all trained tokens or over the pairs, and for pairs also `accuracy`, the
    share of pairs that the policy ranks as given, and `margin`, the mean of their margins.

    Raises:
        BadSpec: the dataset is not of the kind that the loss needs, or none of its rows can be measured.
        SampleTooLong: a row is too long, and `plan.lengths` neither shortens nor drops it.
    """
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    committed = find_artifact(store, key)
    if committed is not None:
        return committed
    expected_kind = "pairs" if plan.loss.pairwise else "threads"
    if plan.dataset.kind != expected_kind:
        raise BadSpec(f"{plan.dataset.key} holds {plan.dataset.kind}; the loss {plan.loss.kind} is of {expected_kind}")

    # Measure the loss of the held-out rows.
    batch = await _held_out_batch(workspace, policy, plan)
    loss = plan.loss.model_dump(mode="json")
    request = MeasureRequest(policy=policy, batch=batch, loss=loss, max_tokens=workspace.max_tokens)
    with timed("train"):
        measurement = await workspace.connect().measure(request, epoch=workspace.epoch)

    # Commit a table with a row for each row of the dataset.
    unmeasured = read_manifest(store, batch.key).extra["unmeasured"]
    assert isinstance(unmeasured, list)
    table: list[Row] = []
    measured = _table_rows(measurement)
    for number, record in enumerate(read_rows(store, plan.dataset, range(plan.dataset.rows or 0))):
        row = UNMEASURED if number in unmeasured else next(measured)
        table.append(row | {"prompt_index": record["index"], "prompt_id": record["id"]})
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(table, schema=SCHEMAS["validation"]),
            kind="validation",
            parents=(policy.uri, plan.dataset.uri),
            provenance=workspace.provenance,
            extra=validation_entry(plan.label, measures_of(measurement)),
        )


def measures_of(measurement: Measurement) -> dict[str, float]:
    """The loss of the whole batch, and for pairs the mean margin and the share of margins above 0."""
    measures = {"loss": measurement.metrics["loss"]}
    margins = measurement.margins
    if margins is not None:
        measures["margin"] = math.fsum(margins) / len(margins)
        measures["accuracy"] = sum(margin > 0 for margin in margins) / len(margins)
    return measures


def _table_rows(measurement: Measurement) -> Iterator[Row]:
    """The table row of each conversation or pair of the batch."""
    margins = measurement.margins or [None] * len(measurement.losses)
    for tokens, loss, margin in zip(measurement.tokens, measurement.losses, margins, strict=True):
        yield {"tokens": tokens, "loss": loss, "margin": margin}


async def _held_out_batch(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """Returns the committed batch of the held-out rows, and prepares it first if there is none. Its manifest lists the
    numbers of the rows that are not in it: those that `plan.lengths` drops, and pairs of which one answer has no
    trained token."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.batch_name(policy))
    committed = find_artifact(store, key)
    if committed is not None:
        return committed
    if plan.loss.reads == "values" or plan.loss.labelled:
        check_uncut(plan.lengths)
    renderer, limit = renderer_of(store, plan.base), plan.lengths.limit(workspace, plan.base)
    unmeasured: list[JsonValue] = []

    def units() -> Iterator[list[Row]]:
        """The rows of each pair or conversation that is measured."""
        for number, record in enumerate(read_rows(store, plan.dataset, range(plan.dataset.rows or 0))):
            whole = unit_sequences(plan.loss, record, renderer)
            name = partial(row_name, store, plan.dataset, record["index"])
            shortened = [cut(sequence, plan.lengths, limit, name=name) for sequence in whole]
            sequences = [sequence for sequence in shortened if sequence is not None]
            no_pair = plan.loss.pairwise and not all(sequence.trained for sequence in sequences)
            if len(sequences) < len(whole) or no_pair:
                unmeasured.append(number)
                continue
            # Only the two answers of a pair share a prompt.
            group = record["id"] if plan.loss.pairwise else ""
            yield unit_rows(plan.loss, record, sequences, group, renderer, partial(row_name, store, plan.dataset))

    # Convert the rows, add the reference logprobs and write, chunk by chunk.
    has_trained_tokens = False
    with TableWriter("batch") as writer:
        for chunk in unit_chunks(await with_kl_baseline(workspace, policy, plan.reference, plan.loss, units())):
            if plan.loss.needs_reference:
                await add_reference_logprobs(workspace, plan.reference, chunk)
            has_trained_tokens = has_trained_tokens or any(row["loss_mask"].any() for row in chunk)
            writer.write(chunk)
        if not writer.rows and plan.loss.reads == "values":
            raise BadSpec(f"all rows of {plan.dataset.key} were dropped for their length; raise the limit (max_tokens)")
        if not has_trained_tokens:
            raise BadSpec(
                f"{plan.dataset.key}: none of its rows has an assistant turn, which a loss is of; give others"
            )
        with timed("storage"):
            return writer.commit(
                store,
                key,
                parents=(plan.dataset.uri,) if plan.reference is None else (plan.dataset.uri, plan.reference.uri),
                provenance=workspace.provenance,
                extra={"unmeasured": unmeasured},
            )
