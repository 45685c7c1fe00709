"""The tape of hand-written algorithms: `train_*` calls in the order made, committed as one batch by `optim_step`."""

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
from storage.store.tables import SCHEMAS, commit_table, read_table, table_schema

Loss = dict[str, JsonValue]
Row = dict[str, Any]


class Enqueued:
    """The call is on the tape already; awaiting it only waits, as the documented listings do both."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


@dataclass(frozen=True)
class TapeEntry:
    """One `train_*` call: a row, or the two rows of a pair, which stay together."""

    loss: Loss
    rows: tuple[Row, ...]


@dataclass
class Tape:
    """Calls since the last step. All of one step share a loss: one batch has one loss."""

    calls: list[TapeEntry] = field(default_factory=list)

    def add(self, loss: Loss, sequence: TokenSequence, **columns: Sequence[float]) -> Enqueued:
        """One sample. A column has one number per trained token. Raises BadSpec, and the tape stays as it was."""
        return self._append(TapeEntry(loss, (_row(sequence, columns) | {"group": prompt_group(sequence)},)))

    def add_pair(
        self,
        loss: Loss,
        preferred: TokenSequence,
        dispreferred: TokenSequence,
        **columns: tuple[Sequence[float], Sequence[float]],
    ) -> Enqueued:
        """Two samples, of which the first is preferred; a column has the numbers of each."""
        rows = [
            _row(sequence, {name: values[place] for name, values in columns.items()}) | {"preferred": place == 0}
            for place, sequence in enumerate((preferred, dispreferred))
        ]
        for row in rows:
            if not any(weight > 0 for weight in row["weights"]):
                raise BadSpec(
                    f"the {'preferred' if row['preferred'] else 'dispreferred'} sample of a pair has no trained token, "
                    "so nothing of it is compared; give each an assistant turn of weight above 0"
                )
        return self._append(TapeEntry(loss, tuple(rows)))

    def take(self) -> list[TapeEntry]:
        """The calls so far, which leave the tape: what is added from now on belongs to the next step."""
        taken, self.calls = self.calls, []
        return taken

    def put_back(self, calls: list[TapeEntry]) -> None:
        """The calls of a step that may still be taken."""
        self.calls = [*calls, *self.calls]

    def _append(self, call: TapeEntry) -> Enqueued:
        if self.calls and self.calls[0].loss != call.loss:
            raise _two_losses(self.calls[0].loss, call.loss)
        self.calls.append(call)
        return Enqueued()


def commit_tape(calls: Sequence[TapeEntry], workspace: Workspace, policy: PolicyRef) -> tuple[Loss, ArtifactRef]:
    """(the loss, the calls as a batch artifact of the step after `policy`), rows in canonical order: concurrent calls
    enqueue in any order and must still make one batch. Raises BadSpec when there are none, or of two losses."""
    if not calls:
        raise BadSpec("optim_step without a train_* call before it: there is no gradient to descend")
    loss = calls[0].loss
    if other := [call.loss for call in calls if call.loss != loss]:
        raise _two_losses(loss, other[0])
    rows = _in_order(calls)
    schema = table_schema("batch", {name for row in rows for name in row})
    store, table = workspace.open_store(), pa.Table.from_pylist(rows, schema=schema)
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
        if read_table(store, batch).equals(table):
            return loss, batch
        shard += 1  # an attempt at this step that failed left another batch here


def prompt_group(sequence: TokenSequence) -> str:
    """A name that sequences share when they begin with the same tokens up to their first trained one, and have the same
    images: the engine computes those once."""
    first = next((place for place, weight in enumerate(sequence.weights) if weight > 0), len(sequence.token_ids))
    name = digest(canonical_json(sequence.token_ids[:first]))
    return (digest(canonical_json([name, *image_digests(sequence.images)])) if sequence.images else name)[:16]


def per_token(name: str, values: Iterable[float] | float, trained: int) -> list[float]:
    """One finite number per trained token; a single number stands for each of them. Raises BadSpec."""
    alone = isinstance(values, int | float) or getattr(values, "ndim", None) == 0
    numbers = [float(values)] * trained if alone else [float(value) for value in values]  # type: ignore[arg-type, union-attr]
    if len(numbers) != trained:
        raise BadSpec(
            f"{name} has {len(numbers)} numbers for {trained} trained tokens; give one per token of weight above 0, "
            "as logprobs_per_token lists them"
        )
    if not all(map(isfinite, numbers)):
        raise BadSpec(f"{name} of a sample holds NaN or infinity: {numbers}; give finite numbers")
    return numbers


def spread_sum(name: str, total: float, trained: int) -> list[float]:
    """`trained` float32 numbers that add up to `total`, about equal: a batch has numbers per token. The last one takes
    the rounding of the others."""
    if not isfinite(total):
        raise BadSpec(f"{name} is {total}; give a finite sum of logprobs")
    if trained == 0:
        return []
    share = array("f", [total / trained])[0]
    return [*([share] * (trained - 1)), total - share * (trained - 1)]


def _row(sequence: TokenSequence, columns: dict[str, Sequence[float]]) -> Row:
    trained = sum(weight > 0 for weight in sequence.weights)
    checked = {name: per_token(name, values, trained) for name, values in columns.items()}
    empty: Row = dict.fromkeys(SCHEMAS["batch"].names)
    row = empty | checked | {"token_ids": list(sequence.token_ids), "weights": list(sequence.weights)}
    return row | {"images": images_to_rows(sequence.images)} if sequence.images else row


def _in_order(calls: Sequence[TapeEntry]) -> list[Row]:
    """The rows of all calls, by content. A pair has a group of its own, also beside an equal pair."""
    found: list[Row] = []
    equal: Counter[str] = Counter()
    for call in sorted(calls, key=lambda call: _content(call.rows)):
        rows: tuple[Row, ...] = call.rows
        if len(rows) > 1:
            name = digest(_content(rows))[:16]
            group, equal[name] = f"{name}/{equal[name]}", equal[name] + 1
            rows = tuple(row | {"group": group} for row in rows)
        found += rows
    return [row | {"completion": number} for number, row in enumerate(found)]


def _content(rows: Sequence[Row]) -> bytes:
    """What orders rows; images by their digests."""
    return canonical_json(
        [row | {"images": image_digests(images_from_rows(row["images"]))} if "images" in row else row for row in rows]
    )


def _two_losses(first: Loss, second: Loss) -> BadSpec:
    return BadSpec(
        f"one optimizer step trains one loss; the tape has {first}, and {second} was added: call optim_step between "
        "them"
    )
