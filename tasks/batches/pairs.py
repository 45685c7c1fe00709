"""Plain code behind the batches of preferences and ratings: from dataset rows to trainable ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from engine.errors import BadSpec
from engine.models.images import images_from_rows, images_to_rows
from engine.models.scores import last_token_sequence
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import SCHEMAS, TableWriter, read_rows
from tasks.batches.rl import CHUNK_TOKENS
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, too_long
from tasks.datasets.naming import NameRow, row_name
from tasks.datasets.order import repetitions
from tasks.reports.clock import timed

Row = dict[str, Any]
_EMPTY: Row = dict.fromkeys(SCHEMAS["batch"].names)


async def pair_batch(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    reference: PolicyRef | None,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The committed batch of pairs of a step, prepared now if nobody did before: two rows of one group each. A pair of
    more tokens than `lengths` allows is an error, or dropped and counted in the manifest.

    `reference`: whose logprobs each trained token is compared with. None: the rows are for a scalar model, which scores
    each conversation as a whole.
    """

    def of_pair(record: Row, group: str, renderer: Renderer) -> list[Row]:
        return [
            _row(renderer, record[column], group, number, whole=reference is None) | {"preferred": number == 0}
            for number, column in enumerate(("chosen", "rejected"))
        ]

    return await _batch(
        workspace, policy, base, dataset, rows, of_pair, reference=reference, lengths=lengths, step=step
    )


async def rating_batch(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The committed batch of rated conversations of a step: a row each, whose one return is `res` of its metadata. One
    of more tokens than `lengths` allows is an error, or dropped and counted in the manifest."""

    def of_thread(record: Row, group: str, renderer: Renderer) -> list[Row]:
        rating = json.loads(record["metadata"] or "{}").get("res")
        if isinstance(rating, bool) or not isinstance(rating, int | float):
            raise BadSpec(
                f"{row_name(workspace.open_store(), dataset, record['index'])} has metadata res={rating!r}; expected a "
                "number, the rating that the model is to give (a dataset loaded with kind='rating' is checked for it)"
            )
        return [_row(renderer, record["thread"], group, 0, whole=True) | {"returns": [rating], "reward": rating}]

    return await _batch(workspace, policy, base, dataset, rows, of_thread, reference=None, lengths=lengths, step=step)


async def _batch(  # noqa: PLR0913  what its two callers are told, and how they read a row
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    convert: Callable[[Row, str, Renderer], list[Row]],
    *,
    reference: PolicyRef | None,
    lengths: LengthPlan,
    step: int,
) -> ArtifactRef:
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        records = read_rows(store, dataset, rows)
    renderer = renderer_of(store, base)
    fits = _Fits(workspace, base, lengths, partial(row_name, store, dataset))
    units = (
        unit
        for record, group in zip(records, _groups(records, rows), strict=True)
        if fits(unit := convert(record, group, renderer), record)
    )
    with TableWriter("batch") as writer:
        for chunk in _chunks(units):
            if reference is not None:
                await _compare(workspace, reference, chunk)
            with timed("storage"):
                writer.write(chunk)
        if not writer.rows:
            raise BadSpec(
                f"step {step + 1}: all {fits.dropped} rows of the batch were dropped for their length; raise the limit "
                "(max_tokens, max_batch_size)"
            )
        with timed("storage"):
            committed = writer.commit(
                store,
                key,
                parents=(policy.uri, dataset.uri),
                provenance=workspace.provenance,
                extra={"prompts": len(rows) - fits.dropped, "logprob_gap": None}
                | ({"dropped": fits.dropped} if fits.dropped else {}),
            )
    return require_parent(committed, policy.uri)


class _Fits:
    """Tells whether a pair, or a rated conversation, is short enough; counts those that are not."""

    def __init__(self, workspace: Workspace, base: ArtifactRef, lengths: LengthPlan, name_row: NameRow) -> None:
        self.drops, self.dropped = lengths.truncation == "drop", 0
        self.longest, self.forward = lengths.limit(workspace, base), workspace.max_tokens
        self.name_row = name_row

    def __call__(self, unit: list[Row], record: Row) -> bool:
        """Raises SampleTooLong where nothing is to be dropped."""
        length, limit = max(len(row["token_ids"]) for row in unit), self.longest
        if self.forward is not None and (limit is None or length <= limit):
            # both conversations of a pair are in one forward pass, where their common beginning stands once
            length, limit = _packed_tokens(unit), self.forward
        if limit is None or length <= limit:
            return True
        if not self.drops:
            what = "pair" if len(unit) > 1 else "conversation"
            name = f"{what} {record['id']} ({self.name_row(record['index'])})"
            raise too_long(name, length, limit, remedy="drop")
        self.dropped += 1
        return False


def _packed_tokens(unit: list[Row]) -> int:
    """Tokens of the rows in one forward pass: the beginning that they share is computed once."""
    lists = [row["token_ids"] for row in unit]
    shared, most = 0, min(map(len, lists)) - 1
    while shared < most and len({tokens[shared] for tokens in lists}) == 1:
        shared += 1
    return sum(map(len, lists)) - shared * (len(lists) - 1)


def _groups(records: Sequence[Row], rows: list[int]) -> list[str]:
    """A name per taken row: a batch that reaches into the next epoch may have the same pair twice, and they are two."""
    earlier = repetitions(rows)
    return [f"{r['id']}/{again}" if again else r["id"] for r, again in zip(records, earlier, strict=True)]


def _row(renderer: Renderer, thread: str, group: str, number: int, *, whole: bool) -> Row:
    tokenized = renderer.tokenize(StringThread.from_json(thread))
    if whole:  # no architecture with a scalar head takes images: serialize refuses them
        sequence = last_token_sequence(renderer.serialize(tokenized)[0], end=renderer.tokenizer.eos_token_ids[0])
    else:
        sequence = renderer.sequence(tokenized)
    row = {"group": group, "completion": number, "token_ids": sequence.token_ids, "weights": sequence.weights}
    images = {"images": images_to_rows(sequence.images)} if renderer.tokenizer.images else {}
    return _EMPTY | row | images


def _chunks(units: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """Whole units, about CHUNK_TOKENS at a time."""
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


async def _compare(workspace: Workspace, reference: PolicyRef, rows: list[Row]) -> None:
    """Adds the reference's logprobs to the rows."""
    sequences = [
        TokenSequence(row["token_ids"], row["weights"], row["group"], images_from_rows(row.get("images")))
        for row in rows
    ]
    with timed("train"):
        request = LogprobsRequest(reference, sequences, max_tokens=workspace.max_tokens)
        logprobs = await workspace.connect().logprobs(request, epoch=workspace.epoch)
    for row, found in zip(rows, logprobs, strict=True):
        row["reference_logprobs"] = found
