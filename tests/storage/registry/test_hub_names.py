"""Tests of the names of the hub's repositories and of the sentences for its errors, without a hub."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session, validate_repo_id

from storage.registry.hub import HubError, HubRepo, RepoKind, checked_hub, parse_hub_repo, record_imported
from storage.store.artifacts import ArtifactRef
from storage.store.objects import open_store


@pytest.mark.parametrize("kind", ["model", "dataset"])
@pytest.mark.parametrize("revision", [None, "v1.0", "refs/pr/1", "a" * 40])
@pytest.mark.parametrize("name", ["squad", "ada/sums", "models/sums", "datasets/sums", "datasets", "models"])
def test_the_address_of_a_repository_is_read_back(kind: RepoKind, name: str, revision: str | None) -> None:
    repo = HubRepo(kind, name, revision)
    assert parse_hub_repo(repo.uri, kind) == repo


def test_the_first_part_of_an_address_can_be_the_kind() -> None:
    assert parse_hub_repo("hf://datasets/squad", "dataset") == parse_hub_repo("hf://squad", "dataset")
    with pytest.raises(HubError, match="given 'hf://datasets/squad'; expected a model of the hub"):
        parse_hub_repo("hf://datasets/squad", "model")


@pytest.mark.parametrize("name", ["ada/my--model", "ada/my..model", "ada/model.git", "ada/" + "m" * 100])
def test_a_name_that_no_hub_can_have_is_refused(name: str) -> None:
    repo = parse_hub_repo(name, "model")
    assert repo is not None
    with (
        pytest.raises(HubError, match=r"cannot exist on a hub, and there is no such folder in /.*\. Check the name$"),
        checked_hub(repo),
    ):
        validate_repo_id(repo.repo)


def test_a_folder_that_exists_is_not_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ada/my--model").mkdir(parents=True)
    with (
        pytest.raises(HubError, match=r"cannot exist on a hub: "),
        checked_hub(HubRepo("model", "ada/my--model")),
    ):
        validate_repo_id("ada/my--model")


def test_a_download_that_never_began_did_not_break_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with (
        pytest.raises(HubError, match="is not, or not completely, on this machine, and http.* cannot be reached"),
        checked_hub(HubRepo("model", "ada/tiny", "a" * 40)),
    ):
        # no server listens on port 1
        get_session().get("http://127.0.0.1:1/")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), OSError("Not enough disk space. Needed: 1")])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_full_disk_names_the_folders_that_are_written(kind: RepoKind, error: OSError) -> None:
    config = pytest.importorskip("datasets").config
    with pytest.raises(HubError, match="the disk is full") as refusal, checked_hub(HubRepo(kind, "ada/x")):
        raise error
    assert str(constants.HF_HUB_CACHE) in str(refusal.value)
    assert (str(config.HF_DATASETS_CACHE) in str(refusal.value)) == (kind == "dataset")


def test_a_branch_is_not_recorded(tmp_path: Path) -> None:
    model = ArtifactRef(kind="model", key="models/tiny/1", sha256="0" * 64, bytes=1, rows=None, parents=())
    with pytest.raises(ValueError, match="expected it at a commit"):
        record_imported(open_store(tmp_path / "store"), HubRepo("model", "ada/tiny", "main"), model)
