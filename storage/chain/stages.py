"""stage.json: the policy that each stage of a run started from, and the model that began the stage."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationError

from storage.chain.records import PolicyRef
from storage.errors import CorruptArtifact
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.objects import ObjectStore, read_json


class StageInfo(Frozen):
    """The content of stage.json, written by the first model that begins the stage."""

    start: PolicyRef
    reference: PolicyRef
    optimizer: Literal["reset"] = "reset"


def claim_stage(store: ObjectStore, start: PolicyRef) -> None:
    """Records `start` as the start of its stage, unless the stage has begun already."""
    info = StageInfo(start=start, reference=start)
    store.put_if_absent(keys.stage_json(start.run, start.stage), canonical_json(info))


def stage_owner(store: ObjectStore, run: str, stage: str) -> str | None:
    """Returns the name of the model that began the stage, or None if it has not begun. Raises CorruptArtifact."""
    key = keys.stage_json(run, stage)
    body = read_json(store, key)
    if body is None:
        return None
    try:
        return StageInfo.model_validate(body).start.model
    except ValidationError as error:
        raise CorruptArtifact(f"{key} does not say what the stage starts from: {error}") from error
