"""Champions: the log of moves, concurrent decisions, rollbacks, and repeated decisions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.chain.deletion import delete_model
from storage.errors import AliasMoved, CorruptArtifact, InvalidKey, ObjectNotFound
from storage.inspect.audit import audit_store
from storage.inspect.gc import collect_garbage
from storage.registry.decisions import (
    CHAMPION,
    AliasEntry,
    Decision,
    alias_log,
    champion_of,
    commit_decision,
    decisions_of,
    find_decision,
    is_in_force,
    previous_champion,
    resolve_model,
    roll_back,
)
from storage.registry.models import list_versions, publish_model, resolve_alias
from storage.store import key_patterns, keys
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(f"memory://decisions-{uuid4().hex}")
    for version in ("v1", "v2", "v3"):
        (tmp_path / version).write_text(version)
        publish_model(store, "m", version, {"config.json": tmp_path / version}, provenance=PROVENANCE)
    return store


def move(store: ObjectStore, version: str, action: Any = "promote", **more: Any) -> Decision:
    more = {"over": champion_of(store, "m"), "reasons": ["because"], "who": "ada"} | more
    return commit_decision(store, "m", version, action, provenance=PROVENANCE, **more)


def versions(store: ObjectStore) -> list[str]:
    return [entry.version for entry in alias_log(store, "m")]


def test_a_promotion_is_the_next_entry_of_the_log_and_names_its_decision(store: ObjectStore) -> None:
    assert champion_of(store, "m") is None
    first = move(store, "v1", run="r", evaluation="runs/e/stages/0-evaluation/evaluations/table#ab")
    second = move(store, "v2")
    assert versions(store) == ["v1", "v2"]
    assert [entry.number for entry in alias_log(store, "m")] == [1, 2]
    assert [entry.decision for entry in alias_log(store, "m")] == [first.id, second.id]
    assert (first.champion, first.after, second.champion, second.after) == (None, 0, "v1", 1)
    assert resolve_alias(store, "m", CHAMPION) == "v2"
    parents = read_manifest(store, keys.model_note("m", "decisions", first.id)).parents
    assert parents == ("models/m/v1", "runs/e/stages/0-evaluation/evaluations/table#ab")


def test_a_hold_is_kept_and_moves_nothing(store: ObjectStore) -> None:
    move(store, "v1")
    held = move(store, "v2", "hold", reasons=["worse on sums"], evidence={"low": -0.5})
    assert versions(store) == ["v1"]
    assert decisions_of(store, "m")[-1] == held
    assert (held.reasons, held.evidence) == (("worse on sums",), {"low": -0.5})
    assert is_in_force(held, alias_log(store, "m"))


def test_the_same_decision_twice_is_one(store: ObjectStore) -> None:
    decision = move(store, "v1", decision_id="the-run")
    before = list(store.list())
    assert move(store, "v1", decision_id="the-run", over=None) == decision
    assert [info.key for info in store.list()] == [info.key for info in before]


def test_of_two_tries_under_one_id_the_first_stands_whatever_the_second_wants(store: ObjectStore) -> None:
    first = move(store, "v1", "hold", decision_id="the-run")
    assert move(store, "v1", "promote", decision_id="the-run") == first
    assert champion_of(store, "m") is None


def test_what_ended_between_the_decision_and_the_move_is_finished_by_a_retry(store: ObjectStore) -> None:
    decision = move(store, "v1", decision_id="the-run")
    store.delete(keys.model_alias("m", CHAMPION, 1))  # as if the process had died before the move
    assert not is_in_force(decision, alias_log(store, "m"))
    assert move(store, "v1", decision_id="the-run", over=None) == decision
    assert versions(store) == ["v1"]


def test_a_decision_over_a_champion_that_is_gone_is_refused_and_overtaken(store: ObjectStore) -> None:
    seen = champion_of(store, "m")
    move(store, "v1")
    with pytest.raises(AliasMoved, match=r"from no champion to v2, but entry 1 of its log says v1"):
        move(store, "v2", over=seen, decision_id="late")
    late = find_decision(store, "m", "late")
    assert late is not None and not is_in_force(late, alias_log(store, "m"))
    assert versions(store) == ["v1"]


def test_of_many_promotions_over_one_champion_one_is_in_force(store: ObjectStore) -> None:
    def promote(number: int) -> bool:
        try:
            move(store, f"v{number % 3 + 1}", over=None, decision_id=f"d{number}")
            return True
        except AliasMoved:
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(promote, range(8)))
    assert won.count(True) == 1
    log = alias_log(store, "m")
    assert [entry.decision for entry in log] == [f"d{won.index(True)}"]
    assert [is_in_force(decision, log) for decision in decisions_of(store, "m")].count(True) == 1
    assert len(decisions_of(store, "m")) == 8


def entries(*moves: str) -> list[AliasEntry]:
    """`v` promotes, `<v` rolls back to it."""
    return [
        AliasEntry(number=n, version=move.lstrip("<"), action="rollback" if move.startswith("<") else "promote")
        for n, move in enumerate(moves, 1)
    ]


@pytest.mark.parametrize(
    ("moves", "previous"),
    [
        ((), None),
        (("a",), None),
        (("a", "b"), "a"),
        (("a", "b", "c"), "b"),
        (("a", "b", "c", "<b"), "a"),  # not c, which was rolled back
        (("a", "b", "c", "<b", "<a"), None),
        (("a", "b", "<a", "c"), "a"),
        (("a", "b", "a"), "b"),  # promoted again: b came before it
    ],
)  # fmt: skip
def test_whom_a_rollback_goes_back_to(moves: tuple[str, ...], previous: str | None) -> None:
    assert previous_champion(entries(*moves)) == previous


def test_a_rollback_is_the_next_number(store: ObjectStore) -> None:
    for version in ("v1", "v2"):
        move(store, version)
    move(store, "v1", "rollback")
    assert versions(store) == ["v1", "v2", "v1"]
    assert previous_champion(alias_log(store, "m")) is None


def test_a_rollback_passes_over_versions_that_were_deleted(store: ObjectStore) -> None:
    for version in ("v1", "v2", "v3"):
        move(store, version)
    delete_model(store, "m", "v2")
    decision = roll_back(store, "m", reasons=["because"], who="ada", provenance=PROVENANCE)
    assert (decision.version, decision.champion, versions(store)) == ("v1", "v3", ["v1", "v2", "v3", "v1"])
    with pytest.raises(ObjectNotFound, match="no earlier champion than v1 is published"):
        roll_back(store, "m", reasons=["because"], who="ada", provenance=PROVENANCE)


def test_two_persons_who_saw_the_same_champion_roll_back_once(store: ObjectStore) -> None:
    for version in ("v1", "v2", "v3"):
        move(store, version)
    roll_back(store, "m", reasons=["because"], who="ada", provenance=PROVENANCE, over=3)
    with pytest.raises(AliasMoved, match="made at entry 3 of its log, but the champion has changed since"):
        roll_back(store, "m", reasons=["because"], who="bo", provenance=PROVENANCE, over=3)
    assert versions(store) == ["v1", "v2", "v3", "v2"]


def test_a_version_that_is_not_published_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound, match=r"no version 'v9'; published: v1, v2, v3"):
        move(store, "v9")
    assert decisions_of(store, "m") == []


def test_an_id_with_a_dot_is_refused(store: ObjectStore) -> None:
    with pytest.raises(InvalidKey, match="without dots"):
        move(store, "v1", decision_id="a.b")


@pytest.mark.parametrize("data", [b"not json", b"[]", b'{"action": "promote"}', b'{"version": 3}'])
def test_a_damaged_entry_is_said(store: ObjectStore, data: bytes) -> None:
    store.put(keys.model_alias("m", CHAMPION, 1), data)
    with pytest.raises(CorruptArtifact, match="000001"):
        alias_log(store, "m")


def test_decisions_are_kept_by_collections_and_pass_the_audit(store: ObjectStore) -> None:
    decision = move(store, "v1")
    move(store, "v2", "hold")
    orphan = f"{keys.model_note('m', 'decisions', decision.id)}.{'a' * 32}.json"
    store.put(orphan, b"of an attempt that was not committed")
    assert key_patterns.classify_key(orphan) == "attempt"
    assert key_patterns.owning_artifact(orphan) == keys.model_note("m", "decisions", decision.id)
    collection = collect_garbage(store, older_than=timedelta(seconds=-1), exclusive=True, dry_run=True)
    assert collection.names == (orphan,)
    report = audit_store(store)
    assert report.problems == () and report.pending == (orphan,)
    assert list_versions(store, "m") == ["v1", "v2", "v3"]


def test_a_model_by_alias_is_its_version(store: ObjectStore) -> None:
    move(store, "v1")
    assert resolve_model(store, "m@champion") == "m@v1"
    assert resolve_model(store, "m@v2") == "m@v2"
    assert resolve_model(store, "m") == "m@v3"  # the latest
    assert resolve_model(store, "m@nothing") == "m@nothing"
    assert resolve_model(store, "/a/folder") == "/a/folder"
