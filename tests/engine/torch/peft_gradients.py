"""The gradients of peft and of our trainer, for the same adapter on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engine.backends.torch.shared_base import AdapterTrainer
from engine.backends.torch.trainer import TorchTrainer
from engine.models.samples import Sample
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec
from tests.fixtures.adapters import CE, samples


def peft_model(module: nn.Module, spec: LoraSpec, adapter: AdapterTrainer) -> nn.Module:
    """peft on another load of the model, with the adapter's matrices."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.target_modules if spec.target_modules == "all-linear" else list(spec.target_modules),
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(module, config, autocast_adapter_dtype=False)
    theirs = peft_parameters(wrapped)
    assert theirs.keys() == dict(adapter.trained_parameters()).keys()
    with torch.no_grad():
        for name, parameter in adapter.trained_parameters():
            theirs[name].copy_(parameter)
    return wrapped.eval()


def peft_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    adapted = {name: p for name, p in module.named_parameters() if "lora_" in name}
    names = {name: name.removeprefix("base_model.model.").replace(".default", "") for name in adapted}
    # peft's files name a magnitude without the ".weight" of its module.
    return {names[name].replace("vector.weight", "vector"): parameter for name, parameter in adapted.items()}


@contextmanager
def caught_gradients(trainer: TorchTrainer) -> Iterator[dict[str, Tensor]]:
    """The gradients that the optimizer is given, by name."""
    names = {id(p): name for name, p in trainer.trained_parameters()}
    caught: dict[str, Tensor] = {}

    def catch(adamw: torch.optim.Optimizer, *_: Any) -> None:
        caught.update({names[id(p)]: p.grad.clone() for g in adamw.param_groups for p in g["params"]})

    hook = register_optimizer_step_pre_hook(catch)
    try:
        yield caught
    finally:
        hook.remove()


def check_gradient_is_pefts(
    adapter: AdapterTrainer, theirs: nn.Module, *, max_tokens: int, loss_rtol: float, rtol: float, atol: float
) -> None:
    """Compares the loss and the gradients of one update of the adapter with those of `theirs`."""
    batch = samples(100)
    loss, expected = gradient_of_peft(theirs, batch)
    with caught_gradients(adapter) as gradients:
        report = adapter.update(batch, CE, OptimizerSpec(lr=0, max_grad_norm=1e9), max_tokens=max_tokens)
    assert report.metrics["loss"] == pytest.approx(loss, rel=loss_rtol)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert expected[name].abs().max() > 1e-6
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol)


def gradient_of_peft(theirs: nn.Module, batch: Sequence[Sample]) -> tuple[float, dict[str, Tensor]]:
    """The mean cross-entropy over the trained tokens, and its gradient by the name of the parameter."""
    nats = []
    for sample in batch:
        ids = torch.tensor([sample.token_ids])
        all_T = theirs(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        nats.append(all_T.squeeze(1)[torch.tensor(sample.loss_mask[1:]) > 0])
    loss = -torch.cat(nats).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in peft_parameters(theirs).items() if p.grad is not None}
    return loss.item(), gradients
