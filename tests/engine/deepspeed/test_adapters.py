"""LoRA adapters on ranks train, save and export as those of the torch trainer do, in every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.backends.protocol import Objective
from engine.backends.torch.shared_base import AdapterTrainer
from engine.backends.weight_files.pieces import open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.losses.values import MSESpec
from engine.protocol import TokenSequence
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.conftest import (
    ADAMW,
    NUMBERS,
    VALUE_TOLERANCE,
    OnRanks,
    assert_weights_close,
    same_bytes,
    some_samples,
    state_of,
    whole,
)
from tests.engine.deepspeed.lab import lab_options
from tests.fixtures.adapters import DORA, LORA, SOME, backend

KEY = "models/tiny/000001"
GRPO = Objective(GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.1))
CE = Objective(CrossEntropySpec())
SPLIT = 30
STAGES = [0, 1, 2, 3]


@dataclass
class Adapters:
    """Loads adapters on the two ranks, and frees them after the test."""

    group: RankGroup
    folder: Path
    files: Path
    loaded: list[int]

    def load(
        self, spec: LoraSpec = LORA, *, seed: int = 0, base: int | None = None, dtype: str = "float32", **trainer: Any
    ) -> OnRanks:
        base = base or next(NUMBERS)
        adapter = OnRanks(self.group, next(NUMBERS), self.files)
        adapter.load("load_adapter_with", base, lab_options(dtype, **trainer), self.folder, spec, seed, **trainer)
        self.loaded += [adapter.number, base]
        return adapter


@pytest.fixture
def adapters(two_ranks: RankGroup, tiny_folder: Path, tmp_path: Path) -> Iterator[Adapters]:
    adapters = Adapters(two_ranks, tiny_folder, tmp_path, [])
    yield adapters
    for number in adapters.loaded:
        if two_ranks.alive:
            two_ranks.call("free", number)


def torch_adapter(folder: Path, spec: LoraSpec = LORA, *, seed: int = 0, dtype: str = "float32") -> AdapterTrainer:
    trainers = backend(dtype)
    return trainers.adapter(trainers.load_base(folder, key=KEY), spec, init_seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_an_adapter_as_the_torch_trainer_does(
    stage: int, spec: LoraSpec, adapters: Adapters, tiny_folder: Path
) -> None:
    trainer, reference = adapters.load(spec, zero_stage=stage), torch_adapter(tiny_folder, spec)
    assert trainer.digest() == reference.weights_digest()[0]
    for _ in range(3):
        expected = reference.update(some_samples(), GRPO, ADAMW, max_tokens=4096).metrics
        metrics = trainer.update(some_samples(), GRPO, ADAMW, SPLIT).metrics
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=VALUE_TOLERANCE)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_weights_close(whole(open_checkpoint(trainer.checkpoint()).weights), dict(reference.weights()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_frozen_base_takes_no_gradient_and_no_moment(stage: int, adapters: Adapters, tiny_folder: Path) -> None:
    reference = torch_adapter(tiny_folder)
    trainer = adapters.load(zero_stage=stage)
    trainer.update(some_samples(), CE, ADAMW, SPLIT)
    trained = sum(weight.numel() for _, weight in reference.weights())
    held = trainer.call("held_by_adapter")
    copies = 2 if stage == 0 else 1  # stages 1 to 3 split masters and moments over the ranks
    assert sum(rank["masters"] for rank in held) == copies * trained
    assert sum(rank["moments"] for rank in held) == 2 * copies * trained
    assert [rank["base_gradients"] for rank in held] == [0, 0]
    base = sum(weight.numel() for _, weight in reference.base.model.named_weights())
    expected = base if stage == 3 else 2 * base
    assert expected <= sum(rank["base"] for rank in held) <= expected + 2 * 100  # stage 3 pads the last parts


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_and_the_torch_trainer_read_each_other(
    stage: int, adapters: Adapters, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer, reference = adapters.load(SOME, zero_stage=stage), torch_adapter(tiny_folder, SOME, seed=9)
    for _ in range(2):
        trainer.update(some_samples(), CE, ADAMW, SPLIT)
    # From the ranks to one process, with moments.
    files = trainer.checkpoint()
    reference.read_checkpoint(files, optimizer=True)
    assert trainer.digest() == reference.weights_digest()[0]
    assert same_bytes(state_of(reference.write_checkpoint(tmp_path / "torch")), state_of(files))
    # And back, after an update that only the torch trainer made, to an adapter on the same base in another stage.
    reference.update(some_samples(), CE, ADAMW, max_tokens=SPLIT)
    newer = reference.write_checkpoint(tmp_path / "newer")
    other = adapters.load(SOME, zero_stage=(stage + 1) % 4)
    other.call("read_checkpoint", newer, True)
    assert same_bytes(state_of(other.checkpoint()), state_of(newer))
    expected = reference.update(some_samples(), CE, ADAMW, max_tokens=SPLIT).metrics
    assert other.update(some_samples(), CE, ADAMW, SPLIT).metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "spec"), [(0, LORA), (2, LORA), (3, LORA), (3, DORA)])
def test_exports_are_those_of_the_torch_trainer(
    stage: int, spec: LoraSpec, adapters: Adapters, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer, reference = adapters.load(spec, zero_stage=stage), torch_adapter(tiny_folder, spec)
    trainer.update(some_samples(), CE, ADAMW, SPLIT)
    reference.read_checkpoint(trainer.checkpoint(), optimizer=True)
    calls = {"merged": "export", "adapter": "export_adapter"}
    reference.export_merged(tmp_path / "torch-merged")
    reference.export(tmp_path / "torch-adapter")
    for kind, call in calls.items():
        names = trainer.call(call, tmp_path / kind)
        assert names == sorted(path.name for path in (tmp_path / f"torch-{kind}").iterdir())
        for name in names:
            ours, expected = (folder / name for folder in (tmp_path / kind, tmp_path / f"torch-{kind}"))
            if name.endswith(".safetensors"):
                assert same_bytes(load_file(ours), load_file(expected))
            else:
                assert ours.read_text() == expected.read_text()
    # What a sampler gets are the weights of the base, or with DoRA the merged ones.
    staged: dict[str, torch.Tensor] = {}
    for name in trainer.call("stage_weights", tmp_path / "staged", torch.float32):
        if name.endswith(".safetensors"):
            staged |= load_file(tmp_path / "staged" / name)
    served = tmp_path / "merged" if spec.use_dora else tiny_folder
    assert same_bytes(staged, load_file(served / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_share_a_base(stage: int, adapters: Adapters, tiny_folder: Path) -> None:
    """Adapters that are trained in turn are those that are trained alone, and the base keeps its logprobs."""
    base, specs = next(NUMBERS), [LORA, SOME]
    together = [adapters.load(spec, seed=seed, base=base, zero_stage=stage) for seed, spec in enumerate(specs)]
    off = OnRanks(adapters.group, next(NUMBERS), adapters.files)
    off.load("load_adapter_off", base, zero_stage=stage)
    adapters.loaded.insert(0, off.number)
    sequences = [TokenSequence(token_ids=s.token_ids, loss_mask=s.loss_mask) for s in some_samples()]

    def logprobs(trainer: OnRanks) -> list[list[float]]:
        rows = trainer.trainer.logprobs(sequences, temperature=1.0, max_tokens=SPLIT)
        return [row.tolist() for row in rows]

    before = logprobs(off)
    for _ in range(2):
        for index, trainer in enumerate(together):
            trainer.update(some_samples()[index:], CE, ADAMW, SPLIT)
    assert logprobs(off) == before
    assert off.digest() == torch_adapter(tiny_folder).base.digest
    for index, (spec, trainer) in enumerate(zip(specs, together, strict=True)):
        alone = adapters.load(spec, seed=index, zero_stage=stage)
        for _ in range(2):
            alone.update(some_samples()[index:], CE, ADAMW, SPLIT)
        assert alone.digest() == trainer.digest()
        assert logprobs(trainer) != before


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_keeps_the_adapter_in_float32(stage: int, adapters: Adapters, tiny_folder: Path) -> None:
    reference = torch_adapter(tiny_folder, dtype="bfloat16")
    trainer = adapters.load(dtype="bfloat16", zero_stage=stage)
    assert trainer.digest() == reference.weights_digest()[0]
    small = OptimizerSpec(lr=1e-6)
    for _ in range(2):
        expected = reference.update(some_samples(), CE, small, max_tokens=4096).metrics
        metrics = trainer.update(some_samples(), CE, small, 4096).metrics
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=5e-3)
    weights = whole(open_checkpoint(trainer.checkpoint()).weights)
    moved = max(tensor.abs().max().item() for name, tensor in weights.items() if "lora_B" in name)
    assert 1e-6 < moved < 2.5e-6  # two steps of AdamW, which a bfloat16 weight would also keep near zero
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        {"zero_stage": 2, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_parameters": "cpu"},
        {"zero_stage": 2, "activation_checkpointing": "recompute"},
        {"zero_stage": 3, "activation_checkpointing": "offload"},
        {"zero_stage": 1, "sequence_parallel": 2},
        {"zero_stage": 3, "sequence_parallel": 2},
    ],
    ids=str,
)
def test_saving_memory_changes_nothing(trainer: dict[str, Any], adapters: Adapters, tiny_folder: Path) -> None:
    sparing, reference = adapters.load(**trainer), torch_adapter(tiny_folder)
    for _ in range(2):
        expected = reference.update(some_samples(), CE, ADAMW, max_tokens=SPLIT).metrics
        assert sparing.update(some_samples(), CE, ADAMW, SPLIT).metrics == pytest.approx(expected, rel=1e-4)
    assert_weights_close(whole(open_checkpoint(sparing.checkpoint()).weights), dict(reference.weights()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_scalar_head_is_trained_with_the_adapter(
    stage: int, adapters: Adapters, tiny_folder: Path, tmp_path: Path
) -> None:
    spec = LoraSpec(rank=4, alpha=6.0, head="scalar")
    trainer, reference = adapters.load(spec, seed=5, zero_stage=stage), torch_adapter(tiny_folder, spec, seed=5)
    assert trainer.digest() == reference.weights_digest()[0]
    samples = [sample.__class__(sample.token_ids, sample.loss_mask, returns=[1.0] * sample.trained)
               for sample in some_samples()]  # fmt: skip
    for _ in range(2):
        expected = reference.update(samples, Objective(MSESpec()), ADAMW, max_tokens=SPLIT).metrics
        assert trainer.update(samples, Objective(MSESpec()), ADAMW, SPLIT).metrics == pytest.approx(expected, rel=1e-3)
    reference.read_checkpoint(trainer.checkpoint(), optimizer=True)
    trainer.call("export", tmp_path / "merged")
    reference.export_merged(tmp_path / "torch")
    merged, expected_weights = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "torch"))
    assert "score.weight" in merged and same_bytes(merged, expected_weights)


@pytest.mark.slow
def test_a_bad_target_is_refused_by_all_ranks(adapters: Adapters) -> None:
    with pytest.raises(BadSpec, match="no linear layer of the model"):
        adapters.load(LoraSpec(target_modules=("no_proj",)), zero_stage=2)
    assert adapters.group.alive


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_an_adapter_trains_with_muon_and_the_torch_trainer_reads_its_moments(
    zero_stage: int, adapters: Adapters, tiny_folder: Path, tmp_path: Path
) -> None:
    """All weights of an adapter are matrices of Muon, so its moments have no count of steps."""
    muon = ADAMW.model_copy(update={"kind": "muon"})
    adapter, reference = adapters.load(zero_stage=zero_stage), torch_adapter(tiny_folder)
    before = {name: weight.clone() for name, weight in whole(open_checkpoint(adapter.checkpoint()).weights).items()}
    for trainer in (adapter.trainer, reference):
        trainer.update(some_samples(), CE, muon, max_tokens=4096)
    files = adapter.checkpoint()
    weights = whole(open_checkpoint(files).weights)
    expected = whole(open_checkpoint(reference.write_checkpoint(tmp_path / "torch")).weights)
    for name, weight in weights.items():
        moved = (expected[name] - before[name]).norm()
        # torch iterates in bfloat16, whose rounding error is 2^-8
        assert (weight - expected[name]).norm() <= 2**-5 * moved, name
    reference.read_checkpoint(files, optimizer=True)
    assert same_bytes(state_of(reference.write_checkpoint(tmp_path / "read")), state_of(files))
    resumed = adapters.load(zero_stage=zero_stage)
    resumed.call("read_checkpoint", files, True)
    for trainer in (adapter, resumed):
        trainer.update(some_samples(), CE, muon, 4096)
    assert resumed.digest() == adapter.digest()
