"""Tests of unsafe and incomplete model folders: each is refused by name, and nothing of it is registered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import BadModelFolder, TokenizerMissing
from engine.local.engine import LocalEngine
from engine.text.tokenizers import load_tokenizer
from storage.errors import InvalidKey
from storage.store.objects import ObjectStore
from tests.fixtures.engines import PROVENANCE

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "broken-model"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def pickled_only(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="no-such-architecture", architectures=["NoSuchModel"])


def wrong_type_in_config(folder: Path) -> None:
    change_config(folder, hidden_size="wide")


def wrong_shape(folder: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)

    change_weights(folder, widen)


def other_size_in_config(folder: Path) -> None:
    change_config(folder, intermediate_size=64)


def a_million_layers_in_config(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1_000_000)


def enormous_tensors_in_config(folder: Path) -> None:
    """Of 26 TB each, if they were made."""
    change_config(folder, intermediate_size=50_000_000_000)


def put(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    change_weights(folder, lambda tensors: tensors[name].__setitem__(place, value))


def nan_weights(folder: Path) -> None:
    put(folder, "model.layers.2.mlp.up_proj.weight", (3, 4), float("nan"))


def nan_where_no_probe_looks(folder: Path) -> None:
    """The embedding of the last token, which the forward pass of a few tokens does not read."""
    put(folder, "model.embed_tokens.weight", (258, 0), float("nan"))


def infinite_weights(folder: Path) -> None:
    put(folder, "model.norm.weight", (0,), float("inf"))


def weights_that_overflow(folder: Path) -> None:
    """Each is finite, and their products are not."""
    change_weights(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(3e38))


def missing_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))


def unexpected_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.99.extra": torch.zeros(2)}))


def torn_weights(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def weights_that_are_no_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"not tensors")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (pickled_only, "pickled weights.*pytorch_model.bin"),
        (missing_config, "no config.json"),
        (no_weights, "no .*safetensors"),
        (config_that_is_no_json, "config"),
        (unknown_architecture, "no-such-architecture"),
        (wrong_type_in_config, "hidden_size"),
        (wrong_shape, "up_proj"),
        (other_size_in_config, r"gate_proj.weight is \(64, 128\) by it and \(512, 128\) in the files"),
        (a_million_layers_in_config, "says num_hidden_layers=1000000, and its .* hold 38 tensors of 4 layers"),
        (enormous_tensors_in_config, r"gate_proj.weight is \(50000000000, 128\) by it and \(512, 128\) in the files"),
        (nan_weights, r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN in 1 of its 65536 elements"),
        (nan_where_no_probe_looks, r"model\.embed_tokens\.weight holds NaN in 1 of its 33152 elements"),
        (infinite_weights, r"model\.norm\.weight holds infinity in 1 of its 128 elements"),
        (weights_that_overflow, "the model's own forward in torch.float32 gives NaN"),
        (missing_tensor, "missing keys: model.layers.1.self_attn.q_proj.weight"),
        (unexpected_tensor, "unexpected keys: model.layers.99.extra"),
        (torn_weights, "does not load"),
        (weights_that_are_no_safetensors, "does not load"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_broken_folder_is_refused_by_name(
    engine: LocalEngine, store: ObjectStore, folder: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder)
    with pytest.raises(BadModelFolder, match=reason) as refused:
        await engine.import_model(str(folder), provenance=PROVENANCE)
    assert str(folder) in str(refused.value)
    assert list(store.list()) == []


async def test_a_folder_without_a_tokenizer_is_refused_by_name(
    engine: LocalEngine, store: ObjectStore, folder: Path
) -> None:
    for path in [*folder.glob("tokenizer*"), *folder.glob("special_tokens*")]:
        path.unlink()
    with pytest.raises(TokenizerMissing) as refused:
        await engine.import_model(str(folder), provenance=PROVENANCE)
    assert str(folder) in str(refused.value)
    assert list(store.list()) == []


async def test_a_model_that_cannot_sample_an_end_of_turn_is_refused(
    engine: LocalEngine, store: ObjectStore, folder: Path
) -> None:
    """Its files and its template name ids beyond the embedding, so each completion would have the full length."""
    tokenizer = load_tokenizer(folder)
    (end,) = tokenizer.eos_token_ids
    change_config(folder, vocab_size=end, eos_token_id=None)
    change_weights(folder, lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:end].clone()}))
    refused = rf"are \[{end}\], and its model has the ids 0 to {end - 1}: no completion could end"
    with pytest.raises(TokenizerMissing, match=refused):
        await engine.import_model(str(folder), provenance=PROVENANCE)
    assert list(store.list()) == []


async def test_the_folder_itself_is_fine(engine: LocalEngine, store: ObjectStore, folder: Path) -> None:
    """What the tests above break is what is wrong in them."""
    imported = await engine.import_model(str(folder), provenance=PROVENANCE)
    assert imported.key.startswith("models/broken-model/")


async def test_pickled_weights_beside_safe_ones_are_not_published(
    engine: LocalEngine, store: ObjectStore, folder: Path
) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"could run code")
    await engine.import_model(str(folder), provenance=PROVENANCE)
    assert not [info.key for info in store.list() if info.key.endswith(".bin")]


@pytest.mark.parametrize(
    "name", ["unknown", "unknown@1", "../outside", "a/b/c", "/etc", "./here", "..", "~a/x", "~someone", "a b", "é"]
)
async def test_names_of_no_model_are_refused_by_name(engine: LocalEngine, store: ObjectStore, name: str) -> None:
    with pytest.raises((BadModelFolder, InvalidKey)) as refused:
        await engine.import_model(name, provenance=PROVENANCE)
    assert name in str(refused.value)
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "tiny@", "@1", "tiny@../../x"])
async def test_malformed_keys_are_refused_though_a_model_is_there(
    engine: LocalEngine, store: ObjectStore, folder: Path, name: str
) -> None:
    tiny = folder.rename(folder.parent / "tiny")
    await engine.import_model(str(tiny), provenance=PROVENANCE)
    before = [info.key for info in store.list()]
    with pytest.raises((BadModelFolder, InvalidKey)):
        await engine.import_model(name, provenance=PROVENANCE)
    assert [info.key for info in store.list()] == before
