"""The model registry: versions never change, and no move of an alias is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from storage.errors import CorruptArtifact, InvalidKey, VersionConflict
from storage.registry.models import find_model, find_published, list_versions, publish_model, resolve_alias
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_files
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store") if request.param == "file" else f"memory://registry-{uuid4().hex}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_text("weights")
    return tmp_path / "model"


def publish(store: ObjectStore, folder: Path, version: str = "1", name: str = "smol") -> ArtifactRef:
    files = {path.name: path for path in folder.iterdir()}
    return publish_model(store, name, version, files, provenance=PROVENANCE, parents=("policy:x",), extra={"a": 1})


def test_a_version_is_a_plain_folder(store: ObjectStore, folder: Path) -> None:
    ref = publish(store, folder)
    assert (ref.kind, ref.key, ref.parents) == ("model", "models/smol/1", ("policy:x",))
    assert store.get("models/smol/1/config.json") == b"{}"
    assert store.get("models/smol/1/model.safetensors") == b"weights"
    assert find_model(store, "smol", "1") == find_model(store, "smol") == ref
    assert (folder / "model.safetensors").read_text() == "weights"  # the user's folder is unchanged


def test_publishing_again_changes_nothing(store: ObjectStore, folder: Path) -> None:
    ref = publish(store, folder)
    before = list(store.list())
    assert publish(store, folder) == ref
    assert list(store.list()) == before


def test_a_version_never_names_other_content(store: ObjectStore, folder: Path) -> None:
    ref = publish(store, folder)
    (folder / "model.safetensors").write_text("others!")
    with pytest.raises(VersionConflict, match=r"version '1' of model 'smol' names the content .* choose another one"):
        publish(store, folder)
    assert store.get("models/smol/1/model.safetensors") == b"weights"
    assert find_model(store, "smol") == ref


def test_two_publishers_of_other_content_never_mix(store: ObjectStore, tmp_path: Path) -> None:
    def publish_own(number: int) -> ArtifactRef | None:
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        for name in ("a", "b", "c"):
            (folder / name).write_text(f"{number}" * 1000)
        try:
            return publish(store, folder)
        except VersionConflict:
            return None

    with ThreadPoolExecutor(4) as pool:
        refs = [ref for ref in pool.map(publish_own, range(4)) if ref is not None]
    assert len(refs) == 1
    files = materialise_files(store, "models/smol/1", tmp_path / "to")
    assert len({path.read_text() for path in files.values()}) == 1


def test_an_interrupted_publication_is_invisible_and_then_completed(
    store: ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store.put_file, []

    def dies_at_the_second(key: str, path: Path, **options: bool) -> None:
        calls.append(key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(key, path, **options)

    monkeypatch.setattr(store, "put_file", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        publish(store, folder)
    assert find_model(store, "smol", "1") is None and find_model(store, "smol") is None
    assert list_versions(store, "smol") == []
    assert publish(store, folder) == find_model(store, "smol")
    assert list_versions(store, "smol") == ["1"]


def test_a_publication_that_ended_before_latest_moved_is_completed_when_it_is_found(
    store: ObjectStore, folder: Path
) -> None:
    ref = publish(store, folder, "1")
    for info in list(store.list("models/smol/aliases/")):
        store.delete(info.key)
    assert find_model(store, "smol") is None
    assert find_published(store, "smol", "2") is None
    assert find_published(store, "smol", "1") == ref == find_model(store, "smol")


def test_latest_follows_publication_and_is_never_taken_back(store: ObjectStore, folder: Path) -> None:
    publish(store, folder, "1")
    (folder / "model.safetensors").write_text("second")
    publish(store, folder, "2")
    assert resolve_alias(store, "smol") == "2"
    (folder / "model.safetensors").write_text("weights")
    publish(store, folder, "1")  # a late retry of the first publication
    assert resolve_alias(store, "smol") == "2"
    assert list_versions(store, "smol") == ["1", "2"]


def test_an_alias_is_a_numbered_log(store: ObjectStore, folder: Path) -> None:
    for version in ("1", "2"):
        (folder / "model.safetensors").write_text(version)
        publish(store, folder, version)
        publish(store, folder, version)  # a repetition adds no entry
    assert resolve_alias(store, "smol", "champion") is None
    log = [info.key for info in store.list(keys.model_aliases_prefix("smol", "latest"))]
    assert log == [f"models/smol/aliases/latest/{n:06d}.json" for n in (1, 2)]


def test_publications_at_the_same_time_are_all_in_the_log_of_latest(store: ObjectStore, tmp_path: Path) -> None:
    def publish_alone(version: str) -> None:
        folder = tmp_path / version
        folder.mkdir()
        (folder / "model.safetensors").write_text(version)
        publish(store, folder, version)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(publish_alone, "abcdef"))
    entries = [json.loads(store.get(info.key)) for info in store.list(keys.model_aliases_prefix("smol", "latest"))]
    assert sorted(entry["version"] for entry in entries) == list("abcdef")
    assert resolve_alias(store, "smol") == entries[-1]["version"]


def test_damaged_entries_are_corrupt(store: ObjectStore, folder: Path) -> None:
    publish(store, folder)
    for damage in (b"", b"[]", b'{"version": 3}', b'{"version": "../x"}'):
        store.put("models/smol/aliases/latest/000002.json", damage)
        with pytest.raises(CorruptArtifact, match="does not name a version"):
            resolve_alias(store, "smol")
    store.put("models/smol/claims/1.json", b"{}")
    with pytest.raises(CorruptArtifact, match="does not say which content"):
        publish(store, folder)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 129])
def test_path_like_names_are_refused(store: ObjectStore, folder: Path, name: str) -> None:
    with pytest.raises(InvalidKey):
        publish(store, folder, name=name)
    with pytest.raises(InvalidKey):
        publish(store, folder, version=name)
    with pytest.raises(InvalidKey):
        resolve_alias(store, "smol", name)
    assert list(store.list()) == []


@pytest.mark.parametrize("version", ["aliases", "claims"])
def test_a_version_cannot_take_the_registrys_own_place(store: ObjectStore, folder: Path, version: str) -> None:
    with pytest.raises(InvalidKey, match="cannot be a model version"):
        publish(store, folder, version)


def test_a_model_made_of_stored_files_leaves_them(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    files = {path.name: path for path in folder.iterdir()}
    checkpoint = commit_files(store, "runs/r/c", files, kind="checkpoint", provenance=PROVENANCE)
    stored = materialise_files(store, checkpoint.key, tmp_path / "to")
    publish_model(store, "smol", "1", stored, provenance=PROVENANCE)
    again = materialise_files(store, checkpoint.key, tmp_path / "to")
    assert again["model.safetensors"].read_text() == "weights"
