"""Tests of the config of AdamW and its schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.optimizer import OptimizerConfig
from flows.configs.ppo import PPOConfig
from flows.dpo import DPO
from flows.training.schedules import (
    AdamW,
    ConstantScheduler,
    CosineScheduler,
    CosineSchedulerWithoutWarmup,
    InverseSqrtScheduler,
    LinearScheduler,
    Ramp,
    WSDScheduler,
    schedule_of,
)
from storage.chain.records import OptimizerSpec

DATA = {"train": {"kind": "file", "path": "data.jsonl"}}
SFT = {"model": {"key": "m"}, "data": DATA}
GRPO = SFT | {"grader": {"path": "a:b"}}
ENDS = GRPO | {"algorithm": {"steps": 10}}


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({}, CosineScheduler(7.5e-7)),
        ({"lr": 1e-3, "warmup_steps": 7, "min_lr_ratio": 0.2}, CosineScheduler(1e-3, 0.1, 7, 0.2)),
        ({"lr": 1.0, "cycles": 3, "warmup_ratio": 0.5}, CosineScheduler(1.0, warmup_ratio=0.5, cycles=3)),
        ({"lr": 1.0, "schedule": "cosine_without_warmup"}, CosineSchedulerWithoutWarmup(1.0)),
        ({"lr": 1.0, "schedule": "constant", "warmup_steps": 5}, ConstantScheduler(1.0, warmup_steps=5)),
        ({"lr": 1.0, "schedule": "linear", "min_lr_ratio": 0.5}, LinearScheduler(1.0, min_lr_ratio=0.5)),
        ({"lr": 1.0, "schedule": "wsd", "decay_ratio": 0.3}, WSDScheduler(1.0, decay_ratio=0.3)),
        ({"lr": 1.0, "schedule": "inverse_sqrt", "warmup_steps": 9}, InverseSqrtScheduler(1.0, warmup_steps=9)),
    ],
)
def test_the_schedule_of_a_config(config: dict[str, Any], schedule: object) -> None:
    assert schedule_of(OptimizerConfig(**config)) == schedule


def test_the_value_model_has_the_same_shape_up_to_its_own_rate() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    assert schedule_of(config, lr=0.5) == LinearScheduler(0.5, warmup_steps=2)


def test_every_setting_reaches_the_step() -> None:
    config = OptimizerConfig(
        lr=1e-3, schedule="constant", weight_decay=0.1, weight_decay_schedule="linear", weight_decay_end=0.5,
        beta1=0.8, beta2=0.95, eps=1e-6, max_grad_norm=2.0, skip_nan_gradients=True,
    )  # fmt: skip
    model: Any = SimpleNamespace(name="policy")
    trainer = DPO([], model, optimizer=config)
    assert trainer.nan_policy == "skip"
    assert trainer.optimizer.weight_decay == Ramp(0.1, 0.5, "linear")
    steps = [trainer.optimizer.at(step, 3, trainer.schedule) for step in range(3)]
    fixed = {"lr": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "max_grad_norm": 2.0}
    assert [step.weight_decay for step in steps] == pytest.approx([0.1, 0.3, 0.5])
    assert steps == [OptimizerSpec(weight_decay=step.weight_decay, **fixed) for step in steps]


def test_the_defaults_make_the_request_they_made_before() -> None:
    """A chain's states hash it: lr, the betas and epsilon of AdamW, no decay, clipping at 1."""
    config = OptimizerConfig(lr=1.0)
    spec = AdamW.of(config).at(0, 100, schedule_of(config))
    assert spec.model_dump(mode="json") == {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.0, "max_grad_norm": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(("make", "body"), [(SFTConfig, SFT), (GRPOConfig, ENDS), (PPOConfig, ENDS)])
def test_every_setting_of_the_optimizer_decides_the_result(make: type[SFTConfig], body: dict[str, Any]) -> None:
    plain = make(**body).semantic()["optimizer"]
    assert set(plain) == set(OptimizerConfig.model_fields) - {"kind"}  # absent from older configs
    changed = make(**body, optimizer={"beta2": 0.95, "warmup_steps": 3, "kind": "muon"}).semantic()["optimizer"]
    assert changed == plain | {"beta2": 0.95, "warmup_steps": 3, "kind": "muon"}
    assert AdamW.of(OptimizerConfig(lr=1.0, kind="muon")).at(0, 1, schedule_of(OptimizerConfig())).kind == "muon"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "give one of them"),
        ({"schedule": "cosine_without_warmup", "warmup_steps": 1}, "use 'cosine'"),
        ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "give one above 0"),
        ({"schedule": "constant", "min_lr_ratio": 0.1}, "leave it out"),
        ({"schedule": "linear", "cycles": 2}, "use 'cosine'"),
        ({"decay_ratio": 0.1}, "use 'wsd'"),
        ({"weight_decay_schedule": "linear"}, "give an end"),
        ({"weight_decay_end": 0.1}, "give an end"),
        ({"beta1": 1.0}, "less than 1"),
        ({"eps": 0}, "greater than 0"),
        ({"warmup_ratio": 1.1}, "less than or equal to 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**config)


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [
        ({"schedule": "constant"}, True),
        ({"schedule": "constant", "warmup_steps": 5}, True),
        ({"schedule": "constant", "warmup_ratio": 0.1}, False),
        ({"schedule": "inverse_sqrt", "warmup_steps": 5}, True),
        ({"schedule": "inverse_sqrt"}, False),
        ({"schedule": "wsd", "warmup_steps": 5}, False),
        ({"schedule": "constant", "weight_decay_schedule": "cosine", "weight_decay_end": 0.1}, False),
    ],
)
def test_a_run_without_an_end_has_nothing_that_bends_to_one(optimizer: dict[str, Any], fits: bool) -> None:
    config = GRPO | {"optimizer": optimizer, "checkpoints": {"frequency": None}}
    if fits:
        assert GRPOConfig(**config).optimizer.endless
        return
    with pytest.raises(ValidationError, match="no end to bend to"):
        GRPOConfig(**config)
