"""Tests of the type of a published model's weights: that of the base model, or another one, and verification of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.models.folder import dtype_of_config
from engine.protocol import PolicySpec
from storage.chain.records import Root
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, request_after


def folder_of(store: ObjectStore, ref: ArtifactRef, to: Path) -> Path:
    return materialise_files(store, ref.key, to)["config.json"].parent


async def test_a_model_is_published_in_the_type_of_its_base(tiny_folder: Path, tmp_path: Path) -> None:
    base_folder = tmp_path / "half"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    model.save_pretrained(base_folder)
    for path in tiny_folder.glob("tokenizer*"):
        (base_folder / path.name).write_bytes(path.read_bytes())
    engine = LocalEngine(f"file://{tmp_path}/store", DETERMINISTIC)
    base = await engine.import_model(str(base_folder), provenance=PROVENANCE)
    root = Root(base=base, base_digest=base.sha256, trainable={"kind": "full"}, init_seed=3)
    policy = await engine.create_policy(PolicySpec(run="r", stage="0-a", model="policy", root=root))
    batch = commit_batch(engine.store, policy)
    policy = (await engine.take_gradient_step(request_after(policy, batch, lr=0.01))).policy

    published = {}
    for dtype in ("base", "float32", "float16"):
        published[dtype] = await engine.export_model(policy, "m", provenance=PROVENANCE, dtype=dtype)  # type: ignore[arg-type]
    # a version of its own for each, and the same one for the same
    assert len({registered_key(ref) for ref in published.values()}) == 3
    again = await engine.export_model(policy, "m", provenance=PROVENANCE, dtype="bfloat16")
    assert again == published["base"] and again.bytes < published["float32"].bytes * 0.6
    folders = {dtype: folder_of(engine.store, ref, tmp_path / dtype) for dtype, ref in published.items()}
    exact = load_file(folders["float32"] / "model.safetensors")
    for dtype, torch_dtype in (("base", torch.bfloat16), ("float16", torch.float16)):
        rounded = load_file(folders[dtype] / "model.safetensors")
        assert rounded.keys() == exact.keys()
        assert all(torch.equal(tensor, exact[name].to(torch_dtype)) for name, tensor in rounded.items())
        config = json.loads((folders[dtype] / "config.json").read_text())
        assert f"torch.{config['dtype']}" == str(torch_dtype)
        assert AutoModelForCausalLM.from_pretrained(folders[dtype], dtype="auto").dtype == torch_dtype
    await engine.close()
    # verification rounds the redone weights alike
    report = verify_run(engine.store, "r")
    assert [(chain.models, chain.problems) for chain in report.chains] == [(3, ())]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_type_that_a_config_names(config: dict[str, object], dtype: str) -> None:
    assert dtype_of_config(config) == dtype
