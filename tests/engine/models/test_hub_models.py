"""Tests of models of the hub, with huggingface_hub and a hub on loopback: which keys name one, the checks before a
download, downloads that break off, and the sentence of each refusal."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from engine.errors import BadModelFolder
from engine.models.folder import registered_model
from engine.models.hub import DownloadBar, check_hub_model, download_model, hub_repo_of_key, import_from_hub
from storage.registry.hub import HubError, HubRepo, find_imported, resolve_commit
from storage.registry.models import publish_model
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.servers.hub import TOKEN, Hub

CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)) * 32
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
TINY = HubRepo("model", "ada/tiny")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


async def import_model(store: ObjectStore, key: str) -> ArtifactRef:
    """Imports a model and registers its files without loading them."""

    async def register(folder: Any) -> ArtifactRef:
        provenance = Provenance(code_version="test", config_digest="0" * 64, seed=0)
        return publish_model(store, folder.name, folder.digest()[:12], folder.files, provenance=provenance)

    repo = hub_repo_of_key(key)
    assert repo is not None
    return await import_from_hub(store, repo, register)


@pytest.mark.parametrize(
    ("key", "repo"),
    [
        ("Qwen/Qwen3-0.6B", HubRepo("model", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubRepo("model", "Qwen/Qwen3-0.6B", "v1.0")),
        ("hf://Qwen/Qwen3-0.6B@refs/pr/1", HubRepo("model", "Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("hf://models/Qwen/Qwen3-0.6B", HubRepo("model", "Qwen/Qwen3-0.6B")),
        ("hf://gpt2", HubRepo("model", "gpt2")),
        ("gpt2", None),
        ("gpt2@0123abc", None),
        ("./models/gpt2", None),
        ("../gpt2", None),
        ("/models/gpt2", None),
        (".ostinato/models/gpt2", None),
        ("models/large/gpt2", None),
        ("openai://gpt2", None),
    ],
)
def test_keys_of_the_hub(key: str, repo: HubRepo | None) -> None:
    assert hub_repo_of_key(key) == repo


@pytest.mark.parametrize("key", ["hf://", "hf://a/b/c", "hf://datasets/ada/sums", "hf://ada/tiny@", "hf://../tiny"])
def test_a_malformed_address_is_refused(key: str) -> None:
    with pytest.raises(HubError, match=r"given 'hf://.*expected a model of the hub: hf://owner/name"):
        hub_repo_of_key(key)


def test_a_folder_has_precedence_and_an_ambiguous_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ada/tiny").mkdir(parents=True)
    with pytest.raises(
        BadModelFolder, match=r"'ada/tiny', which is a folder here without a config.json.*hf://ada/tiny"
    ):
        hub_repo_of_key("ada/tiny")
    Path("ada/tiny/config.json").write_bytes(CONFIG)
    assert hub_repo_of_key("ada/tiny") is None
    assert hub_repo_of_key("hf://ada/tiny") == TINY
    with pytest.raises(
        BadModelFolder, match=r"folders have no revisions; give hf://ada/tiny@v1 .* or ada/tiny for the"
    ):
        hub_repo_of_key("ada/tiny@v1")


async def test_an_import_is_made_once_per_commit(hub: Hub, store: ObjectStore) -> None:
    files = FILES | {"model.py": b"1/0", "pytorch_model.bin": b"pickled", "onnx/config.json": b"{}", "README.md": b"#"}
    first = hub.commit("model", "ada/tiny", files)
    model = await import_model(store, "ada/tiny")
    assert model.key.startswith("models/ada--tiny/")
    assert sorted(info.key.rpartition("/")[2] for info in store.list(f"{model.key}/")) == [
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert not {path.rpartition("/")[2] for _, path, _ in hub.requests} & {"model.py", "pytorch_model.bin", "README.md"}
    # the branch moves: its new commit is another model, and the first one is found without the hub
    second = hub.commit("model", "ada/tiny", FILES | {"tokenizer.json": b"{ }"})
    other = await import_model(store, "ada/tiny@main")
    assert other.sha256 != model.sha256
    hub.stop()
    assert await import_model(store, f"ada/tiny@{first}") == model
    assert registered_model(store, f"hf://ada/tiny@{second}") == other
    assert find_imported(store, TINY._replace(revision="f" * 40)) is None


async def test_a_download_that_breaks_off_continues(hub: Hub, store: ObjectStore) -> None:
    hub.commit("model", "ada/tiny", FILES)
    # within one attempt
    hub.break_offs["model.safetensors"] = [3000]
    repo = resolve_commit(TINY)
    assert download_model(repo).files["model.safetensors"].read_bytes() == WEIGHTS
    assert hub.downloads("model.safetensors") == ["", "bytes=2048-"]


async def test_complete_files_of_a_download_that_was_given_up_are_kept(hub: Hub, store: ObjectStore) -> None:
    hub.commit("model", "ada/tiny", FILES)
    hub.break_offs["model.safetensors"] = [3000] + [0] * 5
    with pytest.raises(HubError, match=r"download of the model 'ada/tiny' at '\w+' broke off .*run it again"):
        await import_model(store, "ada/tiny")
    assert not list(store.list("models/"))
    # what arrived is not mistaken for the whole model when the hub is away
    hub.stop()
    with pytest.raises(HubError, match=r"not completely, on this machine, and http://127.* cannot be reached"):
        await import_model(store, "ada/tiny")
    hub.start()
    hub.requests.clear()
    await import_model(store, "ada/tiny")
    assert hub.downloads("model.safetensors") == [""]
    assert hub.downloads("config.json") == []


async def test_the_cache_is_used_without_the_hub(
    hub: Hub, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.commit("model", "ada/tiny", FILES)
    with pytest.raises(HubError, match="and HF_HUB_OFFLINE is set, so the hub is not asked; connect and run"):
        await import_model(store, "ada/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = await import_model(store, "ada/tiny")
    # another store finds the files of the cache
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        hub.stop()
        assert (await import_model(open_store(tmp_path / f"other-{offline}"), "ada/tiny")).sha256 == model.sha256
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(HubError, match=r"not completely, on this machine, and http://127.0.0.1:\d+ cannot be reached"):
        await import_model(open_store(tmp_path / "third"), "ada/tiny")


async def test_gated_private_and_missing_models(hub: Hub, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("model", "ada/gated", FILES, access="gated")
    hub.commit("model", "ada/private", FILES, access="private")
    for token in (None, "hf_of_another"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(
            HubError, match=r"'ada/gated' at '\w+' is gated: .*Ask for access on http://127.*hf auth login"
        ):
            check_hub_model(store, HubRepo("model", "ada/gated"))
        for name in ("ada/private", "ada/absent"):
            with pytest.raises(HubError, match=f"has no model '{name}', or it is private, and there is no such folder"):
                check_hub_model(store, HubRepo("model", name))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    await import_model(store, "ada/gated")
    await import_model(store, "ada/private")
    with pytest.raises(
        HubError, match="the model 'ada/gated' has no revision 'v2'; give a branch, tag or commit of http"
    ):
        await import_model(store, "ada/gated@v2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.json": None}, "has no config.json.* give the model that they were made from"),
        (
            {"model.safetensors": None, "pytorch_model.bin": b"x"},
            r"only pickled weights \(pytorch_model.bin\), which can",
        ),
        ({"model.safetensors": None}, "has no weights in .*; give a revision with"),
        (
            {"model.safetensors": None, "consolidated.safetensors": WEIGHTS, "onnx/model.safetensors": WEIGHTS},
            "has no weights in the layout of Hugging Face; give",
        ),
        (
            {"config.json": b'{"model_type": "mine", "auto_map": {"AutoConfig": "m.C"}}'},
            "needs code .* which is never run",
        ),
    ],
    ids=["no-config", "pickled", "no-weights", "other-layouts", "remote-code"],
)
def test_unusable_models_are_refused_before_their_download(
    hub: Hub, store: ObjectStore, changes: dict[str, bytes | None], message: str
) -> None:
    hub.commit("model", "ada/tiny", {name: data for name, data in (FILES | changes).items() if data is not None})
    with pytest.raises(BadModelFolder, match=message):
        check_hub_model(store, TINY)
    assert hub.downloads("model.safetensors") == []
    with pytest.raises(BadModelFolder, match=message):
        download_model(resolve_commit(TINY))


def test_code_for_an_architecture_of_transformers_is_left_out(hub: Hub, store: ObjectStore) -> None:
    config = json.loads(CONFIG) | {"auto_map": {"AutoConfig": "m.C"}}
    hub.commit("model", "ada/tiny", FILES | {"config.json": json.dumps(config).encode()})
    check_hub_model(store, TINY)


@pytest.mark.parametrize("is_disabled", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_shown_on_a_terminal_unless_bars_are_disabled(
    monkeypatch: pytest.MonkeyPatch, is_disabled: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.utils.are_progress_bars_disabled", lambda: is_disabled)
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    with DownloadBar(total=1, file=output) as bar:
        bar.update()
    assert bool(output.getvalue()) == (is_terminal and not is_disabled)


def test_a_damaged_file_is_refused(hub: Hub, store: ObjectStore) -> None:
    hub.commit("model", "ada/tiny", FILES)
    repo = resolve_commit(TINY)
    weights = download_model(repo).files["model.safetensors"].resolve()
    weights.write_bytes(WEIGHTS[:-1] + b"\0")
    with pytest.raises(HubError, match=f"model.safetensors of .* is damaged in the cache.*delete {weights} and"):
        download_model(repo)
