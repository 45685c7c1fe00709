"""Samplers, checkpoints and digests of adapters belong to one adapter each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.backends.protocol import sync
from engine.backends.torch.shared_base import SharedBase, SharedTrainer
from engine.errors import BadSpec
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from tests.fixtures.adapters import LORA, SPECS, WHOLE, backend, sampler_for, state_of, train


@pytest.fixture
def base(tiny_folder: Path) -> SharedBase:
    return backend().load_base(tiny_folder, key="models/tiny/000001")


# -- samplers --------------------------------------------------------------------------------------------------

PROMPTS, SEEDS = [[60, 61, 7], [5, 6], [60, 61, 7]], [1, 2, 3]
DRAW = SamplingParams(max_new_tokens=8, temperature=1.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_each_sampler_draws_from_its_own_adapter(tiny_folder: Path, dtype: str, tolerance: float) -> None:
    engine = backend(dtype)
    base = engine.load_base(tiny_folder)
    trainers: list[SharedTrainer] = [engine.adapter(base, spec, init_seed=seed) for seed, spec in enumerate(SPECS)]
    for index, trainer in enumerate(trainers):
        train(trainer, 30 * index, updates=4)
    trainers.append(engine.adapter_off(base))
    samplers = [sampler_for(trainer) for trainer in trainers]
    drawn = [sampler.sample(PROMPTS, SEEDS, DRAW) for sampler in samplers]
    assert [sampler.sample(PROMPTS, SEEDS, DRAW) for sampler in reversed(samplers)] == drawn[::-1]
    assert len({str(completions) for completions in drawn}) == 4
    for completions in drawn:
        sequences = [
            TokenSequence([*prompt, *c.token_ids], [0.0] * len(prompt) + [1.0] * len(c.token_ids), "")
            for prompt, c in zip(PROMPTS, completions, strict=True)
        ]
        nats = torch.tensor([value for c in completions for value in c.logprobs])
        gaps = []
        for trainer in trainers:
            logprobs = trainer.logprobs(sequences, temperature=1.0, max_tokens=WHOLE)
            gaps.append((torch.cat([torch.tensor(values) for values in logprobs]) - nats).abs().max())
        assert [gap <= tolerance for gap in gaps] == [other is completions for other in drawn]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_synced_sampler_is_a_new_one(tiny_folder: Path, dtype: str) -> None:
    engine = backend(dtype)
    base = engine.load_base(tiny_folder)
    adapter = engine.adapter(base, LORA, init_seed=0)
    sampler = sampler_for(adapter)
    before = sampler.sample(PROMPTS, SEEDS, DRAW)
    train(adapter, 60, updates=4)
    sync(sampler, adapter, "after")
    after = sampler.sample(PROMPTS, SEEDS, DRAW)
    assert after != before
    assert sampler_for(adapter).sample(PROMPTS, SEEDS, DRAW) == after
    assert sampler_for(adapter).model is sampler.model is base.sampling_model()


def test_a_sampler_of_another_base_is_refused(base: SharedBase, tiny_folder: Path) -> None:
    adapter = backend().adapter(base, LORA, init_seed=0)
    for other, made_for in (
        (backend().load(tiny_folder), "whole model"),
        (backend().adapter_off(backend().load_base(tiny_folder)), "its own base model"),
    ):
        with pytest.raises(BadSpec, match=made_for):
            sync(sampler_for(other), adapter, "state")
    with pytest.raises(BadSpec, match="its own base model"):
        sync(sampler_for(adapter), backend().load(tiny_folder), "state")


def test_a_lower_precision_copy_keeps_the_rotary_frequencies(tiny_folder: Path) -> None:
    """In bfloat16, a rotary frequency has a relative error of up to 2^-9, which at position 2000 is several radians."""
    engine = backend("bfloat16")
    full = engine.load(tiny_folder)
    exact = dict(full.model.module.named_buffers())
    for sampler in (sampler_for(full), sampler_for(engine.adapter_off(engine.load_base(tiny_folder)))):
        assert {p.dtype for p in sampler.model.module.parameters()} == {torch.bfloat16}
        buffers = dict(sampler.model.module.named_buffers())
        assert buffers.keys() == exact.keys() != set()
        assert all(torch.equal(buffers[name], exact[name]) for name in exact)


# -- state -----------------------------------------------------------------------------------------------------


def test_a_restored_adapter_goes_on_as_if_it_had_never_stopped(base: SharedBase, tmp_path: Path) -> None:
    trained, restored = (backend().adapter(base, LORA, init_seed=seed) for seed in (0, 9))
    train(trained, 60, updates=2)
    files = trained.write_checkpoint(tmp_path / "checkpoint")
    assert sum(path.stat().st_size for path in files.values()) < 4 * trained.nbytes(training=False) / 3
    restored.read_checkpoint(files, optimizer=True)
    assert restored.weights_digest() == trained.weights_digest()
    for adapter in (trained, restored):
        train(adapter, 80, updates=2)
    assert state_of(restored, tmp_path / "restored") == state_of(trained, tmp_path / "trained")
    fresh = backend().adapter(base, LORA, init_seed=9)
    fresh.read_checkpoint(files, optimizer=False)
    train(fresh, 80, updates=2)
    assert fresh.weights_digest() != trained.weights_digest()  # its moments started from zero


@pytest.mark.parametrize(
    "other",
    [
        LoraSpec(rank=5, alpha=6.0),
        LoraSpec(rank=4, target_modules=("q_proj",)),
    ],
    ids=["rank", "targets"],
)
def test_a_checkpoint_of_another_adapter_is_refused_before_anything_changes(
    base: SharedBase, tmp_path: Path, other: LoraSpec
) -> None:
    theirs, mine = backend().adapter(base, other, init_seed=0), backend().adapter(base, LORA, init_seed=0)
    train(theirs, 60)
    train(mine, 60)
    before = state_of(mine, tmp_path / "before")
    with pytest.raises(BadSpec, match=r"first differing tensor model\.layers\.0\.\S+\.lora_"):
        mine.read_checkpoint(theirs.write_checkpoint(tmp_path / "theirs"), optimizer=True)
    assert state_of(mine, tmp_path / "after") == before


def test_the_digest_is_of_the_matrices_and_of_the_base(
    base: SharedBase, tmp_path: Path, model_folder: Callable[[int], Path]
) -> None:
    adapter = backend().adapter(base, LORA, init_seed=0)
    whole, parts = adapter.weights_digest()
    assert list(parts) == sorted(load_file(adapter.write_checkpoint(tmp_path)["weights.safetensors"]))
    train(adapter, 60)
    after = adapter.weights_digest()[1]
    assert {name for name in parts if parts[name] != after[name]} >= {n for n in parts if "lora_B" in n}
    elsewhere = backend().adapter(backend().load_base(model_folder(1)), LORA, init_seed=0)
    assert elsewhere.weights_digest()[1] == parts
    assert elsewhere.weights_digest()[0] != whole


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[[int], Path]:
    from engine.backends.torch.tiny import build_tiny_model

    return lambda seed: build_tiny_model(tmp_path / f"tiny-{seed}", seed=seed)
