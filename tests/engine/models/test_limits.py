"""Tests of the limits of a model's config.json and of the seed of its new parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import BadModelFolder, BadSpec
from engine.handles import ModelBuilder
from engine.models.folder import experts_in, read_config
from storage.chain.records import Root


def test_a_config_json_of_a_model_has_a_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": "' + b"x" * (20 << 20) + b'"}')
    with pytest.raises(BadModelFolder, match="has 20,971,529 bytes; expected at most 8,388,608"):
        read_config(file)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 128}, "num_experts=128"),
        ({"text_config": {"num_local_experts": 16}}, "num_local_experts=16"),
        ({"ffn_config": {"moe_num_experts": 4}}, "moe_num_experts=4"),
        ({"num_experts": 1, "n_routed_experts": None}, ""),
    ],
)
def test_the_experts_of_a_config(config: dict[str, Any], experts: str) -> None:
    assert experts_in(config) == experts


@pytest.mark.parametrize("seed", [-1, 2**64, 10**5000], ids=["negative", "large", "huge"])
async def test_the_initial_seed_has_a_range(seed: int) -> None:
    with pytest.raises(ValidationError, match="init_seed"):
        Root(base_digest="0" * 64, init_seed=seed)
    builder = object.__new__(ModelBuilder)
    object.__setattr__(builder, "key", "tiny")
    with pytest.raises(BadSpec, match="init_seed: given .{1,40}; expected a whole number from 0 to"):
        await ModelBuilder.spawn_train(builder, "m", init_seed=seed)
