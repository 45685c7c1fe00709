"""Computes the loss of a policy on held-out rows: on conversations (SFT) or on pairs (DPO).

The engine computes the logprobs with the trainer's weights. `tasks.evaluation.reward_validation` does the same for
models with a scalar head.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pydantic import Field

from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import DPOSpec
from engine.losses.spec import LossSpec
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import SCHEMAS, commit_table, read_rows
from tasks.batches.rl import CHUNK_TOKENS
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, cut
from tasks.datasets.naming import row_name
from tasks.evaluation.validation_curve import validation_entry
from tasks.reports.clock import timed

Row = dict[str, Any]

Measured = tuple[list[Row], dict[str, float]]
"""(table row of each dataset row, measures of the whole dataset)."""

LogprobSum = tuple[float, int]
"""(sum of the logprobs of the trained tokens of a conversation in nats, number of these tokens)."""

NOT_MEASURED = TokenSequence(np.zeros(1, np.int32), np.zeros(1, bool))
"""Replaces a conversation that is dropped for its length, and the other conversation of its pair. It has no trained
token, so it does not count."""

DROPPED: Row = {"tokens": 0, "loss": 0.0, "margin": None}
"""The table row of a dropped conversation or pair."""

SIDES = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Kind of a dataset -> its columns that hold conversations."""


class ValidationLossPlan(Frozen):
    """Rows and loss of a validation. Equal plans of one policy give one artifact."""

    base: ArtifactRef
    """The model whose tokenizer renders the conversations."""
    dataset: ArtifactRef
    """Conversations for the cross-entropy, pairs for DPO."""
    loss: CrossEntropySpec | DPOSpec
    reference: PolicyRef | None = None
    """The reference policy of DPO."""
    lengths: LengthPlan = Field(ANY_LENGTH, exclude_if=lambda lengths: lengths == ANY_LENGTH)
    """How long a conversation may be."""
    label: str = "validation"
    """Name for readers. It is not part of the artifact's key."""

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"label", "reference"})
        reference = self.reference.state if self.reference else None
        return f"{policy.step:06d}-{digest(canonical_json([body, reference]))[:12]}"


async def validation_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """Returns the committed `validation` table of a policy, and makes it first if there is none. It has a row per
    conversation or pair. Its measures are `loss`, the mean over all trained tokens (SFT) or over the pairs (DPO), and
    for pairs also `accuracy` and `margin`, in implicit rewards.

    Raises:
        BadSpec: the dataset is not of the kind that the loss needs, or it has no token to train.
    """

    async def measure(rows: list[Row]) -> Measured:
        sums = await _logprob_sums(workspace, policy, plan, rows)
        if not isinstance(plan.loss, DPOSpec):
            return _measure_threads(sums)
        assert plan.reference is not None
        reference_sums = await _logprob_sums(workspace, plan.reference, plan, rows)
        return _measure_pairs(plan.loss, sums, reference_sums)

    needs_pairs = isinstance(plan.loss, DPOSpec)
    return await committed_validation(workspace, policy, plan, measure, needs_pairs=needs_pairs)


class ValidationPlan(Protocol):
    """What `committed_validation` needs of a plan."""

    @property
    def dataset(self) -> ArtifactRef: ...
    @property
    def label(self) -> str: ...
    @property
    def loss(self) -> LossSpec: ...
    def name(self, policy: PolicyRef) -> str: ...


async def committed_validation(
    workspace: Workspace,
    policy: PolicyRef,
    plan: ValidationPlan,
    measure: Callable[[list[Row]], Awaitable[Measured]],
    *,
    needs_pairs: bool,
) -> ArtifactRef:
    """Returns the committed `validation` table of the plan. If there is none, calls `measure` with all rows of the
    dataset and commits the result. Raises BadSpec for a dataset of the other kind."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    committed = find_artifact(store, key)
    if committed is not None:
        return committed
    expected_kind = "pairs" if needs_pairs else "threads"
    if plan.dataset.kind != expected_kind:
        raise BadSpec(f"{plan.dataset.key} holds {plan.dataset.kind}; the loss {plan.loss.kind} is of {expected_kind}")

    # Measure the rows, and name the dataset row of each table row.
    rows = read_rows(store, plan.dataset, range(plan.dataset.rows or 0))
    table, measures = await measure(rows)
    for row, record in zip(table, rows, strict=True):
        row |= {"prompt_index": record["index"], "prompt_id": record["id"]}
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(table, schema=SCHEMAS["validation"]),
            kind="validation",
            parents=(policy.uri, plan.dataset.uri),
            provenance=workspace.provenance,
            extra=validation_entry(plan.label, measures),
        )


async def _logprob_sums(
    workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan, rows: list[Row]
) -> list[list[LogprobSum]]:
    """The summed logprobs under `policy` of each row: one per conversation of the row."""
    store = workspace.open_store()
    renderer = renderer_of(store, plan.base)
    columns = SIDES[plan.dataset.kind]
    limit = plan.lengths.limit(workspace, plan.base)

    # Tokenise the conversations. A pair is dropped as a whole, because a margin needs both of its conversations.
    sequences: list[TokenSequence] = []
    for row in rows:
        name = partial(row_name, store, plan.dataset, row["index"])
        fitting: list[TokenSequence] = []
        for column in columns:
            sequence = renderer.sequence(renderer.tokenize(StringThread.from_json(str(row[column]))))
            shortened = cut(sequence, plan.lengths, limit, name=name)
            if shortened is not None:
                fitting.append(shortened)
        sequences += fitting if len(fitting) == len(columns) else [NOT_MEASURED] * len(columns)

    # Compute the logprobs in chunks, which bounds the size of one call of the engine.
    sums: list[LogprobSum] = []
    for chunk in chunks(sequences):
        with timed("train"):
            request = LogprobsRequest(policy, chunk, max_tokens=workspace.max_tokens)
            logprobs_of_chunk = await workspace.connect().logprobs(request, epoch=workspace.epoch)
        sums += [(math.fsum(logprobs), len(logprobs)) for logprobs in logprobs_of_chunk]
    if not any(tokens for _, tokens in sums):
        raise BadSpec(f"{plan.dataset.key}: none of its rows has an assistant turn, which a loss is of; give others")
    return [sums[start : start + len(columns)] for start in range(0, len(sums), len(columns))]


def chunks(sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """Yields the sequences in order, about CHUNK_TOKENS at a time."""
    chunk: list[TokenSequence] = []
    tokens = 0
    for sequence in sequences:
        chunk.append(sequence)
        tokens += len(sequence.token_ids)
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _measure_threads(sums: list[list[LogprobSum]]) -> Measured:
    """The negative log-likelihood of each conversation, and its mean over all trained tokens."""
    table: list[Row] = []
    losses: list[float] = []
    total_tokens = 0
    for ((logprob, tokens),) in sums:
        table.append({"tokens": tokens, "loss": -logprob, "margin": None})
        losses.append(-logprob)
        total_tokens += tokens
    return table, {"loss": math.fsum(losses) / total_tokens}


def _measure_pairs(
    loss: DPOSpec, sums: list[list[LogprobSum]], reference_sums: list[list[LogprobSum]]
) -> Measured:
    """The DPO loss and the margin in implicit rewards of each pair, and their means over the pairs."""
    table: list[Row] = []
    losses: list[float] = []
    margins: list[float] = []
    for (chosen, rejected), (reference_chosen, reference_rejected) in zip(sums, reference_sums, strict=True):
        tokens = chosen[1] + rejected[1]
        if not tokens:
            table.append(dict(DROPPED))
            continue
        gap = (chosen[0] - rejected[0]) - (reference_chosen[0] - reference_rejected[0])
        losses.append(dpo_loss(loss, gap))
        margins.append(loss.beta * gap)
        table.append({"tokens": tokens, "loss": losses[-1], "margin": margins[-1]})
    count = len(losses)
    ranked_correctly = sum(margin > 0 for margin in margins)
    return table, {
        "loss": math.fsum(losses) / count,
        "margin": math.fsum(margins) / count,
        "accuracy": ranked_correctly / count,
    }


def dpo_loss(loss: DPOSpec, gap: float) -> float:
    """The loss of one pair. `gap` is the summed logprob of the chosen answer minus that of the rejected one, under the
    policy, minus the same difference under the reference, in nats."""
    if loss.variant == "ipo":
        return (gap - 1 / (2 * loss.beta)) ** 2
    label_smoothing = loss.label_smoothing or 0.0
    scaled = loss.beta * gap
    return (1 - label_smoothing) * softplus(-scaled) + label_smoothing * softplus(scaled)


def softplus(x: float) -> float:
    """log(1 + e^x), without overflow for a large x."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
