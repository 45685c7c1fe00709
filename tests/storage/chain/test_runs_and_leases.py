"""Run keys and fencing epochs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage.chain import run_record
from storage.chain.leases import acquire_lease, current_epoch, lease_holder
from storage.chain.records import PolicyRef
from storage.chain.run_record import create_or_check_run, machine_info, read_run
from storage.errors import CorruptArtifact, InvalidKey, ObjectNotFound, SemanticMismatch
from storage.store import keys
from storage.store.objects import ObjectStore, open_store

SEMANTIC: dict[str, Any] = {"data": {"path": "a.jsonl", "limit": None}, "clip": [0.2, 0.28], "grader": "exact"}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def open_run(store: ObjectStore, semantic: dict[str, Any] = SEMANTIC, **options: Any) -> run_record.RunOpening:
    return create_or_check_run(store, "r", **({"semantic": semantic, "other": {}, "code_version": "c1"} | options))


@pytest.mark.parametrize("run", ["r", "deployment/2026-01-01"])
def test_the_uri_of_a_policy_names_it(run: str) -> None:
    policy = PolicyRef(run=run, stage="0-sft.critic", model="value", step=12, state="a" * 64)
    assert PolicyRef.from_uri(policy.uri) == policy
    for wrong in ("policy:r@1#a", "r/0-sft/policy@1#a", policy.uri.partition("#")[0]):
        with pytest.raises(ValueError, match="names no policy"):
            PolicyRef.from_uri(wrong)


def test_the_same_config_is_the_same_run(store: ObjectStore) -> None:
    first = open_run(store, other={"logger": "wandb"})
    assert (first.created, first.warnings) == (True, ())
    again = open_run(store, other={"logger": "stdout"})
    assert (again.created, again.warnings) == (False, ())
    assert again.info == first.info == read_run(store, "r")
    assert again.info.other == {"logger": "wandb"}
    assert open_run(store, SEMANTIC | {"clip": (0.2, 0.28)}).created is False  # a tuple is a list in JSON


def test_another_semantic_config_is_refused_with_every_difference(store: ObjectStore) -> None:
    open_run(store)
    other = {"data": {"path": "b.jsonl", "limit": None, "shuffle": True}, "clip": [0.2, 0.3]}
    with pytest.raises(SemanticMismatch) as caught:
        open_run(store, other)
    text = str(caught.value)
    assert "run 'r' was started with another configuration" in text
    for line in (
        '  data.path: the run has "a.jsonl", given "b.jsonl"\n',
        "  data.shuffle: the run has (absent), given true\n",
        "  clip: the run has [0.2, 0.28], given [0.2, 0.3]\n",
        '  grader: the run has "exact", given (absent)\n',
    ):
        assert line in text
    assert "data.limit" not in text
    assert "fork" in text
    assert not caught.value.transient
    assert open_run(store).created is False  # nothing was changed by the refusal


def test_another_code_version_package_or_machine_is_a_warning(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(store)
    machine = machine_info()
    changed = machine | {"packages": {**machine["packages"], "numpy": "0.0.1"}, "platform": "Other-1"}  # type: ignore[dict-item]
    monkeypatch.setattr(run_record, "machine_info", lambda: changed)
    opening = open_run(store, code_version="c2")
    assert not opening.created
    assert len(opening.warnings) == 3
    assert "code version: the run was started by c1, this is c2" in opening.warnings
    assert any(w.startswith("packages.numpy: the run was started with ") for w in opening.warnings)
    assert any(w.startswith("platform: ") and w.endswith('this is "Other-1"') for w in opening.warnings)


def test_of_many_creators_one_creates(store: ObjectStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        openings = list(pool.map(lambda _: open_run(store), range(12)))
    assert sum(opening.created for opening in openings) == 1
    assert len({opening.info.attempt for opening in openings}) == 1


def test_a_config_that_json_cannot_say_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        open_run(store, {"lr": float("nan")})
    with pytest.raises(TypeError):
        open_run(store, {"grader": open_run})
    assert list(store.list()) == []


def test_machine_info() -> None:
    info = machine_info()
    assert set(info) == {"python", "platform", "packages"}
    assert "pyarrow" in info["packages"]  # type: ignore[operator]


def test_unreadable_and_absent_runs(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound):
        read_run(store, "r")
    store.put(keys.run_json("r"), b'{"run": "r"')
    with pytest.raises(CorruptArtifact, match=r"runs/r/run\.json is not a readable run"):
        open_run(store)
    with pytest.raises(InvalidKey):
        create_or_check_run(store, "../r", semantic={}, other={}, code_version="c")


def test_epochs_rise(store: ObjectStore) -> None:
    assert current_epoch(store, "r") == 0
    assert [acquire_lease(store, "r", {"pid": 1}) for _ in range(3)] == [1, 2, 3]
    assert current_epoch(store, "r") == 3
    assert acquire_lease(store, "other", {}) == 1
    assert acquire_lease(store, "nightly/2026-01-01T00", {}) == 1


def test_no_epoch_is_given_twice(store: ObjectStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        epochs = list(pool.map(lambda _: acquire_lease(store, "r", {"pid": 1}), range(24)))
    assert sorted(epochs) == list(range(1, 25))


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]"])
def test_a_damaged_lease_is_named(store: ObjectStore, damaged: bytes) -> None:
    store.put(keys.lease("r", acquire_lease(store, "r", {})), damaged)
    with pytest.raises(CorruptArtifact, match="runs/r/leases/000001.json is no readable lease"):
        lease_holder(store, "r", 1)
