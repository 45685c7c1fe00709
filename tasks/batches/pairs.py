"""Builds the batches of preferences (pairs of answers, or labelled answers) and of ratings from dataset rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import JsonValue

from engine.errors import BadSpec
from engine.losses.spec import LossSpec
from engine.models.images import images_from_rows
from engine.models.scores import last_token_sequence
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import TableWriter, read_rows
from tasks.batches.rl import CHUNK_TOKENS, sequence_row
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, too_long
from tasks.committed import commit_once
from tasks.datasets.naming import NameRow, row_name
from tasks.datasets.order import repetitions
from tasks.reports.clock import timed
from tasks.task_runs import durable_task

Row = dict[str, Any]


@durable_task("prepare", "batch-{step:06d}")
async def prepare_preferences(  # noqa: PLR0913  the arguments of a step, and its loss
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    row_numbers: list[int],
    *,
    loss: LossSpec,
    reference: PolicyRef | None,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of a step on pairs of answers, or on rated or labelled conversations for a loss that
    is not one of pairs.

    A pair is two rows of one group. A rated conversation is one row; its `returns` hold one number, `res` of the
    metadata. These rows are a unit, which is never divided. A unit that is longer than `lengths` allows is an error, or
    dropped and counted in the manifest. The rows have the logprobs of `reference` if the loss needs them.

    Raises BadSpec for a rated conversation without `res` in its metadata, and for a labelled one with another `res`
    than 1 or 0.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key,
        lambda: _build_batch(workspace, policy, base, dataset, row_numbers, loss, reference, lengths, key, step),
        parent=policy.uri,
    )  # fmt: skip


async def _build_batch(  # noqa: PLR0913  as above
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    row_numbers: list[int],
    loss: LossSpec,
    reference: PolicyRef | None,
    lengths: LengthPlan,
    key: str,
    step: int,
) -> ArtifactRef:
    """Builds the batch of a step on pairs or rated conversations, and commits it."""
    store = workspace.open_store()
    with timed("storage"):
        records = read_rows(store, dataset, row_numbers)
    renderer = renderer_of(store, base)
    length_check = _LengthCheck(workspace, base, lengths, partial(row_name, store, dataset))

    def fitting_units() -> Iterator[list[Row]]:
        """The rows of each pair, or of each rated conversation, that is short enough."""
        for record, group in zip(records, _group_names(records, row_numbers), strict=True):
            sequences = unit_sequences(loss, record, renderer)
            unit = unit_rows(loss, record, sequences, group, renderer, partial(row_name, store, dataset))
            if length_check.fits(unit, record):
                yield unit

    # Convert the units, add the reference logprobs and write, chunk by chunk.
    units = await with_kl_baseline(workspace, policy, reference, loss, fitting_units())
    with TableWriter("batch") as writer:
        for chunk in unit_chunks(units):
            if loss.needs_reference:
                await add_reference_logprobs(workspace, reference, chunk)
            with timed("storage"):
                writer.write(chunk)
        if not writer.rows:
            raise BadSpec(
                f"step {step + 1}: all {length_check.dropped} rows of the batch were dropped for their length; raise "
                "the limit (max_tokens, max_batch_size)"
            )

        extra: dict[str, JsonValue] = {"prompts": len(row_numbers) - length_check.dropped, "logprob_gap": None}
        if length_check.dropped:
            extra["dropped"] = length_check.dropped
        with timed("storage"):
            return writer.commit(
                store,
                key,
                parents=(policy.uri, dataset.uri),
                provenance=workspace.provenance,
                extra=extra,
            )


def unit_sequences(loss: LossSpec, record: Row, renderer: Renderer) -> list[TokenSequence]:
    """The sequences of one dataset row: two of a pair, the preferred one first, or one of a conversation. A loss that
    reads values scores each conversation as a whole, at its last token."""
    columns = ("chosen", "rejected") if loss.pairwise else ("thread",)
    threads = [StringThread.from_json(record[column]) for column in columns]
    sequences = []
    for tokenized in renderer.tokenize_all(threads):
        # Models with a scalar head take no images; `serialize` raises an error for them.
        if loss.reads == "values":
            end = renderer.tokenizer.eos_token_ids[0]
            sequences.append(last_token_sequence(renderer.serialize(tokenized)[0], end=end))
        else:
            sequences.append(renderer.sequence(tokenized))
    return sequences


def unit_rows(
    loss: LossSpec, record: Row, sequences: list[TokenSequence], group: str, renderer: Renderer, name_row: NameRow
) -> list[Row]:
    """The batch rows of these sequences of one dataset row. A conversation whose score the loss compares with its
    rating has the rating as its `returns`, and a labelled one its label as `preferred`."""
    rows = [sequence_row(renderer, sequence, group, completion=number) for number, sequence in enumerate(sequences)]
    if loss.pairwise:
        rows[0]["preferred"], rows[1]["preferred"] = True, False
    elif loss.reads == "values":
        rating = _rating_of(record, name_row)
        rows[0] |= {"returns": [rating], "reward": rating}
    elif loss.labelled:
        label = _rating_of(record, name_row)
        if label not in (0, 1):
            raise BadSpec(
                f"{name_row(record['index'])} has the label {label}; expected true or 1 for a desirable answer, false "
                "or 0 for another: correct the column label, or metadata.res"
            )
        rows[0]["preferred"] = label == 1
    return rows


def _rating_of(record: Row, name_row: NameRow) -> float:
    """The rating of a conversation, `res` of its metadata. Raises BadSpec if it is not a number."""
    rating = json.loads(record["metadata"] or "{}").get("res")
    if isinstance(rating, bool) or not isinstance(rating, int | float):
        raise BadSpec(
            f"{name_row(record['index'])} has metadata res={rating!r}; expected a number, the rating "
            "that the model should predict; kind='rating' checks this when the dataset is loaded"
        )
    return float(rating)


class _LengthCheck:
    """Checks whether a pair, or a rated conversation, is short enough, and counts the dropped ones."""

    def __init__(self, workspace: Workspace, base: ArtifactRef, lengths: LengthPlan, name_row: NameRow) -> None:
        self.drops = lengths.truncation == "drop"
        self.dropped = 0
        self.max_row_tokens = lengths.limit(workspace, base)
        self.max_forward_tokens = workspace.max_tokens
        self.name_row = name_row

    def fits(self, unit: list[Row], record: Row) -> bool:
        """Returns whether the unit is short enough, and counts it if it is dropped.

        Raises SampleTooLong for one that is too long, unless such units are dropped."""
        length, limit = max(len(row["token_ids"]) for row in unit), self.max_row_tokens
        # Both conversations of a pair are in one forward pass, which computes their common beginning once.
        if self.max_forward_tokens is not None and (limit is None or length <= limit):
            length, limit = _packed_tokens(unit), self.max_forward_tokens
        if limit is None or length <= limit:
            return True
        if not self.drops:
            kind = "pair" if len(unit) > 1 else "conversation"
            name = f"{kind} {record['id']} ({self.name_row(record['index'])})"
            raise too_long(name, length, limit, remedy="drop")
        self.dropped += 1
        return False


def _packed_tokens(unit: list[Row]) -> int:
    """Tokens of the rows in one forward pass, which computes their common beginning once."""
    sequences = [row["token_ids"] for row in unit]
    # The last token of the shortest sequence is never shared, so that each sequence has a token of its own.
    shared = min(len(tokens) for tokens in sequences) - 1
    for tokens in sequences:
        differs = tokens[:shared] != sequences[0][:shared]
        if differs.any():
            shared = int(differs.argmax())
    return sum(len(tokens) for tokens in sequences) - shared * (len(sequences) - 1)


def _group_names(records: Sequence[Row], row_numbers: list[int]) -> list[str]:
    """A group name per row. A batch that reaches into the next epoch may contain a row twice; each gets its own
    name."""
    groups = []
    for record, repetition in zip(records, repetitions(row_numbers), strict=True):
        groups.append(f"{record['id']}/{repetition}" if repetition else record["id"])
    return groups


def unit_chunks(units: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yields the rows of whole units, about CHUNK_TOKENS at a time."""
    chunk: list[Row] = []
    tokens = 0
    for unit in units:
        chunk += unit
        tokens += sum(len(row["token_ids"]) for row in unit)
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


async def add_reference_logprobs(workspace: Workspace, reference: PolicyRef | None, rows: list[Row]) -> None:
    """Adds the logprobs of the trained tokens under `reference` to the rows. Raises BadSpec without a reference."""
    if reference is None:
        raise BadSpec("the loss needs the logprobs of a reference policy, and none was given; give one")
    for row, logprobs in zip(rows, await _logprobs(workspace, reference, rows), strict=True):
        row["reference_logprobs"] = logprobs


async def with_kl_baseline(
    workspace: Workspace, policy: PolicyRef, reference: PolicyRef | None, loss: LossSpec, units: Iterable[list[Row]]
) -> Iterable[list[Row]]:
    """The units of a whole batch, with the KL baseline of KTO in each row if the loss reads labels.

    The baseline is the mean log-ratio of `policy` to `reference`, in nats, over mismatched pairs, but at least 0
    (arXiv:2402.01306). A mismatched pair is the prompt of a row, which ends before its first trained token, and the
    completion of the row before it; the first row takes that of the last, as in TRL. It is cut at the end to the length
    of the longest row, so that it fits wherever the rows do.

    Raises BadSpec without a reference, and for fewer than two rows with trained tokens."""
    if not loss.labelled:
        return units
    units = list(units)
    trained = [row for (row,) in units if row["loss_mask"].any()]
    if reference is None or len(trained) < 2:
        raise BadSpec(
            f"a KL baseline needs a reference policy and two rows whose completions are swapped, and was given "
            f"{'none' if reference is None else 'one'} and {len(trained)} rows; raise samples_per_batch, or the limit "
            "of the length"
        )
    longest = max(len(row["token_ids"]) for row in trained)
    mismatched = []
    for row, other in zip(trained, [trained[-1], *trained[:-1]], strict=True):
        start, begin = int(row["loss_mask"].argmax()), int(other["loss_mask"].argmax())
        token_ids = np.concatenate([row["token_ids"][:start], other["token_ids"][begin:]])[:longest]
        loss_mask = np.concatenate([np.zeros(start, bool), other["loss_mask"][begin:]])[:longest]
        mismatched.append({"token_ids": token_ids, "loss_mask": loss_mask, "group": "", "images": row.get("images")})

    # All of one policy first, so that the engine changes the weights once.
    sums: dict[PolicyRef, float] = {}
    for source in dict.fromkeys((policy, reference)):
        logprobs: list[float] = []
        for chunk in unit_chunks([row] for row in mismatched):
            logprobs += [math.fsum(numbers) for numbers in await _logprobs(workspace, source, chunk)]
        sums[source] = math.fsum(logprobs)
    baseline = max(0.0, (sums[policy] - sums[reference]) / len(mismatched))
    for (row,) in units:
        row["kl_baseline"] = baseline
    return units


async def _logprobs(workspace: Workspace, policy: PolicyRef, rows: Sequence[Row]) -> list[list[float]]:
    """The logprobs of the trained tokens of each row under `policy`, in nats."""
    sequences = []
    for row in rows:
        images = images_from_rows(row.get("images"))
        sequences.append(TokenSequence(row["token_ids"], row["loss_mask"], row["group"], images))
    with timed("train"):
        request = LogprobsRequest(policy, sequences, max_tokens=workspace.max_tokens)
        return await workspace.connect().logprobs(request, epoch=workspace.epoch)
