"""The tape of hand-written algorithms: the `train_*` calls since the last step.

`optim_step` commits the tape as one batch and takes one step with it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pyarrow as pa
from pydantic import JsonValue

from engine.errors import BadSpec
from engine.models.images import image_digests, images_from_rows, images_to_rows
from engine.protocol import TokenSequence
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import SCHEMAS, commit_table, read_step_table, table_schema

Loss = dict[str, JsonValue]
Row = dict[str, Any]


class Enqueued:
    """Returned by `train_*` calls, whose samples are then already on the tape. Awaiting it does nothing, so that
    listings with and without `await` work."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        # The yield is never reached. It makes this method a generator, which `await` needs.
        yield


@dataclass(frozen=True)
class TapeEntry:
    """The samples of one `train_*` call: one row, or the two rows of a pair."""

    loss: Loss
    rows: tuple[Row, ...]


@dataclass
class Tape:
    """The `train_*` calls since the last step. All of them have the same loss, because a batch has one loss."""

    calls: list[TapeEntry] = field(default_factory=list)

    def add(self, loss: Loss, sequence: TokenSequence, **columns: Sequence[float]) -> Enqueued:
        """Adds one sample. A column has one number per trained token.

        Raises BadSpec for wrong columns or another loss. The tape is then unchanged."""
        row = _row(sequence, columns) | {"group": prompt_group(sequence)}
        return self._append(TapeEntry(loss, (row,)))

    def add_pair(
        self,
        loss: Loss,
        preferred: TokenSequence,
        dispreferred: TokenSequence,
        **columns: tuple[Sequence[float], Sequence[float]],
    ) -> Enqueued:
        """Adds a pair of samples. A column has the numbers of the preferred sample and of the dispreferred one."""
        preferred_columns = {name: values[0] for name, values in columns.items()}
        dispreferred_columns = {name: values[1] for name, values in columns.items()}
        rows = (
            _row(preferred, preferred_columns) | {"preferred": True},
            _row(dispreferred, dispreferred_columns) | {"preferred": False},
        )
        for member, row in zip(("preferred", "dispreferred"), rows, strict=True):
            if not any(row["loss_mask"]):
                raise BadSpec(
                    f"the {member} sample of a pair has no trained token, "
                    "so nothing of it is compared; give each an assistant turn of weight above 0"
                )
        return self._append(TapeEntry(loss, rows))

    def take(self) -> list[TapeEntry]:
        """Removes and returns all calls. Calls that are added later belong to the next step."""
        calls, self.calls = self.calls, []
        return calls

    def put_back(self, calls: list[TapeEntry]) -> None:
        """Puts calls back that `take` returned, in front of later ones, so that the step can be tried again."""
        self.calls = [*calls, *self.calls]

    def _append(self, call: TapeEntry) -> Enqueued:
        if self.calls and self.calls[0].loss != call.loss:
            raise _two_losses(self.calls[0].loss, call.loss)
        self.calls.append(call)
        return Enqueued()


def commit_tape(calls: Sequence[TapeEntry], workspace: Workspace, policy: PolicyRef) -> tuple[Loss, ArtifactRef]:
    """Commits the calls as the batch of the step after `policy`. Returns their loss and the batch.

    The rows are in a canonical order, because concurrent calls arrive in any order and must make the same batch. Raises
    BadSpec if there are no calls, or calls of two losses."""
    # All calls must have one loss.
    if not calls:
        raise BadSpec("optim_step without a train_* call before it: there is no gradient to descend")
    loss = calls[0].loss
    for call in calls:
        if call.loss != loss:
            raise _two_losses(loss, call.loss)

    # Build the table.
    rows = _canonical_rows(calls)
    columns: set[str] = set()
    for row in rows:
        columns |= row.keys()
    table = pa.Table.from_pylist(rows, schema=table_schema("batch", columns))

    # Commit it as the first shard that is free or that holds the same table. A failed attempt at this step may have
    # committed another batch.
    store = workspace.open_store()
    shard = 0
    while True:
        batch = commit_table(
            store,
            keys.step_artifact(policy.run, policy.stage, policy.step, "batch", shard),
            table,
            kind="batch",
            parents=(policy.uri,),
            provenance=workspace.provenance,
        )
        if read_step_table(store, batch).equals(table):
            return loss, batch
        shard += 1


def prompt_group(sequence: TokenSequence) -> str:
    """The group name of a sequence: a digest of the tokens before its first trained one, and of its images.

    The engine computes the shared prompt of a group once."""
    first_trained = len(sequence.token_ids)
    if sequence.trained:
        first_trained = int(sequence.loss_mask.argmax())
    name = digest(canonical_json(sequence.token_ids[:first_trained].tolist()))
    if sequence.images:
        name = digest(canonical_json([name, *image_digests(sequence.images)]))
    return name[:16]


def per_token(name: str, values: Iterable[float] | float, trained: int) -> list[float]:
    """One finite number per trained token, from a list or from one number for all of them. Raises BadSpec."""
    is_scalar = isinstance(values, int | float) or getattr(values, "ndim", None) == 0
    if is_scalar:
        numbers = [float(values)] * trained  # type: ignore[arg-type]
    else:
        numbers = [float(value) for value in values]  # type: ignore[union-attr]
    if len(numbers) != trained:
        raise BadSpec(
            f"{name} has {len(numbers)} numbers for {trained} trained tokens; give one per token of weight above 0, "
            "as logprobs_per_token lists them"
        )
    if not all(map(isfinite, numbers)):
        raise BadSpec(f"{name} of a sample holds NaN or infinity: {numbers}; give finite numbers")
    return numbers


def spread_sum(name: str, total: float, trained: int) -> list[float]:
    """Splits `total` into `trained` about equal float32 numbers, since a batch has numbers per token.

    The last number corrects the rounding of the others."""
    if not isfinite(total):
        raise BadSpec(f"{name} is {total}; give a finite sum of logprobs")
    if trained == 0:
        return []
    # array("f") rounds to float32, the type of the batch's column.
    share = array("f", [total / trained])[0]
    return [*([share] * (trained - 1)), total - share * (trained - 1)]


def _row(sequence: TokenSequence, columns: dict[str, Sequence[float]]) -> Row:
    checked = {name: per_token(name, values, sequence.trained) for name, values in columns.items()}
    # Every row has all columns of the schema, so that rows of different calls make one table.
    empty: Row = dict.fromkeys(SCHEMAS["batch"].names)
    row = empty | checked | {"token_ids": sequence.token_ids.tolist(), "loss_mask": sequence.loss_mask.tolist()}
    if sequence.images:
        row["images"] = images_to_rows(sequence.images)
    return row


def _canonical_rows(calls: Sequence[TapeEntry]) -> list[Row]:
    """The rows of all calls, sorted by content. Each pair gets a group of its own, even if it equals another pair."""
    ordered: list[Row] = []
    pair_counts: Counter[str] = Counter()
    for call in sorted(calls, key=lambda call: _content(call.rows)):
        if len(call.rows) == 1:
            ordered += call.rows
            continue
        # The number keeps two equal pairs apart: a group of four samples would not be a pair.
        name = digest(_content(call.rows))[:16]
        group = f"{name}/{pair_counts[name]}"
        pair_counts[name] += 1
        ordered += [row | {"group": group} for row in call.rows]
    return [row | {"completion": number} for number, row in enumerate(ordered)]


def _content(rows: Sequence[Row]) -> bytes:
    """The bytes by which rows are sorted. Images are represented by their digests."""
    contents = []
    for row in rows:
        if "images" in row:
            row = row | {"images": image_digests(images_from_rows(row["images"]))}
        contents.append(row)
    return canonical_json(contents)


def _two_losses(first: Loss, second: Loss) -> BadSpec:
    return BadSpec(
        f"one optimizer step trains one loss; the tape has {first}, and {second} was added: call optim_step between "
        "them"
    )
