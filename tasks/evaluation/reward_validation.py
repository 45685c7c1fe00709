"""Computes the loss of a reward model on held-out rows: on pairs, or on rated conversations."""

from __future__ import annotations

import math
from functools import partial

from pydantic import Field

from engine.errors import BadSpec
from engine.losses.pairs import RankingSpec
from engine.losses.values import MSESpec
from engine.models.scores import last_token_sequence
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store.artifacts import ArtifactRef
from tasks.batches.pairs import rating_of
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, check_uncut, cut
from tasks.datasets.naming import row_name
from tasks.evaluation.lm_validation import DROPPED, SIDES, Measured, Row, chunks, committed_validation, softplus
from tasks.reports.clock import timed


class ScoreValidationPlan(Frozen):
    """Rows and loss of a validation of a reward model. Equal plans of one policy give one artifact."""

    base: ArtifactRef
    """The model whose tokenizer renders the conversations."""
    dataset: ArtifactRef
    """Pairs to rank, or conversations with their rating in metadata["res"]."""
    loss: RankingSpec | MSESpec
    lengths: LengthPlan = Field(ANY_LENGTH, exclude_if=lambda lengths: lengths == ANY_LENGTH)
    """How long a conversation may be. A row with a longer one is an error, or is dropped and not measured."""
    label: str = "validation"
    """Name for readers. It is not part of the artifact's key."""

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"label"})
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"


async def score_validation(workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan) -> ArtifactRef:
    """Returns the committed `validation` table of a policy with a scalar head, and makes it first if there is none. It
    has a row per pair or conversation. Its measures are `loss`, the mean over the rows, and for pairs also `accuracy`,
    the share whose chosen answer scores higher, and `margin`, the mean difference of the scores.

    Raises:
        BadSpec: the dataset is not of the kind that the loss needs, or all rows are dropped.
        SampleTooLong: a row is too long, and `plan.lengths` does not drop it.
    """
    check_uncut(plan.lengths)
    needs_pairs = isinstance(plan.loss, RankingSpec)

    async def measure(rows: list[Row]) -> Measured:
        # Score and measure the rows that are not dropped.
        scores_of = await _scores(workspace, policy, plan, rows)
        measured_rows = [row for row in rows if row["index"] in scores_of]
        if needs_pairs:
            table, measures = measure_ranking([(chosen, rejected) for chosen, rejected in scores_of.values()])
        else:
            store = workspace.open_store()
            ratings = [rating_of(row, partial(row_name, store, plan.dataset)) for row in measured_rows]
            table, measures = measure_ratings([score for (score,) in scores_of.values()], ratings)

        # The table has a row for each row of the dataset.
        table_row_of = {row["index"]: table_row for row, table_row in zip(measured_rows, table, strict=True)}
        return [table_row_of.get(row["index"], dict(DROPPED)) for row in rows], measures

    return await committed_validation(workspace, policy, plan, measure, needs_pairs=needs_pairs)


def measure_ranking(scores: list[tuple[float, float]]) -> Measured:
    """The loss of pairs (score of the chosen answer, score of the rejected one): -log σ(s⁺ - s⁻)."""
    margins = [chosen - rejected for chosen, rejected in scores]
    losses = [softplus(-margin) for margin in margins]
    table: list[Row] = []
    for loss, margin in zip(losses, margins, strict=True):
        table.append({"tokens": 2, "loss": loss, "margin": margin})
    return table, {
        "loss": math.fsum(losses) / len(losses),
        "margin": math.fsum(margins) / len(margins),
        "accuracy": sum(margin > 0 for margin in margins) / len(margins),
    }


def measure_ratings(scores: list[float], ratings: list[float]) -> Measured:
    """The loss of scores that should be equal to the ratings: the squared error."""
    losses = [(score - rating) ** 2 for score, rating in zip(scores, ratings, strict=True)]
    table: list[Row] = [{"tokens": 1, "loss": loss, "margin": None} for loss in losses]
    return table, {"loss": math.fsum(losses) / len(losses)}


async def _scores(
    workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan, rows: list[Row]
) -> dict[int, list[float]]:
    """Index of a row -> the score of each of its conversations: the value of the scalar head at the last token. Rows
    that are dropped for their length are left out."""
    store = workspace.open_store()
    renderer = renderer_of(store, plan.base)
    limit = plan.lengths.limit(workspace, plan.base)
    columns = SIDES[plan.dataset.kind]
    end = renderer.tokenizer.eos_token_ids[0]

    # Tokenise the rows, and leave out those that are too long.
    indices: list[int] = []
    sequences: list[TokenSequence] = []
    for row in rows:
        name = partial(row_name, store, plan.dataset, row["index"])
        row_sequences = []
        for column in columns:
            tokenized = renderer.tokenize(StringThread.from_json(str(row[column])))
            row_sequences.append(last_token_sequence(renderer.serialize(tokenized)[0], end=end))
        fits = [cut(sequence, plan.lengths, limit, name=name) is not None for sequence in row_sequences]
        if all(fits):
            indices.append(row["index"])
            sequences += row_sequences
    if not indices:
        raise BadSpec(f"all rows of {plan.dataset.key} were dropped for their length; raise the limit (max_tokens)")

    # Score them in chunks, which bounds the size of one call of the engine.
    scores: list[float] = []
    for chunk in chunks(sequences):
        with timed("train"):
            request = LogprobsRequest(policy, chunk, max_tokens=workspace.max_tokens)
            values_of_chunk = await workspace.connect().values(request, epoch=workspace.epoch)
        scores += [score for (score,) in values_of_chunk]
    scores_of = {}
    for number, index in enumerate(indices):
        scores_of[index] = scores[number * len(columns) : (number + 1) * len(columns)]
    return scores_of
