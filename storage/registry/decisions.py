"""Which version of a model is its champion, who said so, and why.

A decision (promote, hold, roll back) is an artifact. One that moves the champion comes to force by the next entry of
the alias's log, which names it: of two made at once over the same champion, one is in force, the other is overtaken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import JsonValue, ValidationError

from storage.errors import AliasMoved, CorruptArtifact, ObjectNotFound
from storage.registry.models import find_model, list_versions, resolve_alias
from storage.serialization import Frozen, canonical_json, digest
from storage.store import key_patterns, keys
from storage.store.artifacts import Provenance, commit_bytes, find_artifact, read_bytes
from storage.store.objects import ObjectStore

CHAMPION = "champion"
Action = Literal["promote", "hold", "rollback"]


class Decision(Frozen):
    """What was decided about one version of a model."""

    schema_version: int = 1
    id: str
    """Equal ids are one decision: of two tries to make it, the first stands."""
    model: str
    """Registry name."""
    version: str
    """Promoted, held back, or rolled back to."""
    action: Action
    champion: str | None
    """The version that was champion when it was decided; None: there was none."""
    after: int
    """Number of the champion's entry in the alias's log then; 0: there was none. A move is entry `after` + 1."""
    reasons: tuple[str, ...]
    who: str
    """A person, or the flow."""
    run: str | None = None
    """The run that asked for it."""
    evaluation: str | None = None
    """Uri of the evaluation's table that it rests on."""
    evidence: dict[str, JsonValue] = {}
    """Figures of the gate, digests of data: what a later reader needs to judge it again."""
    created: str
    """ISO time, UTC, by the decider's clock."""

    @property
    def moves(self) -> bool:
        return self.action != "hold"


class AliasEntry(Frozen):
    """One move of an alias."""

    number: int
    version: str
    action: Action = "promote"
    decision: str | None = None
    """Id of the decision; None for a move that was made without one."""
    created: str | None = None


def alias_log(store: ObjectStore, name: str, alias: str = CHAMPION) -> list[AliasEntry]:
    """Every move of the alias, oldest first. Raises CorruptArtifact."""
    found = []
    for info in store.list(keys.model_aliases_prefix(name, alias)):
        number = keys.parse_number(info.key)
        if number is not None:
            found.append(_entry(info.key, number, store.get(info.key)))
    return sorted(found, key=lambda entry: entry.number)


def champion_of(store: ObjectStore, name: str) -> AliasEntry | None:
    """The move that made the present champion, or None."""
    return next(reversed(alias_log(store, name)), None)


def previous_champion(log: Sequence[AliasEntry]) -> str | None:
    """Who was champion before the present one came, rollbacks undone: after a, b, c and a rollback to b it is a."""
    standing: list[str] = []
    for entry in log:
        if entry.action == "rollback":
            while standing and standing[-1] != entry.version:
                standing.pop()
        if not standing or standing[-1] != entry.version:
            standing.append(entry.version)
    return standing[-2] if len(standing) > 1 else None


def commit_decision(  # noqa: PLR0913 - one field of the decision each
    store: ObjectStore,
    name: str,
    version: str,
    action: Action,
    *,
    over: AliasEntry | None,
    reasons: Sequence[str],
    who: str,
    provenance: Provenance,
    decision_id: str | None = None,
    run: str | None = None,
    evaluation: str | None = None,
    evidence: dict[str, JsonValue] | None = None,
) -> Decision:  # fmt: skip
    """Commits the decision, and makes it so: the one that stands under its id, made now or before.

    Args:
        over: The champion that it was decided over, as `champion_of` gave it.
        decision_id: None: a digest of what is decided, so that the same command twice is one decision.

    Raises:
        ObjectNotFound: there is no such version.
        AliasMoved: the champion is another one by now; nothing was moved.
    """
    if find_model(store, name, version) is None:
        known = ", ".join(list_versions(store, name)) or "none"
        raise ObjectNotFound(f"model {name!r} has no version {version!r}; published: {known}")
    after = over.number if over else 0
    drafted = Decision(
        id=decision_id or digest([action, version, after, who, list(reasons)])[:16],
        model=name, version=version, action=action, champion=over.version if over else None, after=after,
        reasons=tuple(reasons), who=who, run=run, evaluation=evaluation, evidence=evidence or {},
        created=datetime.now(UTC).isoformat(),
    )  # fmt: skip
    parents = [keys.model_version(name, version), *([evaluation] if evaluation else [])]
    ref = commit_bytes(
        store, keys.model_note(name, "decisions", drafted.id), canonical_json(drafted), kind="decision", suffix=".json",
        parents=parents, provenance=provenance,
    )  # fmt: skip
    decision = _parse(read_bytes(store, ref), ref.key)
    apply_decision(store, decision)
    return decision


def apply_decision(store: ObjectStore, decision: Decision) -> None:
    """Moves the alias as the decision says, if it was not moved by it before. Raises AliasMoved."""
    if not decision.moves:
        return
    body = {
        "version": decision.version, "action": decision.action, "decision": decision.id, "created": decision.created,
    }  # fmt: skip
    number = decision.after + 1
    key = keys.model_alias(decision.model, CHAMPION, number)
    put = store.put_if_absent(key, canonical_json(body))
    there = _entry(key, number, put.data)
    if there.decision != decision.id:
        raise AliasMoved(
            f"{decision.model} was to be moved from {decision.champion or 'no champion'} to {decision.version}, but "
            f"entry {number} of its log says {there.version} since {there.created}; look at `ostinato models show "
            f"{decision.model}`, and decide again"
        )


def find_decision(store: ObjectStore, name: str, decision_id: str) -> Decision | None:
    """The decision of that id, in force or not, or None."""
    ref = find_artifact(store, keys.model_note(name, "decisions", decision_id))
    return None if ref is None else _parse(read_bytes(store, ref), ref.key)


def decisions_of(store: ObjectStore, name: str) -> list[Decision]:
    """Every decision about a model, oldest first. Raises CorruptArtifact."""
    owners = (key_patterns.artifact_of_manifest(info.key) for info in store.list(keys.model_part(name, "decisions")))
    found = (find_decision(store, name, owner.rpartition("/")[2]) for owner in owners if owner is not None)
    return sorted((decision for decision in found if decision is not None), key=lambda decision: decision.created)


def is_in_force(decision: Decision, log: Sequence[AliasEntry]) -> bool:
    """Whether it made its move. A hold always stands."""
    return not decision.moves or any(entry.decision == decision.id for entry in log)


def resolve_model(store: ObjectStore, key: str) -> str:
    """`name@version` of `name` (the latest), `name@version` or `name@alias`; anything else as it is (a folder)."""
    name, _, version = key.partition("@")
    if not keys.is_name(name) or (version and not keys.is_name(version)):
        return key
    if version and find_model(store, name, version) is not None:
        return key
    found = resolve_alias(store, name, version or "latest")
    return key if found is None else f"{name}@{found}"


def _entry(key: str, number: int, data: bytes) -> AliasEntry:
    known = ("version", "action", "decision", "created")
    try:
        body = json.loads(data)
        return AliasEntry(number=number, **{name: body[name] for name in known if name in body})
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptArtifact(f"{key} is no readable move of an alias: {error}") from error


def _parse(data: bytes, key: str) -> Decision:
    try:
        return Decision.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable decision (or of a newer version): {error}") from error
