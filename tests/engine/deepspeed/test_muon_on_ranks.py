"""Muon on ranks: the updates of the torch trainer on every stage, moments that any layout reads, and the same bytes
after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.optimizers import hidden_matrices
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.pieces import open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from tests.engine.deepspeed.conftest import (
    ADAMW,
    OnRanks,
    assert_weights_close,
    same_bytes,
    some_samples,
    state_of,
    torch_trainer,
    whole,
)

CE = Objective(CrossEntropySpec())
MUON = ADAMW.model_copy(update={"kind": "muon"})
WHOLE = 4096
BFLOAT16 = 2.0**-8
"""Relative rounding error of bfloat16, in which torch iterates: a gradient that was summed in another order changes an
update by a few of these."""
Load = Callable[..., OnRanks]


def hidden_of(trainer: TorchTrainer) -> set[str]:
    return hidden_matrices(trainer.trained_parameters(), trainer.model.module)


def weights_of(trainer: OnRanks) -> dict[str, Tensor]:
    return whole(open_checkpoint(trainer.checkpoint()).weights)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> tuple[dict[str, Tensor], TorchTrainer]:
    """(the weights before, the torch trainer after two updates)."""
    trainer = torch_trainer(tiny_folder)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    for _ in range(2):
        trainer.update(some_samples(), CE, MUON, max_tokens=WHOLE)
    return before, trainer


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_two_ranks_have_the_updates_of_the_torch_trainer(
    zero_stage: int,
    two_ranks: RankGroup,
    on_ranks: Load,
    tiny_folder: Path,
    reference: tuple[dict[str, Tensor], TorchTrainer],
) -> None:
    before, torch_muon = reference
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=zero_stage)
    for _ in range(2):
        trainer.update(some_samples(), CE, MUON, WHOLE)
    weights, expected, hidden = weights_of(trainer), dict(torch_muon.weights()), hidden_of(torch_muon)
    assert len(hidden) > 20
    for name in hidden:
        moved = (expected[name] - before[name]).norm()
        assert moved > 0
        assert (weights[name] - expected[name]).norm() < 8 * BFLOAT16 * moved, name
    others = weights.keys() - hidden
    after_muon = 4 * BFLOAT16 * ADAMW.lr  # the second gradient is that of slightly other matrices
    assert max((weights[name] - expected[name]).abs().max().item() for name in others) < after_muon


@pytest.mark.slow
def test_the_first_update_of_the_other_weights_is_adamws(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    adamw, muon = (on_ranks(two_ranks, tiny_folder, zero_stage=2) for _ in range(2))
    adamw.update(some_samples(), CE, ADAMW, WHOLE)
    muon.update(some_samples(), CE, MUON, WHOLE)
    left, right = weights_of(adamw), weights_of(muon)
    others = left.keys() - hidden_of(torch_trainer(tiny_folder))
    assert_weights_close({name: right[name] for name in others}, {name: left[name] for name in others}, updates=1)
    assert all("layers" not in name or "norm" in name for name in others)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_resume_goes_on_with_the_same_bytes_and_other_layouts_read_the_moments(
    zero_stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=zero_stage)
    trainer.update(some_samples(), CE, MUON, WHOLE)
    files = trainer.checkpoint()
    trainer.update(some_samples(), CE, MUON, WHOLE)
    resumed = on_ranks(two_ranks, tiny_folder, zero_stage=zero_stage)
    resumed.call("read_checkpoint", files, True)
    resumed.update(some_samples(), CE, MUON, WHOLE)
    assert resumed.digest() == trainer.digest()
    # the torch trainer reads the files, and writes the same state
    single = torch_trainer(tiny_folder)
    single.read_checkpoint(files, optimizer=True)
    state = state_of(files)
    assert same_bytes(state_of(single.write_checkpoint(tmp_path / "torch")), state)
    hidden = hidden_of(single)
    assert {name.removeprefix("momentum_buffer.") for name in state if name.startswith("momentum")} == hidden
    assert not any(name.removeprefix("exp_avg.") in hidden for name in state if name.startswith("exp_avg."))
    # another stage reads the torch trainer's, and the third update is that of the same moments
    other = on_ranks(two_ranks, tiny_folder, zero_stage=(zero_stage + 2) % 4)
    other.call("read_checkpoint", single.write_checkpoint(tmp_path / "again"), True)
    assert same_bytes(state_of(other.checkpoint()), state)


@pytest.mark.slow
def test_moments_of_another_kind_are_refused_before_anything_changes(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=2)
    trainer.update(some_samples(), CE, MUON, WHOLE)
    before = trainer.digest()
    with pytest.raises(BadSpec, match="the step is one of adamw, and the moments of its policy are those of muon"):
        trainer.update(some_samples(), CE, ADAMW, WHOLE)
    assert trainer.digest() == before
    trainer.call("reset_optimizer")
    trainer.update(some_samples(), CE, ADAMW, WHOLE)
    fresh = on_ranks(two_ranks, tiny_folder, zero_stage=1)
    fresh.call("read_checkpoint", trainer.checkpoint(), True)
    with pytest.raises(BadSpec, match="the step is one of muon, and the moments of its policy are those of adamw"):
        fresh.update(some_samples(), CE, MUON, WHOLE)


@pytest.mark.slow
def test_moments_of_8_bits_are_refused(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    in_8_bits = ADAMW.model_copy(update={"kind": "adamw_8bit"})
    single, trainer = torch_trainer(tiny_folder), on_ranks(two_ranks, tiny_folder, zero_stage=1)
    with pytest.raises(BadSpec, match="which only the torch trainer has"):
        trainer.update(some_samples(), CE, in_8_bits, WHOLE)
    single.update(some_samples(), CE, in_8_bits, max_tokens=WHOLE)
    before = trainer.digest()
    with pytest.raises(BadSpec, match="the checkpoint has the moments of adamw_8bit"):
        trainer.call("read_checkpoint", single.write_checkpoint(tmp_path / "8"), True)
    assert trainer.digest() == before


@pytest.mark.slow
def test_masters_of_bfloat16_move(two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path) -> None:
    """In stage 1 with bfloat16, DeepSpeed has another class of optimizers."""
    weights = []
    for zero_stage in (1, 3):
        trainer = on_ranks(two_ranks, tiny_folder, zero_stage=zero_stage, dtype="bfloat16")
        trainer.update(some_samples(), CE, MUON, WHOLE)
        weights.append(weights_of(trainer))
    start = dict(torch_trainer(tiny_folder).weights())
    for name in hidden_of(torch_trainer(tiny_folder)):
        left, right = (after[name] - start[name] for after in weights)
        assert torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0) > 0.95, name
