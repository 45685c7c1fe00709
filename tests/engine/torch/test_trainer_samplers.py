"""Which trainers the samplers of the engine's process follow, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.torch.trainer_samplers import WholeModelSampler
from engine.errors import BadSpec
from tests.fixtures.adapters import backend, train

LIMITS = {"max_rows": 8, "max_prefill_tokens": 512}


def test_a_sampler_does_not_overwrite_shared_weights_with_another_trainers(tiny_folder: Path) -> None:
    engine = backend()
    first, second = engine.load(tiny_folder), engine.load(tiny_folder)
    train(second, 0, updates=1)
    before = first.weights_digest()
    sampler = WholeModelSampler(first, torch.float32, **LIMITS)
    sampler.sync(first, "first")
    with pytest.raises(BadSpec, match="make a new sampler"):
        sampler.sync(second, "second")
    assert first.weights_digest() == before != second.weights_digest()
    assert sampler.loaded_state is None


def test_a_sampler_with_a_copy_follows_several_trainers(tiny_folder: Path) -> None:
    engine = backend("bfloat16")
    first, second = engine.load(tiny_folder), engine.load(tiny_folder)
    train(second, 0, updates=1)
    before = first.weights_digest()
    sampler = WholeModelSampler(first, torch.bfloat16, **LIMITS)
    for trainer, state in ((first, "first"), (second, "second")):
        sampler.sync(trainer, state)
        for name, weight in trainer.model.named_weights():
            assert torch.equal(dict(sampler.model.named_weights())[name], weight.to(torch.bfloat16)), name
    assert first.weights_digest() == before
