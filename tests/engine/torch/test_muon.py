"""Muon: updates by hand, which weights it steps, and moments in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.backends.protocol import Objective
from engine.backends.torch.optimizers import TrainerOptimizer, hidden_matrices
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec
from tests.engine.losses.conftest import load
from tests.engine.torch.gradients import update
from tests.fixtures.adapters import LORA, backend

CE = Objective(CrossEntropySpec())
SAMPLES = [Sample([1, 2, 3, 4, 5], [0, 1, 1, 1, 1]), Sample([7, 6, 5], [0, 1, 1])]
MUON = OptimizerSpec(kind="muon", lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)


def iterated(value: float) -> float:
    """A singular value after Muon's five iterations."""
    for _ in range(5):
        value = 3.4445 * value - 4.775 * value**3 + 2.0315 * value**5
    return value


def test_two_updates_by_hand() -> None:
    """A diagonal gradient stays diagonal, so that each entry is a singular value: 3 and 4 divided by their norm 5, then
    g + 0.95 B with B = 0.95 (3, 4) + (5, 0) = (7.85, 3.8), which is (12.4575, 3.61). The update has the factor 0.2
    sqrt(2), after the decay by 1 - lr · 0.1. torch takes the iteration in bfloat16, which has two to three digits."""
    layer = nn.Sequential(nn.Linear(2, 2, bias=False))
    layer[0].weight.data = torch.tensor([[1.0, 0.5], [-0.5, 2.0]])
    optimizer = TrainerOptimizer("muon", list(layer.named_parameters()), layer)
    expected = layer[0].weight.detach().clone()
    for gradient, argument in (((3.0, 4.0), (0.6, 0.8)), ((5.0, 0.0), (0.960484, 0.278334))):
        optimizer.apply(MUON)
        layer[0].weight.grad = torch.tensor(gradient).diag()
        optimizer.step()
        moved = torch.tensor([iterated(value) for value in argument]).diag()
        expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * 2**0.5 * moved
        assert layer[0].weight.detach().numpy() == pytest.approx(expected.numpy(), abs=2e-4)
    assert iterated(0.6) == pytest.approx(0.722876, abs=1e-6) and iterated(0.8) == pytest.approx(1.119204, abs=1e-6)


def test_the_hidden_matrices_have_the_updates_of_torch_muon(tiny_folder: Path) -> None:
    trainer = TorchTrainer(load(tiny_folder, torch.float64))
    trained = dict(trainer.trained_parameters())
    hidden = hidden_matrices(trained.items(), trainer.model.module)
    mine = {name: nn.Parameter(trained[name].detach().clone()) for name in sorted(hidden)}
    theirs = torch.optim.Muon(list(mine.values()), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for lr in (1e-2, 5e-3):
        _, grads = update(trainer, SAMPLES, CE, MUON.model_copy(update={"lr": lr}))
        theirs.param_groups[0]["lr"] = lr
        for name, parameter in mine.items():
            parameter.grad = grads[name]
        theirs.step()
    assert all(torch.equal(mine[name], trained[name]) for name in hidden)


def test_everything_else_has_the_updates_of_adamw(tiny_folder: Path) -> None:
    trainers = [TorchTrainer(load(tiny_folder, torch.float64)) for _ in range(2)]
    for trainer, kind in zip(trainers, ("muon", "adamw"), strict=True):
        update(trainer, SAMPLES, CE, MUON.model_copy(update={"kind": kind}))
    names = {name for name, _ in trainers[0].trained_parameters()}
    hidden = hidden_matrices(trainers[0].trained_parameters(), trainers[0].model.module)
    weights = [dict(trainer.trained_parameters()) for trainer in trainers]
    equal = {name for name in names if torch.equal(weights[0][name], weights[1][name])}
    assert equal == names - hidden
    for name in names - hidden:
        assert "embed" in name or "norm" in name or "lm_head" in name, name
    assert all(".layers." in name for name in hidden)


def test_a_nested_output_head_is_no_hidden_matrix() -> None:
    inner = nn.ModuleDict({"embed": nn.Embedding(3, 2), "up": nn.Linear(2, 2), "lm_head": nn.Linear(2, 3, bias=False)})
    model = nn.ModuleDict({"language_model": inner})
    assert hidden_matrices(model.named_parameters(), model) == {"language_model.up.weight"}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_trainer_that_reads_its_moments_goes_on_with_the_same_bytes(
    adapter: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    engine = backend()

    def new() -> TorchTrainer:
        if adapter:
            return engine.adapter(engine.load_base(tiny_folder), LORA, init_seed=0)
        return engine.load(tiny_folder)

    def step(trainer: TorchTrainer) -> str:
        trainer.update(SAMPLES, CE, MUON, max_tokens=64)
        return trainer.weights_digest()[0]

    whole = new()
    digests = [step(whole) for _ in range(2)]
    files = whole.write_checkpoint(tmp_path / "checkpoint")
    digests.append(step(whole))
    assert len(set(digests)) == 3
    resumed = new()
    resumed.read_checkpoint(files, optimizer=True)
    assert step(resumed) == digests[2]
    repeated = new()
    assert [step(repeated) for _ in range(3)] == digests
    # without the moments, the third update is another one
    fresh = new()
    fresh.read_checkpoint(files, optimizer=False)
    assert step(fresh) != digests[2]
    assert len(fresh.logprobs([TokenSequence([1, 2], [0, 1])], temperature=1.0, max_tokens=64)) == 1


def test_the_moments_of_another_optimizer_are_refused(tiny_folder: Path) -> None:
    trainer = TorchTrainer(load(tiny_folder, torch.float64))
    update(trainer, SAMPLES, CE, OptimizerSpec(lr=0.1))
    with pytest.raises(BadSpec, match="the step is one of muon, and the moments of its policy are those of adamw"):
        update(trainer, SAMPLES, CE, MUON)
    trainer.reset_optimizer()
    update(trainer, SAMPLES, CE, MUON)


def test_requests_of_adamw_are_those_of_before() -> None:
    assert OptimizerSpec(lr=0.1).model_dump().keys() == {
        "lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm",
    }  # fmt: skip
