"""Tests of the limits of a model's config.json and of the seed of its new parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.errors import BadModelFolder, BadSpec
from engine.models.builder import ModelBuilder
from engine.models.folder import read_config
from storage.chain.records import Root


def test_a_config_json_of_a_model_has_a_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": "' + b"x" * (20 << 20) + b'"}')
    with pytest.raises(BadModelFolder, match="has 20,971,529 bytes; expected at most 8,388,608"):
        read_config(file)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**5000], ids=["negative", "large", "huge"])
async def test_the_initial_seed_has_a_range(seed: int) -> None:
    with pytest.raises(ValidationError, match="init_seed"):
        Root(base_digest="0" * 64, init_seed=seed)
    builder = object.__new__(ModelBuilder)
    object.__setattr__(builder, "key", "tiny")
    with pytest.raises(BadSpec, match="init_seed: given .{1,40}; expected a whole number from 0 to"):
        await ModelBuilder.spawn_train(builder, "m", init_seed=seed)
