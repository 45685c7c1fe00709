"""The tape of hand-written algorithms: `train_*` calls in the order made, committed as one batch by `optim_step`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pyarrow as pa
from pydantic import JsonValue

from engine.errors import BadSpec
from engine.protocol import TokenSequence
from engine.workspace import Workspace
from storage import keys
from storage.artifacts import ArtifactRef
from storage.chain import PolicyRef
from storage.models import canonical_json, digest
from storage.tables import SCHEMAS, commit_table, read_table


class Enqueued:
    """The call is on the tape already; awaiting it only waits, as the documented listings do both."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


@dataclass
class Tape:
    """Calls since the last step. All of one step share a loss: one batch has one loss."""

    loss: dict[str, JsonValue] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, loss: dict[str, Any], sequence: TokenSequence, **columns: list[float]) -> Enqueued:
        if self.loss not in (None, loss):
            raise BadSpec(
                f"one optimizer step trains one loss; the tape has {self.loss}, and {loss} was added: call "
                "optim_step between them"
            )
        for name, values in columns.items():
            if not all(map(isfinite, values)):
                raise BadSpec(f"{name} of a sample holds NaN or infinity: {values}; give finite numbers")
        self.loss = loss
        trained = [i for i, weight in enumerate(sequence.weights) if weight > 0]
        prompt = sequence.token_ids[: trained[0]] if trained else sequence.token_ids
        row: dict[str, Any] = {name: None for name in SCHEMAS["batch"].names}
        row.update(group=digest(canonical_json(prompt))[:16], completion=0, **columns)
        row.update(token_ids=sequence.token_ids, weights=sequence.weights)
        self.rows.append(row)
        return Enqueued()

    def commit(self, workspace: Workspace, policy: PolicyRef) -> tuple[dict[str, JsonValue], ArtifactRef]:
        """The tape as a batch artifact of the step after `policy`, rows in canonical order: concurrent calls
        enqueue in any order and must still make one batch."""
        if self.loss is None:
            raise BadSpec("optim_step without a train_* call before it: there is no gradient to descend")
        rows = sorted(self.rows, key=lambda row: canonical_json(row))
        rows = [row | {"completion": index} for index, row in enumerate(rows)]
        store, table = workspace.open_store(), pa.Table.from_pylist(rows, schema=SCHEMAS["batch"])
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
                return self.loss, batch
            shard += 1  # an attempt at this step that failed left another batch here

    def clear(self) -> None:
        self.loss, self.rows = None, []
