"""Plain code behind the loss of a reward model on held-out rows: of pairs, or of rated conversations."""

from __future__ import annotations

import json
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
from storage.store.objects import ObjectStore
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, check_uncut, cut
from tasks.datasets.naming import row_name
from tasks.evaluation.lm_validation import DROPPED, SIDES, Row, chunks, committed_validation, softplus
from tasks.reports.clock import timed


class ScoreValidationPlan(Frozen):
    """Which rows, under which loss of scores. Equal plans of one policy are one artifact."""

    base: ArtifactRef
    """The model whose tokenizer renders the conversations."""
    dataset: ArtifactRef
    """Pairs to rank, or conversations with their rating in metadata["res"]."""
    loss: RankingSpec | MSESpec
    lengths: LengthPlan = Field(ANY_LENGTH, exclude_if=lambda lengths: lengths == ANY_LENGTH)
    """How long a conversation may be. A row with a longer one is an error, or dropped: it counts for nothing."""
    label: str = "validation"
    """What a person calls it; decides nothing."""

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"label"})
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"


async def score_validation(workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan) -> ArtifactRef:
    """The committed `validation` table of a policy with a scalar head: a row per pair or conversation. It measures
    `loss`, as a mean over the rows; of pairs also `accuracy`, the share whose chosen answer scores higher, and
    `margin`, by how much on average.

    Raises:
        BadSpec: the rows are not what the loss is of, or all of them are dropped.
        SampleTooLong: a row does not fit, and is not to be dropped.
    """
    check_uncut(plan.lengths)

    async def measure(rows: list[Row]) -> tuple[list[Row], dict[str, float]]:
        scores = await _scores(workspace, policy, plan, rows)
        measured_rows = [row for row in rows if row["index"] in scores]
        if isinstance(plan.loss, RankingSpec):
            table, measures = ranked([(chosen, rejected) for chosen, rejected in scores.values()])
        else:
            store = workspace.open_store()
            ratings = [_rating(store, plan.dataset, row) for row in measured_rows]
            table, measures = rated([score for (score,) in scores.values()], ratings)
        by_index = {row["index"]: measured for row, measured in zip(measured_rows, table, strict=True)}
        return [by_index.get(row["index"], dict(DROPPED)) for row in rows], measures

    return await committed_validation(workspace, policy, plan, measure, of_pairs=isinstance(plan.loss, RankingSpec))


def ranked(scores: list[tuple[float, float]]) -> tuple[list[Row], dict[str, float]]:
    """Rows and measures of pairs (score of the chosen, of the rejected): -log σ(s⁺ - s⁻)."""
    margins = [chosen - rejected for chosen, rejected in scores]
    table = [{"tokens": 2, "loss": softplus(-margin), "margin": margin} for margin in margins]
    return table, {
        "loss": math.fsum(row["loss"] for row in table) / len(table),
        "margin": math.fsum(margins) / len(margins),
        "accuracy": sum(margin > 0 for margin in margins) / len(margins),
    }


def rated(scores: list[float], ratings: list[float]) -> tuple[list[Row], dict[str, float]]:
    """Rows and measures of scores beside the ratings that they should be: the squared error."""
    losses = [(score - rating) ** 2 for score, rating in zip(scores, ratings, strict=True)]
    table: list[Row] = [{"tokens": 1, "loss": loss, "margin": None} for loss in losses]
    return table, {"loss": math.fsum(losses) / len(losses)}


def _rating(store: ObjectStore, dataset: ArtifactRef, row: Row) -> float:
    rating = json.loads(row["metadata"] or "{}").get("res")
    if isinstance(rating, bool) or not isinstance(rating, int | float):
        name = row_name(store, dataset, row["index"])
        raise BadSpec(f"{name} has metadata res={rating!r}; expected a number, its rating")
    return float(rating)


async def _scores(
    workspace: Workspace, policy: PolicyRef, plan: ScoreValidationPlan, rows: list[Row]
) -> dict[int, list[float]]:
    """Index of a row -> per side the scalar head's number at the last token. A row that is dropped for its length is
    left out."""
    store = workspace.open_store()
    renderer, limit = renderer_of(store, plan.base), plan.lengths.limit(workspace, plan.base)
    sides, end = SIDES[plan.dataset.kind], renderer.tokenizer.eos_token_ids[0]
    kept: dict[int, list[TokenSequence]] = {}
    for row in rows:
        name = partial(row_name, store, plan.dataset, row["index"])
        threads = [renderer.tokenize(StringThread.from_json(str(row[side]))) for side in sides]
        whole = [last_token_sequence(renderer.serialize(thread)[0], end=end) for thread in threads]
        if None not in [cut(sequence, plan.lengths, limit, name=name) for sequence in whole]:
            kept[row["index"]] = whole
    if not kept:
        raise BadSpec(f"all rows of {plan.dataset.key} were dropped for their length; raise the limit (max_tokens)")
    flat: list[float] = []
    for chunk in chunks([sequence for whole in kept.values() for sequence in whole]):
        with timed("train"):
            request = LogprobsRequest(policy, chunk, max_tokens=workspace.max_tokens)
            found = await workspace.connect().values(request, epoch=workspace.epoch)
        flat += [score for (score,) in found]
    return {index: flat[at * len(sides) : (at + 1) * len(sides)] for at, index in enumerate(kept)}
