"""Files of any layout are read by any other, to the byte: checkpoints with moments, exports, staged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.backends.protocol import Objective
from engine.backends.weight_files.pieces import StoredTensors, open_checkpoint, part_file, piece_name, shapes_metadata
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.protocol import TokenSequence
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
Load = Callable[..., OnRanks]


def moved(trainer: OnRanks, files: dict[str, Path]) -> dict[str, Path]:
    """Reads the files and writes its own."""
    trainer.call("read_checkpoint", files, True)
    return trainer.checkpoint()


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_rounding_noise_changes_each_weight_on_all_ranks(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, zero_stage: int
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=zero_stage)
    before = state_of(trainer.checkpoint())
    trainer.call("add_rounding_noise", 0.25, 3)
    factors = [whole / before[name] for name, whole in state_of(trainer.checkpoint()).items()]
    for factor in factors:
        assert ((factor - 1).abs() - 0.25).nan_to_num().abs().max() < 1e-6  # a weight of 0 stays 0: its factor is NaN
    assert 0.45 < torch.cat([factor.reshape(-1) for factor in factors]).gt(1).double().mean() < 0.55
    # what computes has the noise too: an update from there starts at these weights on every rank
    other = on_ranks(two_ranks, tiny_folder, zero_stage=3)
    moved(other, trainer.checkpoint())
    sequences = [TokenSequence(token_ids=sample.token_ids, loss_mask=sample.loss_mask) for sample in some_samples()]
    ours, others = (each.trainer.logprobs(sequences, temperature=1.0, max_tokens=64) for each in (trainer, other))
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(others), atol=1e-5)


@pytest.mark.slow
def test_zero_3_on_two_ranks_and_the_torch_trainer_read_each_other(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer, reference = on_ranks(two_ranks, tiny_folder, zero_stage=3), torch_trainer(tiny_folder)
    assert trainer.digest() == reference.weights_digest()[0]
    np.testing.assert_allclose(trainer.call("weights_sketch"), reference.weights_sketch(), rtol=0, atol=1e-9)
    assert all(name.startswith("weights-") for name in trainer.checkpoint())  # no moments before the first update
    trainer.update(some_samples(), CE, ADAMW, 30)
    files = trainer.checkpoint()
    assert sorted(files) == [
        *(part_file("optimizer", rank, 2) for rank in range(2)),
        *(part_file("weights", rank, 2) for rank in range(2)),
    ]
    reference.read_checkpoint(files, optimizer=True)
    back = reference.write_checkpoint(tmp_path / "torch")
    assert same_bytes(state_of(back), state_of(files))
    assert trainer.digest() == reference.weights_digest()[0]
    # and the other way, after an update that only the torch trainer made
    reference.update(some_samples(), CE, ADAMW, max_tokens=30)
    newer = reference.write_checkpoint(tmp_path / "newer")
    assert same_bytes(state_of(moved(trainer, newer)), state_of(newer))
    assert float(state_of(newer)["step.model.norm.weight"]) == 2.0
    # what was read is what computes and what is updated
    for _ in range(2):
        metrics = trainer.update(some_samples(), CE, ADAMW, 30).metrics
        assert metrics == pytest.approx(reference.update(some_samples(), CE, ADAMW, max_tokens=30).metrics, rel=1e-4)
    left, right = state_of(trainer.checkpoint()), state_of(reference.write_checkpoint(tmp_path / "last"))
    assert_weights_close(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_reads_every_other(
    dtype: str, one_rank: RankGroup, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    """Each layout reads what the one before it wrote, and nothing is lost."""
    first = on_ranks(two_ranks, tiny_folder, zero_stage=2, dtype=dtype)
    first.update(some_samples(), CE, ADAMW, 30)
    files = first.checkpoint()
    expected, digest = state_of(files), first.digest()
    two, one = two_ranks, one_rank
    for group, stage in [(two, 3), (one, 2), (two, 1), (two, 0), (one, 3), (two, 2), (one, 1)]:
        trainer = on_ranks(group, tiny_folder, zero_stage=stage, dtype=dtype)
        files = moved(trainer, files)
        assert same_bytes(state_of(files), expected), stage
        assert trainer.digest() == digest
    reference = torch_trainer(tiny_folder)
    reference.read_checkpoint(files, optimizer=True)
    assert same_bytes(state_of(reference.write_checkpoint(tmp_path / "torch")), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_start_anew_when_they_are_not_read(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    trainer, fresh = on_ranks(two_ranks, tiny_folder, zero_stage=stage), torch_trainer(tiny_folder)
    weights = trainer.checkpoint()
    trainer.update(some_samples(), CE, ADAMW, 30)
    for again in ("read_checkpoint", "reset_optimizer"):
        if again == "reset_optimizer":
            trainer.call("read_checkpoint", weights, False)
            trainer.update(some_samples(), CE, ADAMW, 30)
            trainer.call("read_checkpoint", weights, True)  # the files have no moments
            trainer.call("reset_optimizer")
        else:
            trainer.call("read_checkpoint", weights, False)
        assert set(trainer.checkpoint()) == set(weights)
        trainer.update(some_samples(), CE, ADAMW, 30)
        state = state_of(trainer.checkpoint())
        assert float(state["step.model.norm.weight"]) == 1.0
    fresh.update(some_samples(), CE, ADAMW, max_tokens=30)
    assert_weights_close({name: state[name] for name, _ in fresh.weights()}, dict(fresh.weights()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_export_is_a_plain_folder(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    trainer.update(some_samples(), CE, ADAMW, 30)
    names = trainer.call("export", tmp_path / "export")
    assert names == sorted(path.name for path in (tmp_path / "export").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors"} == set(names)
    assert torch_trainer(tmp_path / "export").weights_digest()[0] == trainer.digest()
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    plain.save_pretrained(tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == stored.keys()
    staged = trainer.call("stage_weights", tmp_path / "staged", torch.bfloat16)
    files = [tmp_path / "staged" / name for name in staged if name.endswith(".safetensors")]
    assert len(files) >= 2  # both ranks write
    staged_tensors: dict[str, torch.Tensor] = {}
    for path in files:
        staged_tensors |= load_file(path)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tensor.to(torch.bfloat16) for name, tensor in exported.items()}.keys() == staged_tensors.keys()
    assert all(torch.equal(tensor.to(torch.bfloat16), staged_tensors[name]) for name, tensor in exported.items())


# -- the reader ---------------------------------------------------------------------------------------------------


def write_pieces(folder: Path, cuts: list[tuple[int, int]], *, elements: int = 12) -> list[Path]:
    """Writes the (3, 4) tensor 0, 1, 2, … in pieces of these ranges, one file per piece."""
    paths = []
    for rank, (start, end) in enumerate(cuts):
        paths.append(folder / part_file("weights", rank, len(cuts)))
        piece = torch.arange(elements, dtype=torch.float32)[start:end].clone()
        save_file({piece_name("w", start): piece}, paths[-1], metadata=shapes_metadata({"w": (3, 4)}))
    return paths


def test_pieces_are_read_by_range(tmp_path: Path) -> None:
    tensors = StoredTensors(write_pieces(tmp_path, [(5, 12), (0, 5)]))
    assert tensors.shapes() == {"w": (3, 4)}
    assert torch.equal(tensors.read("w"), torch.arange(12.0).view(3, 4))
    out = torch.full((10,), -1.0)
    tensors.read_into("w", out[2:8], start=3)
    assert out.tolist() == [-1, -1, 3, 4, 5, 6, 7, 8, -1, -1]
    half = torch.empty(2, 2, dtype=torch.bfloat16)
    tensors.read_into("w", half, start=4)
    assert half.tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [([(0, 5), (6, 12)], "missing"), ([(0, 5), (4, 12)], "there twice"), ([(0, 5)], "the files hold 5")],
)
def test_an_incomplete_set_of_files_is_refused(tmp_path: Path, cuts: list[tuple[int, int]], message: str) -> None:
    paths = write_pieces(tmp_path, cuts)
    with pytest.raises(BadSpec, match=message):
        open_checkpoint({path.name: path for path in paths})


def test_a_torn_file_and_a_set_without_weights_are_refused(tmp_path: Path) -> None:
    paths = write_pieces(tmp_path, [(0, 5), (5, 12)])
    paths[1].write_bytes(paths[1].read_bytes()[:-3])
    with pytest.raises(BadSpec, match="not a whole safetensors file"):
        StoredTensors(paths)
    with pytest.raises(BadSpec, match="no weights among"):
        open_checkpoint({"optimizer.safetensors": tmp_path / "optimizer.safetensors"})


@pytest.mark.slow
def test_a_misfit_leaves_the_trainer_as_it_was(
    two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=2)
    trainer.update(some_samples(), CE, ADAMW, 30)
    files = trainer.checkpoint()
    before = state_of(files)
    paths = write_pieces(tmp_path, [(0, 12)])
    with pytest.raises(BadSpec, match="does not fit the model"):
        trainer.call("read_checkpoint", {path.name: path for path in paths}, True)
    assert same_bytes(state_of(trainer.checkpoint()), before)
    assert whole(open_checkpoint(files).weights).keys() < before.keys()
