"""Loading: a rank reads its part of a folder and no more, and gets what transformers would have given it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.backends.deepspeed.backend import DeepSpeedBackend
from engine.backends.deepspeed.meta_model import MetaModel, open_meta_model, streamed_weights
from engine.backends.torch.loading import load_model
from engine.backends.torch.probes import probe_model
from engine.backends.weight_files.digests import digest_tensors
from engine.cluster.rank_group import RankGroup
from engine.errors import BadModelFolder
from engine.specs.adapters import LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from tests.engine.deepspeed.conftest import NUMBERS, OnRanks, torch_trainer
from tests.engine.deepspeed.lab import lab_options, wrong_attention
from tests.fixtures.architectures import UNPACKED, save_tiny

CPU = torch.device("cpu")
Load = Callable[..., OnRanks]


def meta_model_of(folder: Path) -> MetaModel:
    return open_meta_model(folder, dtype=torch.float32, parameter_dtype=torch.float32, device=CPU)


def read_all(meta_model: MetaModel) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in meta_model.model.named_weights():
        weights[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        meta_model.weights.read_into(name, weights[name])
    return weights


def variant(kind: str, tiny_folder: Path, folder: Path) -> Path:
    """A copy of the tiny model in other files."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model = type(model)(model.config)
    if kind == "many files":
        model.save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).save_pretrained(folder)
    if kind == "another file":
        save_file({"other": torch.zeros(2)}, folder / "consolidated.safetensors")
    return folder


def test_a_vision_language_model_is_refused(vision_folder: Path) -> None:
    with pytest.raises(BadModelFolder, match=r"set engine\.trainer\.kind='torch'"):
        meta_model_of(vision_folder)


@pytest.mark.parametrize("kind", ["plain", "tied", "many files", "bfloat16", "another file"])
def test_a_meta_model_is_the_loaded_one_without_its_weights(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = variant(kind, tiny_folder, tmp_path / "model")
    meta_model = meta_model_of(folder)
    loaded = load_model(folder, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    assert not meta_model.probed  # read from the files, not by way of transformers
    storages = [parameter.untyped_storage() for parameter in meta_model.model.module.parameters()]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert set(sizes.values()) == {4}  # one float32 each
    assert digest_tensors(read_all(meta_model).items()) == digest_tensors(loaded.named_weights())
    buffers, expected = dict(meta_model.model.module.named_buffers()), dict(loaded.module.named_buffers())
    assert buffers.keys() == expected.keys() and all(torch.equal(buffers[name], expected[name]) for name in buffers)
    assert [name for name, _ in meta_model.model.exported_weights()] == [name for name, _ in loaded.exported_weights()]
    for config in ("config", "generation_config"):  # what an export writes
        without_weights, whole = getattr(meta_model.model.module, config), getattr(loaded.module, config)
        assert without_weights.to_json_string() == whole.to_json_string()
    with streamed_weights(meta_model), torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8]])
        loaded.module.set_attn_implementation("eager")  # type: ignore[operator]
        assert torch.equal(meta_model.model.module(ids).logits, loaded.module(ids).logits)
        probe_model(meta_model.model, folder)
    assert {p.untyped_storage().nbytes() for p in meta_model.model.module.parameters()} == {4}


def test_names_that_transformers_translates_are_read_by_it(tiny_folder: Path, tmp_path: Path) -> None:
    """The files have both names of a tied tensor, so they have more tensors than the model."""
    folder = variant("tied", tiny_folder, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    meta_model = meta_model_of(folder)
    assert meta_model.probed
    loaded = load_model(folder, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    assert digest_tensors(read_all(meta_model).items()) == digest_tensors(loaded.named_weights())


def test_a_folder_of_many_files_loads(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=3)
    folder = tmp_path / "staged"
    names = trainer.call("stage_weights", folder, torch.float32)
    trainer.call("write_config", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in names if name.endswith(".safetensors")}
    assert torch_trainer(folder).weights_digest()[0] == trainer.digest()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_rank_reads_its_part_and_no_more(
    stage: int, dtype: str, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = OnRanks(two_ranks, next(NUMBERS), tmp_path)
    counts = trainer.call("load_counting", lab_options(dtype, zero_stage=stage), tiny_folder)
    try:
        reference = torch_trainer(tiny_folder)
        total = sum(tensor.numel() for _, tensor in reference.weights())
        largest = max(tensor.numel() for _, tensor in reference.weights())
        assert sum(read for read, _ in counts) == total
        assert all(abs(read - total / 2) <= total / 50 for read, _ in counts)
        if stage == 3:
            assert max(most for _, most in counts) == -(-largest // 2)
        assert trainer.digest() == reference.weights_digest()[0]
    finally:
        trainer.call("free")


def test_a_folder_that_is_broken_is_refused_by_name(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    stored = load_file(folder / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModelFolder, match=r"missing keys: model\.norm\.weight"):
        on_two_ranks().try_load(folder)
    with pytest.raises(BadModelFolder, match=r"missing keys: model\.norm\.weight"):
        on_ranks(two_ranks, folder, zero_stage=3)


@pytest.mark.parametrize("scalar", [False, True])
def test_an_architecture_that_packs_wrongly_is_refused(
    scalar: bool, two_ranks: RankGroup, tiny_folder: Path, tmp_path: Path
) -> None:
    """The engine's process raises, and all ranks raise together, so that none waits."""
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    folder, model = tmp_path / "model", auto.from_pretrained(tiny_folder, **({"num_labels": 1} if scalar else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # so that it shows in random weights
    model.save_pretrained(folder)
    trainer = OnRanks(two_ranks, next(NUMBERS), tmp_path)
    with pytest.raises(BadModelFolder, match="the layer LlamaAttention cannot be packed"):
        trainer.call("load_attending_wrongly", lab_options(zero_stage=3), folder)
    with wrong_attention(), pytest.raises(BadModelFolder, match="the layer LlamaAttention cannot be packed"):
        on_two_ranks().try_load(folder)
    on_two_ranks().try_load(folder)
    trainer.call("load_with", lab_options(zero_stage=3), folder)
    trainer.call("free")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_with_a_state_is_refused_on_the_ranks(
    stage: int, dtype: str, two_ranks: RankGroup, tmp_path: Path
) -> None:
    layer, config = UNPACKED["Lfm2"]
    folder = save_tiny("Lfm2", config, tmp_path / "model")
    trainer, options = OnRanks(two_ranks, next(NUMBERS), tmp_path), lab_options(dtype, zero_stage=stage)
    with pytest.raises(BadModelFolder, match=f"the layer {layer} cannot be packed"):
        trainer.call("load_with", options, folder)
    with pytest.raises(BadModelFolder, match=f"the layer {layer} cannot be packed"):
        trainer.call("load_adapter_with", next(NUMBERS), options, folder, LoraSpec(rank=2))


def on_two_ranks() -> DeepSpeedBackend:
    spec = DeepSpeedSpec(ranks=2)
    return DeepSpeedBackend(LocalEngineSpec(trainer=spec, device="cpu", compute_dtype="float32", threads=1))
