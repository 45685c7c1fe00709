"""Decisions about which version of a model is its champion, with their reasons and authors.

A decision (promote, hold, roll back) is an artifact. A decision that moves the champion takes effect by the next entry
in the log of the alias. Of two decisions made at once about the same champion, only one gets that entry.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import JsonValue, ValidationError

from storage.errors import AliasMoved, CorruptArtifact, ObjectNotFound
from storage.registry.models import check_not_deleted, find_model, list_models, list_versions, resolve_alias
from storage.serialization import Frozen, canonical_json, digest
from storage.store import key_patterns, keys
from storage.store.artifacts import Provenance, commit_bytes, find_artifact, read_bytes
from storage.store.index import record_uses, used_by
from storage.store.objects import ObjectStore

CHAMPION = "champion"
Action = Literal["promote", "hold", "rollback"]


class Decision(Frozen):
    """A decision about one version of a model."""

    schema_version: int = 1
    id: str
    """Id of the decision. A second decision with the same id is not committed; the first one is returned."""
    model: str
    """Name of the registered model."""
    version: str
    """Version that is promoted, held back, or rolled back to."""
    action: Action
    champion: str | None
    """Version that was champion at the time of the decision. None if there was none."""
    after: int
    """Number of the champion's log entry at the time of the decision; 0 if there was none. A move becomes entry
    `after` + 1."""
    reasons: tuple[str, ...]
    who: str
    """The person or the flow that decided."""
    run: str | None = None
    """Key of the run that made the decision, if a run did."""
    evaluation: str | None = None
    """URI of the evaluation table that the decision is based on."""
    evidence: dict[str, JsonValue] = {}
    """Results of the gate and digests of the data, with which the decision can be checked later."""
    created: str
    """ISO time, UTC, by the clock of the process that decided."""

    @property
    def moves(self) -> bool:
        """Whether the decision moves the champion alias."""
        return self.action != "hold"


class AliasEntry(Frozen):
    """One move of an alias."""

    number: int
    version: str
    action: Action = "promote"
    decision: str | None = None
    """Id of the decision that made the move. None if there was no decision."""
    created: str | None = None


def alias_log(store: ObjectStore, name: str, alias: str = CHAMPION) -> list[AliasEntry]:
    """Returns every move of the alias, oldest first. Raises CorruptArtifact."""
    entries = []
    for info in store.list(keys.model_aliases_prefix(name, alias)):
        number = keys.parse_number(info.key)
        if number is not None:
            entries.append(_parse_entry(info.key, number, store.get(info.key)))
    return sorted(entries, key=lambda entry: entry.number)


def champion_of(store: ObjectStore, name: str) -> AliasEntry | None:
    """Returns the move that made the current champion, or None."""
    log = alias_log(store, name)
    return log[-1] if log else None


class ModelSummary(Frozen):
    """A registered model in a list."""

    model: str
    versions: int
    """Number of published versions."""
    champion: str | None
    since: str | None
    """ISO time, UTC, since which the champion is the champion."""
    by: str | None
    """Who decided that."""
    latest: str | None


def summarize_model(store: ObjectStore, name: str) -> ModelSummary:
    """Returns how many versions a model has, and which is the champion by whose decision. Raises CorruptArtifact."""
    champion, decision = champion_of(store, name), None
    if champion is not None and champion.decision is not None:
        decision = find_decision(store, name, champion.decision)
    return ModelSummary(
        model=name,
        versions=len(list_versions(store, name)),
        champion=champion.version if champion else None,
        since=champion.created if champion else None,
        by=decision.who if decision else None,
        latest=resolve_alias(store, name),
    )


def previous_champion(log: Sequence[AliasEntry], published: Collection[str] | None = None) -> str | None:
    """Returns the champion before the current one, or None. Versions that are not `published` are passed over.

    A rollback undoes the moves after its version: after a, b, c and a rollback to b, the previous champion is a.
    """
    champions: list[str] = []
    # the champions in order, without those that a rollback undid
    for entry in log:
        if entry.action == "rollback":
            while champions and champions[-1] != entry.version:
                champions.pop()
        if not champions or champions[-1] != entry.version:
            champions.append(entry.version)
    for version in reversed(champions[:-1]):
        if version != champions[-1] and (published is None or version in published):
            return version
    return None


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
    """Commits a decision and applies it. Returns the committed decision with this id, which may be an earlier one.

    Args:
        over: The current champion, as returned by `champion_of`.
        decision_id: None: a digest of the decision, so that a repeated command makes one decision.

    Raises:
        ObjectNotFound: there is no such version.
        AliasMoved: the champion has changed meanwhile; nothing was moved.
    """
    if find_model(store, name, version) is None:
        known = ", ".join(list_versions(store, name)) or "none"
        raise ObjectNotFound(f"model {name!r} has no version {version!r}; published: {known}")
    after = over.number if over else 0
    # commit the decision as an artifact
    draft = Decision(
        id=decision_id or digest([action, version, after, who, list(reasons)])[:16],
        model=name, version=version, action=action, champion=over.version if over else None, after=after,
        reasons=tuple(reasons), who=who, run=run, evaluation=evaluation, evidence=evidence or {},
        created=datetime.now(UTC).isoformat(),
    )  # fmt: skip
    parents = [keys.model_version(name, version), *([evaluation] if evaluation else [])]
    manifest_key = keys.manifest(keys.model_note(name, "decisions", draft.id))
    record_uses(store, manifest_key, used_by([*parents, *parents_of_evaluations(store, parents)]))
    ref = commit_bytes(
        store, keys.model_note(name, "decisions", draft.id), canonical_json(draft), kind="decision", suffix=".json",
        parents=parents, provenance=provenance,
    )  # fmt: skip
    # move the alias, also for a decision that was committed by an interrupted call
    decision = _parse(read_bytes(store, ref), ref.key)
    if decision.moves:
        check_not_deleted(store, keys.model_version(name, decision.version))
    apply_decision(store, decision)
    return decision


def roll_back(
    store: ObjectStore,
    name: str,
    *,
    reasons: Sequence[str],
    who: str,
    provenance: Provenance,
    over: int | None = None,
) -> Decision:
    """Makes the champion before the present one the champion again, and returns the decision.

    Args:
        over: Number of the champion's log entry that the person saw. None: the present one.

    Raises:
        ObjectNotFound: no earlier champion is published.
        AliasMoved: the champion has changed since `over`; nothing was moved.
    """
    log = alias_log(store, name)
    version = previous_champion(log, list_versions(store, name))
    check_champion(name, log[-1] if log else None, over)
    if version is None:
        reason = f"no earlier champion than {log[-1].version} is published" if log else "there is no champion"
        raise ObjectNotFound(f"{name} has no previous champion: {reason}; promote a version instead")
    return commit_decision(
        store, name, version, "rollback", over=log[-1], reasons=reasons, who=who, provenance=provenance
    )


def check_champion(name: str, champion: AliasEntry | None, over: int | None) -> None:
    """Raises AliasMoved if the number of the champion's log entry is not `over`, the number that a person saw; 0 for no
    champion, None for any."""
    if over is not None and over != (champion.number if champion else 0):
        raise AliasMoved(
            f"the decision about {name} was made at entry {over} of its log, but the champion has changed since; look "
            f"at 'ostinato models show {name}', and decide again"
        )


def parents_of_evaluations(store: ObjectStore, parents: Sequence[str]) -> list[str]:
    """Returns what the evaluations among the parents of a decision were made from: completions and their grades."""
    origins: list[str] = []
    for parent in parents:
        artifact = find_artifact(store, parent.partition("#")[0])
        if artifact is not None and artifact.kind != "model":
            origins += artifact.parents
    return origins


def apply_decision(store: ObjectStore, decision: Decision) -> None:
    """Moves the champion alias as the decision says, unless the decision moved it before. Raises AliasMoved."""
    if not decision.moves:
        return
    # the entry after the champion's: only one decision can get it
    body = {
        "version": decision.version, "action": decision.action, "decision": decision.id, "created": decision.created,
    }  # fmt: skip
    number = decision.after + 1
    key = keys.model_alias(decision.model, CHAMPION, number)
    put = store.put_if_absent(key, canonical_json(body))
    entry = _parse_entry(key, number, put.data)
    if entry.decision != decision.id:
        raise AliasMoved(
            f"{decision.model} was to be moved from {decision.champion or 'no champion'} to {decision.version}, but "
            f"entry {number} of its log says {entry.version} since {entry.created}; look at 'ostinato models show "
            f"{decision.model}', and decide again"
        )


def find_decision(store: ObjectStore, name: str, decision_id: str) -> Decision | None:
    """Returns the decision with that id, in force or not, or None."""
    ref = find_artifact(store, keys.model_note(name, "decisions", decision_id))
    if ref is None:
        return None
    return _parse(read_bytes(store, ref), ref.key)


def decisions_of(store: ObjectStore, name: str) -> list[Decision]:
    """Returns every decision about a model, oldest first. Raises CorruptArtifact."""
    decisions = []
    for info in store.list(keys.model_part(name, "decisions")):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is None:
            continue
        decision = find_decision(store, name, key.rpartition("/")[2])
        if decision is not None:
            decisions.append(decision)
    return sorted(decisions, key=lambda decision: decision.created)


def is_in_force(decision: Decision, log: Sequence[AliasEntry]) -> bool:
    """Whether the decision moved the alias. A hold is always in force."""
    return not decision.moves or any(entry.decision == decision.id for entry in log)


def resolve_model(store: ObjectStore, key: str) -> str:
    """Returns `name@version` for `name` (the latest version), `name@version` or `name@alias`.

    Anything else, such as a folder, is returned unchanged.
    """
    name, _, version = key.partition("@")
    if not keys.is_name(name) or (version and not keys.is_name(version)):
        return key
    # a version has precedence over an alias of the same name
    if version and find_model(store, name, version) is not None:
        return key
    resolved_version = resolve_alias(store, name, version or "latest")
    return key if resolved_version is None else f"{name}@{resolved_version}"


def model_names(store: ObjectStore) -> list[str]:
    """Returns `name@version` of all registered models, and `name@champion` of those that have one."""
    names = []
    for name in list_models(store):
        if champion_of(store, name) is not None:
            names.append(f"{name}@champion")
        names += [f"{name}@{version}" for version in list_versions(store, name)]
    return names


def _parse_entry(key: str, number: int, data: bytes) -> AliasEntry:
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
