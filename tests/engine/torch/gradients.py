"""Gradients of a trainer's updates, read when the optimizer is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.trainer import TorchTrainer
from engine.models.samples import Sample
from storage.chain.records import OptimizerSpec

WHOLE = 4096
"""More packed tokens than any test's minibatch has."""
NO_CLIP = 1e300
"""An optimizer that neither clips (no gradient has this norm) nor moves the weights (lr 0)."""

Grads = dict[str, Tensor]


def update(
    trainer: TorchTrainer,
    samples: Sequence[Sample],
    objective: Objective,
    optimizer: OptimizerSpec | None = None,
    *,
    max_tokens: int = WHOLE,
) -> tuple[UpdateReport, Grads]:
    """(report of one update, gradient that the optimizer got). The gradient is empty when the optimizer was not
    called."""
    names = {id(p): name for name, p in trainer.model.module.named_parameters()}
    caught: Grads = {}

    def catch(adamw: torch.optim.Optimizer, *_: Any) -> None:
        for group in adamw.param_groups:
            caught.update({names[id(p)]: p.grad.clone() for p in group["params"] if p.grad is not None})

    hook = register_optimizer_step_pre_hook(catch)
    try:
        report = trainer.update(
            samples, objective, optimizer or OptimizerSpec(lr=0, max_grad_norm=NO_CLIP), max_tokens=max_tokens
        )
    finally:
        hook.remove()
    return report, caught


ROUNDING = 1e-12
"""A norm that float64 leaves where gradients of order 1 cancel, as those of a pair of equal completions do."""


def distance(gradient: Grads, expected: Grads) -> float:
    """Relative L2 distance of the whole gradients; the absolute one if the expected is zero up to rounding."""
    assert gradient.keys() == expected.keys()
    gap = math.sqrt(sum((gradient[name] - expected[name]).double().square().sum().item() for name in expected))
    norm = norm_of(expected)
    return gap / (norm if norm > ROUNDING else 1.0)


def norm_of(grads: Grads) -> float:
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
