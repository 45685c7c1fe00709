"""Tests of the formats in which a published model is written: GGUF is read back by the package gguf and by
transformers, whose reader turns llama.cpp's order of rows back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.backends.torch.tiny import CHAT_TEMPLATE
from engine.backends.weight_files.exporting import _splitting_name, export_files
from engine.errors import BadSpec


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def test_a_gguf_file_holds_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    out = export_files(files_of(tiny_folder), tmp_path / "tiny.gguf", "gguf", name="tiny@1")
    reader = gguf.GGUFReader(out)
    field = {name: reader.get_field(name) for name in reader.fields}
    config = json.loads((tiny_folder / "config.json").read_text())
    expected: dict[str, Any] = {
        "general.architecture": "llama", "general.name": "tiny@1", "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count_kv": config["num_key_value_heads"], "llama.rope.dimension_count": 32,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": CHAT_TEMPLATE,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    assert {name: field[name].contents() for name in expected} == expected  # type: ignore[union-attr]
    tokens = field["tokenizer.ggml.tokens"].contents()  # type: ignore[union-attr]
    assert len(tokens) == config["vocab_size"] and tokens[1] == "<|im_start|>"
    assert field["tokenizer.ggml.token_type"].contents()[:4] == [3, 3, 3, 1]  # type: ignore[union-attr]

    weights = load_file(tiny_folder / "model.safetensors")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert "output.weight" not in tensors  # the head is tied
    assert torch.equal(tensors["blk.0.ffn_up.weight"], weights["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(tensors["blk.1.attn_v.weight"], weights["model.layers.1.self_attn.v_proj.weight"])
    # rows of a query head of 32: 0, 16, 1, 17, …
    query, key = weights["model.layers.0.self_attn.q_proj.weight"], weights["model.layers.0.self_attn.k_proj.weight"]
    order = [row for low in range(16) for row in (low, low + 16)]
    assert torch.equal(tensors["blk.0.attn_q.weight"][32:64], query[32:64][order])
    assert torch.equal(tensors["blk.0.attn_k.weight"][:32], key[:32][order])

    # the same logits
    ids = torch.tensor([[5, 70, 90, 3, 200]])
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tiny_folder)(ids).logits
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)(ids).logits
    assert torch.allclose(ours, read, atol=1e-5)


def test_a_gguf_file_is_written_at_once_and_marks_rows_without_a_token(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "padded"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 2}))

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a temporary file of the size of the model")

    monkeypatch.setattr("tempfile.SpooledTemporaryFile", refuse)
    reader = gguf.GGUFReader(export_files(files_of(folder), tmp_path / "m.gguf", "gguf", name="m@1"))
    types = reader.get_field("tokenizer.ggml.token_type").contents()  # type: ignore[union-attr]
    # llama.cpp samples no token of type 5, unused
    assert types[-2:] == [5, 5] and 5 not in types[: config["vocab_size"] - 2]


def test_other_types_and_the_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lora").write_text("{}")
    files = files_of(tiny_folder) | {"adapter/adapter_config.json": tmp_path / "lora"}
    half = export_files(files, tmp_path / "half", "bfloat16", name="m@1")
    assert {path.name for path in half.iterdir()} == files_of(tiny_folder).keys()
    weights, exact = load_file(half / "model.safetensors"), load_file(tiny_folder / "model.safetensors")
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in weights.items())
    # a GGUF file has the type of the weights, and vectors in float32
    out = export_files(files_of(half), tmp_path / "half.gguf", "gguf", name="m@1")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert types["token_embd.weight"] == "BF16" and types["output_norm.weight"] == "F32"
    # back to float32: the rounded values
    whole = export_files(files_of(half), tmp_path / "whole", "float32", name="m@1")
    back = load_file(whole / "model.safetensors")
    assert all(torch.equal(tensor, weights[name].float()) for name, tensor in back.items())
    adapter = export_files(files, tmp_path / "adapter", "adapter", name="m@1")
    assert [path.name for path in adapter.iterdir()] == ["adapter_config.json"]
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".cast")]
    with pytest.raises(BadSpec, match=r"m@1 has no adapter: all of its weights were trained"):
        export_files(files_of(tiny_folder), tmp_path / "none", "adapter", name="m@1")
    with pytest.raises(BadSpec, match=r"half exists already"):
        export_files(files, half, "float16", name="m@1")


def test_what_has_no_gguf_form_here_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"architectures": ["Qwen3ForCausalLM"]}, "m@1 is of the architecture Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"m@1 scales its rotary embeddings \(llama3\)"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(BadSpec, match=message):
            export_files(files_of(folder), tmp_path / "x.gguf", "gguf", name="m@1")
    assert not (tmp_path / "x.gguf").exists()


def test_the_splitting_of_known_tokenizers() -> None:
    def named(*steps: dict[str, Any], model: str = "BPE") -> str:
        return _splitting_name({"model": {"type": model}, "pre_tokenizer": {"pretokenizers": list(steps)}}, "m")

    level = {"type": "ByteLevel"}
    assert named({"type": "Digits", "individual_digits": True}, level) == "smollm"
    llama = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+"
    assert named({"type": "Split", "pattern": {"Regex": llama}}, level) == "llama-bpe"
    for steps, model in (((level,), "Unigram"), (({"type": "Metaspace"},), "BPE"), ((), "BPE")):
        with pytest.raises(BadSpec, match="expected the byte-level BPE of GPT-2, SmolLM or Llama 3"):
            named(*steps, model=model)
