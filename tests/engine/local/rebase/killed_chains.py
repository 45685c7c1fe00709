"""A chain whose engine was killed, with or without a step that was taken wrongly, for tests of its redo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.backends.torch.trainer import TorchTrainer
from engine.local.engine import LocalEngine
from engine.specs.adapters import FullSpec, TrainableSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, OptimizerSpec, PolicyRef
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after, row

STEPS = 4
LR = 1e-4
WRONG_STEP = 3
"""The step that is taken wrongly, where one is planted. The moments are not fresh any more."""


async def take_step(
    engine: LocalEngine, parent: PolicyRef, *, max_grad_norm: float = 1.0, tokens: int = 12
) -> PolicyRef:
    """A step on a batch of its own, with enough rows that its gradient is not mostly rounding. `tokens`: of each
    completion."""
    rows = []
    for number in range(6):
        start = 7 * number + 31 * parent.step
        rows.append(row([10, 11, start % 90], [(start + token * (number + 2)) % 200 for token in range(tokens)]))
    request = request_after(parent, commit_batch(engine.store, parent, rows))
    optimizer = OptimizerSpec(lr=LR, max_grad_norm=max_grad_norm)
    record = await engine.take_gradient_step(request.model_copy(update={"optimizer": optimizer}))
    return record.policy


async def chain_of_a_killed_engine(
    url: str,
    folder: Path,
    spec: LocalEngineSpec,
    *,
    trainable: TrainableSpec = FullSpec(),
    max_grad_norm: float = 1.0,
    tokens: int = 12,
    checkpoint_at: int | None = None,
    wrong: Callable[[LocalEngine, PolicyRef], None] = lambda engine, policy: None,
) -> Chain:
    """A chain of STEPS steps by an engine that was killed. `wrong` is called before WRONG_STEP is taken."""
    engine = LocalEngine(url, spec)
    policy = await new_policy(engine, folder, trainable=trainable)
    for step in range(STEPS):
        if step + 1 == WRONG_STEP:
            wrong(engine, policy)
        policy = await take_step(engine, policy, max_grad_norm=max_grad_norm, tokens=tokens)
        if step + 1 == checkpoint_at:
            await engine.save_checkpoint(policy, provenance=PROVENANCE)
    await engine.close(checkpoint=False)
    return Chain.of(engine.store, policy)


def trainer_of(engine: LocalEngine, policy: PolicyRef) -> TorchTrainer:
    loaded = engine.loaded_policies.training_policy_of(policy)
    assert loaded is not None and isinstance(loaded.trainer, TorchTrainer)
    return loaded.trainer


def with_other_update(change: Callable[..., Any]) -> Callable[[LocalEngine, PolicyRef], None]:
    """Replaces the next update of the trainer by `change(trainer, update, samples, objective, optimizer, options)`."""

    def wrong(engine: LocalEngine, policy: PolicyRef) -> None:
        trainer = trainer_of(engine, policy)
        update = trainer.update

        def once(samples: Any, objective: Any, optimizer: OptimizerSpec, **options: Any) -> Any:
            trainer.update = update  # type: ignore[method-assign]
            return change(trainer, update, samples, objective, optimizer, options)

        trainer.update = once  # type: ignore[assignment]

    return wrong


def faster(trainer: Any, update: Any, samples: Any, objective: Any, optimizer: OptimizerSpec, options: Any) -> Any:
    return update(samples, objective, optimizer.model_copy(update={"lr": 1.1 * optimizer.lr}), **options)


def lost(trainer: Any, update: Any, samples: Any, objective: Any, optimizer: OptimizerSpec, options: Any) -> Any:
    return update(samples, objective, optimizer.model_copy(update={"lr": 0.0}), **options)


def other_batch(trainer: Any, update: Any, samples: Any, objective: Any, optimizer: OptimizerSpec, options: Any) -> Any:
    return update(samples[:3], objective, optimizer, **options)


def stale_moment(
    trainer: Any, update: Any, samples: Any, objective: Any, optimizer: OptimizerSpec, options: Any
) -> Any:
    for _name, parameter in trainer.trained_parameters():
        trainer._optimizer.tensors(parameter)["exp_avg"].zero_()
    return update(samples, objective, optimizer, **options)


def wrong_tensor(
    trainer: Any, update: Any, samples: Any, objective: Any, optimizer: OptimizerSpec, options: Any
) -> Any:
    """One tensor of many keeps its old values."""
    _name, tensor = next((name, tensor) for name, tensor in trainer.weights() if name.endswith("k_proj.weight"))
    before = tensor.detach().clone()
    report = update(samples, objective, optimizer, **options)
    tensor.data.copy_(before)
    return report


WRONG = [faster, lost, other_batch, stale_moment, wrong_tensor]
