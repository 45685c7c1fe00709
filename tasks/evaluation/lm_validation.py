"""Plain code behind the loss on held-out rows: of conversations (SFT) and of pairs (DPO), by the trainer's weights."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol

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
from tasks.evaluation.validation_curve import measured
from tasks.reports.clock import timed

Row = dict[str, Any]

NOT_MEASURED = TokenSequence([0], [0.0])
"""Stands for a conversation that is dropped for its length, and for the other one of its pair: no token of it is
trained, so it counts for nothing."""

DROPPED: Row = {"tokens": 0, "loss": 0.0, "margin": None}
"""The row of a table about such a conversation or pair."""

SIDES = {"threads": ("thread",), "pairs": ("chosen", "rejected")}
"""Columns that hold conversations, by the kind of the dataset."""


class ValidationLossPlan(Frozen):
    """Which rows, under which loss. Equal plans of one policy are one artifact."""

    base: ArtifactRef
    """The model whose tokenizer renders the conversations."""
    dataset: ArtifactRef
    """Conversations for the cross-entropy, pairs for DPO."""
    loss: CrossEntropySpec | DPOSpec
    reference: PolicyRef | None = None
    """What DPO compares with."""
    lengths: LengthPlan = Field(ANY_LENGTH, exclude_if=lambda lengths: lengths == ANY_LENGTH)
    """How long a conversation may be."""
    label: str = "validation"
    """What a person calls it; decides nothing."""

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"label", "reference"})
        reference = self.reference.state if self.reference else None
        return f"{policy.step:06d}-{digest(canonical_json([body, reference]))[:12]}"


async def validation_loss(workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan) -> ArtifactRef:
    """The committed `validation` table of a policy: a row per conversation or pair. It measures `loss`, the mean over
    all trained tokens (SFT) or over the pairs (DPO); of pairs also `accuracy` and `margin`, in implicit rewards.

    Raises:
        BadSpec: the rows are not what the loss is of, or there is nothing in them to learn.
    """

    async def measure(rows: list[Row]) -> tuple[list[Row], dict[str, float]]:
        sums = await _logprobs(workspace, policy, plan, rows)
        if not isinstance(plan.loss, DPOSpec):
            return _of_threads(sums)
        assert plan.reference is not None
        return _of_pairs(plan.loss, sums, await _logprobs(workspace, plan.reference, plan, rows))

    return await committed_validation(workspace, policy, plan, measure, of_pairs=isinstance(plan.loss, DPOSpec))


class Plan(Protocol):
    """What a validation is planned to be, in the words that all have."""

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
    plan: Plan,
    measure: Callable[[list[Row]], Awaitable[tuple[list[Row], dict[str, float]]]],
    *,
    of_pairs: bool,
) -> ArtifactRef:
    """The committed table of what `measure` makes of the dataset's rows: a row each, and the measures of them all.
    Raises BadSpec for a dataset of the other kind."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    found = find_artifact(store, key)
    if found is not None:
        return found
    wanted = "pairs" if of_pairs else "threads"
    if plan.dataset.kind != wanted:
        raise BadSpec(f"{plan.dataset.key} holds {plan.dataset.kind}; the loss {plan.loss.kind} is of {wanted}")
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
            extra=measured(plan.label, measures),
        )


async def _logprobs(
    workspace: Workspace, policy: PolicyRef, plan: ValidationLossPlan, rows: list[dict[str, Any]]
) -> list[list[tuple[float, int]]]:
    """Per row and side: summed logprob of the trained tokens, nats, and how many there are."""
    store = workspace.open_store()
    renderer = renderer_of(store, plan.base)
    sides = SIDES[plan.dataset.kind]
    conversations = [StringThread.from_json(str(row[side])) for row in rows for side in sides]
    whole = [renderer.sequence(renderer.tokenize(thread)) for thread in conversations]
    limit = plan.lengths.limit(workspace, plan.base)
    sequences: list[TokenSequence] = []
    for number, row in enumerate(rows):
        name = partial(row_name, store, plan.dataset, row["index"])
        conversations_of_row = whole[number * len(sides) : (number + 1) * len(sides)]
        kept = [cut(conversation, plan.lengths, limit, name=name) for conversation in conversations_of_row]
        fitting = [conversation for conversation in kept if conversation is not None]
        sequences += fitting if len(fitting) == len(sides) else [NOT_MEASURED] * len(sides)
    flat: list[tuple[float, int]] = []
    for chunk in chunks(sequences):
        with timed("train"):
            request = LogprobsRequest(policy, chunk, max_tokens=workspace.max_tokens)
            found = await workspace.connect().logprobs(request, epoch=workspace.epoch)
        flat += [(math.fsum(logprobs), len(logprobs)) for logprobs in found]
    if not any(tokens for _, tokens in flat):
        raise BadSpec(f"{plan.dataset.key}: none of its rows has an assistant turn, which a loss is of; give others")
    return [flat[at : at + len(sides)] for at in range(0, len(flat), len(sides))]


def chunks(sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """About CHUNK_TOKENS at a time."""
    chunk: list[TokenSequence] = []
    tokens = 0
    for one in sequences:
        chunk.append(one)
        tokens += len(one.token_ids)
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _of_threads(sums: list[list[tuple[float, int]]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    table = [{"tokens": tokens, "loss": -logprob, "margin": None} for ((logprob, tokens),) in sums]
    total = sum(int(row["tokens"] or 0) for row in table)
    return table, {"loss": math.fsum(float(row["loss"] or 0.0) for row in table) / total}


def _of_pairs(
    loss: DPOSpec, sums: list[list[tuple[float, int]]], reference: list[list[tuple[float, int]]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    table: list[dict[str, Any]] = []
    for (chosen, rejected), (old_chosen, old_rejected) in zip(sums, reference, strict=True):
        tokens = chosen[1] + rejected[1]
        if not tokens:
            table.append(dict(DROPPED))
            continue
        margin = (chosen[0] - rejected[0]) - (old_chosen[0] - old_rejected[0])
        table.append({"tokens": tokens, "loss": dpo_loss(loss, margin), "margin": loss.beta * margin})
    measured_rows = [row for row in table if row["tokens"]]
    count = len(measured_rows)
    right = sum(row["margin"] > 0 for row in measured_rows)
    means = {name: math.fsum(row[name] for row in measured_rows) / count for name in ("loss", "margin")}
    return table, means | {"accuracy": right / count}


def dpo_loss(loss: DPOSpec, margin: float) -> float:
    """Of one pair, by how much the policy's summed logprobs are further apart than the reference's, nats."""
    if loss.variant == "ipo":
        return (margin - 1 / (2 * loss.beta)) ** 2
    flipped = loss.label_smoothing or 0.0
    scaled = loss.beta * margin
    return (1 - flipped) * softplus(-scaled) + flipped * softplus(scaled)


def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
