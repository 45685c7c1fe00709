"""Tensor files have the bytes of safetensors. A checkpoint is read into the weights in place, or does not change
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files import tensor_files
from engine.backends.weight_files.tensor_files import read_tensors, shapes_of, write_tensors
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from storage.chain.records import OptimizerSpec

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Every dtype, twice, odd sizes, a scalar, an empty one, and names that sort or encode unusually."""
    tensors = {f"{turn}.{dtype}": (torch.arange(7) % 2).to(dtype) for turn in "ba" for dtype in DTYPES}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "matrix": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
        'é "quoted" \\': torch.ones(2, dtype=torch.int64),
    }


def test_the_bytes_are_those_of_safetensors(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_tensors(tmp_path / "mine", tensors.items())
    write_tensors(tmp_path / "turned", reversed(tensors.items()))
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "turned").read_bytes()


@pytest.mark.parametrize("reopen_bytes", [1, 64 << 20])
def test_what_was_written_is_read(
    tensors: dict[str, Tensor], tmp_path: Path, reopen_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "REOPEN_BYTES", reopen_bytes)
    turned = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).T
    tensors |= {"not contiguous": turned, "a part": turned[1:3]}
    write_tensors(tmp_path / "file", tensors.items())
    for stored in (dict(read_tensors(tmp_path / "file")), load_file(tmp_path / "file")):
        assert stored.keys() == tensors.keys()
        assert all(stored[n].dtype == t.dtype and torch.equal(stored[n], t) for n, t in tensors.items())
    assert shapes_of(tmp_path / "file") == {name: tuple(tensor.shape) for name, tensor in stored.items()}


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", [])
    assert list(read_tensors(tmp_path / "file")) == []


def test_a_name_twice_or_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSpec, match="'x' is given twice"):
        write_tensors(tmp_path / "file", [("x", torch.zeros(1)), ("x", torch.zeros(1))])
    with pytest.raises(BadSpec, match="'x' is of torch.complex64"):
        write_tensors(tmp_path / "file", [("x", torch.zeros(1, dtype=torch.complex64))])
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("size", [0, 2, 100, 456, 460])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, [("x", torch.ones(100))])
    data = path.read_bytes()
    assert 460 < len(data) < 480  # 400 of the tensor, the rest header
    path.write_bytes(data[:size])
    with pytest.raises(BadSpec, match=r"weights\.safetensors is not a whole safetensors file"):
        list(read_tensors(path))


# -- the checkpoint of a whole model ---------------------------------------------------------------------------

CE = Objective(CrossEntropySpec())


@pytest.fixture
def make(tiny_folder: Path) -> Callable[[], TorchTrainer]:
    def load() -> TorchTrainer:
        kind = {"dtype": torch.float32, "compute_dtype": torch.float32, "device": torch.device("cpu")}
        return TorchTrainer(load_model(tiny_folder, **kind))

    return load


def train(trainer: TorchTrainer, first: int) -> None:
    batch = [Sample([first, 3, 4, 5], [0.0, 1.0, 1.0, 1.0])]
    trainer.update(batch, CE, OptimizerSpec(lr=1e-3), max_tokens=64)


def state_of(trainer: TorchTrainer, folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in trainer.write_checkpoint(folder).items()}


def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped(
    make: Callable[[], TorchTrainer], tmp_path: Path
) -> None:
    trained, restored = make(), make()
    for first in (1, 2):
        train(trained, first)
    files = trained.write_checkpoint(tmp_path / "checkpoint")
    assert sorted(files) == ["optimizer.safetensors", "weights.safetensors"]
    places = [tensor.data_ptr() for _, tensor in restored.weights()]
    restored.read_checkpoint(files, optimizer=True)
    assert [tensor.data_ptr() for _, tensor in restored.weights()] == places
    for path in files.values():
        path.unlink()  # nothing of the file may still be mapped in
    assert restored.nbytes(training=False) == trained.nbytes(training=False)
    for trainer in (trained, restored):
        train(trainer, 3)
    assert state_of(restored, tmp_path / "restored") == state_of(trained, tmp_path / "trained")


def test_a_tied_head_is_in_the_file_once(make: Callable[[], TorchTrainer], tmp_path: Path) -> None:
    weights = load_file(make().write_checkpoint(tmp_path)["weights.safetensors"])
    assert len([name for name in weights if "lm_head" in name or "embed_tokens" in name]) == 1


def drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def add(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros(1)


def widen(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros(3, 7)


@pytest.mark.parametrize(
    ("file", "damage", "name"),
    [
        ("weights.safetensors", drop, "model.norm.weight"),
        ("weights.safetensors", add, "model.layers.9.extra"),
        ("weights.safetensors", widen, "model.layers.1.mlp.up_proj.weight"),
        ("optimizer.safetensors", drop, "exp_avg.model.norm.weight"),
        ("optimizer.safetensors", drop, "step.model.norm.weight"),
        ("optimizer.safetensors", add, "exp_avg.model.layers.9.extra"),
        ("optimizer.safetensors", add, "momentum.model.norm.weight"),
        ("optimizer.safetensors", widen, "exp_avg_sq.model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    make: Callable[[], TorchTrainer],
    tmp_path: Path,
    file: str,
    damage: Callable[[dict[str, Tensor], str], None],
    name: str,
) -> None:
    theirs, mine = make(), make()
    train(theirs, 1)
    train(mine, 2)
    files = theirs.write_checkpoint(tmp_path / "theirs")
    tensors = {n: t.clone() for n, t in load_file(files[file]).items()}
    damage(tensors, name)
    save_file(tensors, files[file])
    before = state_of(mine, tmp_path / "before")
    with pytest.raises(BadSpec) as refused:
        mine.read_checkpoint(files, optimizer=True)
    assert f"first differing tensor {name}," in str(refused.value)
    assert state_of(mine, tmp_path / "after") == before


def test_nbytes_of_a_whole_model_by_hand(make: Callable[[], TorchTrainer]) -> None:
    trainer = make()
    weights = 4 * sum(p.numel() for p in trainer.model.module.parameters())
    assert (trainer.nbytes(training=False), trainer.nbytes()) == (weights, 4 * weights)
    train(trainer, 1)
    steps = 4 * len(list(trainer.model.module.parameters()))
    assert (trainer.nbytes(training=False), trainer.nbytes()) == (3 * weights + steps, 4 * weights)
    trainer.reset_optimizer()
    assert trainer.nbytes(training=False) == weights
