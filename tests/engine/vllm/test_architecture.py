"""Tests of a model's config: which models can share a vLLM engine, and which tokens end a completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.backends.vllm.architecture import architecture_of

CONFIG = {"vocab_size": 259, "max_position_embeddings": 4096, "hidden_size": 128, "eos_token_id": 2, "dtype": "float32"}


def folder_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_limits_and_ends_of_sequence(tmp_path: Path) -> None:
    plain = architecture_of(folder_of(tmp_path / "plain", CONFIG))
    assert (plain.vocab_size, plain.context_length, plain.eos_token_ids) == (259, 4096, (2,))
    several = architecture_of(folder_of(tmp_path / "several", CONFIG, {"eos_token_id": [2, 7]}))
    assert several.eos_token_ids == (2, 7)
    silent = architecture_of(folder_of(tmp_path / "silent", CONFIG, {"eos_token_id": None}))
    assert silent.eos_token_ids == (2,)
    none = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    assert architecture_of(folder_of(tmp_path / "none", none)).eos_token_ids == ()
    zero = architecture_of(folder_of(tmp_path / "zero", CONFIG | {"eos_token_id": 0}))
    assert zero.eos_token_ids == (0,)


def test_a_nested_text_config(tmp_path: Path) -> None:
    architecture = architecture_of(folder_of(tmp_path / "nested", {"text_config": CONFIG}))
    assert (architecture.vocab_size, architecture.context_length, architecture.eos_token_ids) == (259, 4096, (2,))


def test_models_share_an_engine_only_if_they_differ_in_nothing_but_weights(tmp_path: Path) -> None:
    digest = architecture_of(folder_of(tmp_path / "one", CONFIG)).digest
    moved = CONFIG | {"_name_or_path": "elsewhere", "transformers_version": "9", "dtype": "bfloat16"}
    assert architecture_of(folder_of(tmp_path / "moved", moved)).digest == digest
    assert architecture_of(folder_of(tmp_path / "wider", CONFIG | {"hidden_size": 256})).digest != digest
    assert architecture_of(folder_of(tmp_path / "ends", CONFIG, {"eos_token_id": [2, 7]})).digest != digest
