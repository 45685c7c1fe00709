"""Which trainers the samplers of the engine's process follow, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.torch.trainer_samplers import StagedFilesSampler, WholeModelSampler
from engine.errors import BadSpec
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from tests.fixtures.adapters import backend, train

LIMITS = {"max_rows": 8, "max_prefill_tokens": 512}


def test_a_sampler_does_not_overwrite_shared_weights_with_another_trainers(tiny_folder: Path) -> None:
    engine = backend()
    first, second = engine.load(tiny_folder), engine.load(tiny_folder)
    train(second, 0, updates=1)
    before = first.weights_digest()
    sampler = WholeModelSampler(first, torch.float32, **LIMITS)
    sync(sampler, first, "first")
    with pytest.raises(BadSpec, match="make a new sampler"):
        sync(sampler, second, "second")
    assert first.weights_digest() == before != second.weights_digest()
    assert sampler.loaded_state == "first"  # nothing has changed


def test_a_sampler_with_a_copy_follows_several_trainers(tiny_folder: Path) -> None:
    engine = backend("bfloat16")
    first, second = engine.load(tiny_folder), engine.load(tiny_folder)
    train(second, 0, updates=1)
    before = first.weights_digest()
    sampler = WholeModelSampler(first, torch.bfloat16, **LIMITS)
    drawn = []
    for trainer, state in ((first, "first"), (second, "second"), (first, "first")):
        sync(sampler, trainer, state)
        drawn.append(sampler.sample([[5, 6, 7]], [0], SamplingParams(max_new_tokens=8, temperature=0))[0])
        scored = trainer.logprobs(
            [TokenSequence([5, 6, 7, *drawn[-1].token_ids], [0.0] * 3 + [1.0] * len(drawn[-1].token_ids))],
            temperature=1.0,
            max_tokens=512,
        )
        assert drawn[-1].logprobs == pytest.approx(scored[0], abs=0.05)
    assert drawn[0] == drawn[2] != drawn[1]
    assert first.weights_digest() == before


def test_a_sampler_of_staged_files_has_the_weights_of_the_files(tiny_folder: Path) -> None:
    trainer = backend().load(tiny_folder)
    drawn = []
    for sampler in (
        StagedFilesSampler(trainer, torch.float32, torch.device("cpu"), **LIMITS),
        WholeModelSampler(trainer, torch.float32, **LIMITS),
    ):
        sync(sampler, trainer, "first")
        drawn += sampler.sample([[5, 6, 7]], [0], SamplingParams(max_new_tokens=8, temperature=1))
    assert drawn[0].token_ids == drawn[1].token_ids
    assert drawn[0].logprobs == pytest.approx(drawn[1].logprobs, abs=1e-5)


def test_a_sampler_of_staged_files_without_layers_for_adapters_refuses_them(tiny_folder: Path) -> None:
    engine = backend()
    whole = engine.load(tiny_folder)
    sampler = StagedFilesSampler(whole, torch.float32, torch.device("cpu"), **LIMITS)
    sync(sampler, whole, "first")
    adapter = engine.adapter(engine.load_base(tiny_folder), LoraSpec(), init_seed=0)
    with pytest.raises(BadSpec, match="no layers for an adapter; make a new sampler"):
        sync(sampler, adapter, "second")
    assert sampler.loaded_state == "first"  # nothing has changed
