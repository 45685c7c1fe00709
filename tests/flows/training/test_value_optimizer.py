"""Tests of the value model's optimizer and schedule. Fields that are not given are those of the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.optimizer import OptimizerConfig
from flows.configs.ppo import PPOConfig, ValueOptimizer
from flows.ppo import ppo
from storage.chain.records import Chain, CommitRecord
from storage.store.objects import open_store
from tests.fixtures.toy import toy_config

POLICY = OptimizerConfig(
    lr=1e-3, schedule="wsd", warmup_steps=2, decay_ratio=0.5, min_lr_ratio=0.2, weight_decay=0.1, beta2=0.95, eps=1e-6,
    weight_decay_schedule="linear", weight_decay_end=0.3, max_grad_norm=2.0,
)  # fmt: skip


def config_of(folder: Path, tiny_folder: Path, **changes: Any) -> PPOConfig:
    changes = {
        "grader__path": "tests.fixtures.grading:even_share", "algorithm__completions_per_sample": 1,
        "credit__value_only_fraction": 0.0,
    } | changes  # fmt: skip
    return PPOConfig.model_validate(toy_config(folder, tiny_folder, run="r", **changes))


def test_what_is_not_said_is_the_policys() -> None:
    assert ValueOptimizer().over(POLICY, 0.5) == POLICY.model_copy(update={"lr": 0.5})
    of_value = ValueOptimizer(weight_decay=0.0, beta1=0.8, max_grad_norm=0.5).over(POLICY, 0.5)
    assert of_value == POLICY.model_copy(
        update={"lr": 0.5, "weight_decay": 0.0, "weight_decay_schedule": "constant", "weight_decay_end": None,
                "beta1": 0.8, "max_grad_norm": 0.5}
    )  # fmt: skip


def test_a_schedule_of_its_own_has_nothing_of_the_policys() -> None:
    of_value = ValueOptimizer(schedule="cosine", warmup_ratio=0.2).over(POLICY, 0.5)
    assert of_value.model_dump(include={"schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio"}) == {
        "schedule": "cosine", "warmup_steps": None, "warmup_ratio": 0.2, "min_lr_ratio": None, "decay_ratio": None,
    }  # fmt: skip
    assert (of_value.beta2, of_value.eps, of_value.weight_decay_end) == (0.95, 1e-6, 0.3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warmup_steps": 3}, "warmup_steps without a schedule"),
        ({"schedule": "cosine", "warmup_steps": 3, "warmup_ratio": 0.1}, "give one of them"),
        ({"schedule": "constant", "min_lr_ratio": 0.1}, "never falls"),
        ({"lr": 1e-3}, "Extra inputs are not permitted"),
    ],
)
def test_what_makes_no_schedule_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        ValueOptimizer.model_validate(wrong)
    assert caught.value.error_count() == 1 and "For further information" not in caught.value.errors()[0]["msg"]


def test_an_endless_run_has_an_endless_schedule_of_the_value_model_too(tmp_path: Path, tiny_folder: Path) -> None:
    endless = {"algorithm__steps": None, "optimizer__schedule": "constant"}
    config_of(tmp_path, tiny_folder, **endless)
    config_of(tmp_path, tiny_folder, **endless, value_model__optimizer={"schedule": "inverse_sqrt", "warmup_steps": 9})
    with pytest.raises(ValidationError, match=r"value_model\.optimizer\.schedule='cosine' has no end"):
        config_of(tmp_path, tiny_folder, **endless, value_model__optimizer={"schedule": "cosine"})


def test_the_optimizer_of_the_value_model_decides_the_result(tmp_path: Path, tiny_folder: Path) -> None:
    plain = config_of(tmp_path, tiny_folder)
    assert plain.semantic()["value_model"]["optimizer"] is None
    config = config_of(tmp_path, tiny_folder, value_model__optimizer={"weight_decay": 0.5})
    assert config.semantic()["value_model"]["optimizer"]["weight_decay"] == 0.5
    assert PPOConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.slow
def test_each_model_steps_by_its_own_optimizer(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    config = config_of(
        tmp_path, tiny_folder, algorithm__steps=3,
        optimizer={"lr": 1e-3, "schedule": "constant", "weight_decay": 0.01, "max_grad_norm": 2.0},
        value_model={
            "lr": 0.5,
            "optimizer": {
                "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.25, "beta1": 0.8, "max_grad_norm": 3.0,
            },
        },
    )  # fmt: skip
    asyncio.run(ppo(config))
    store = open_store(str(tmp_path / "data"))

    def records(model: str) -> list[CommitRecord]:
        return list(Chain(store, "r", "0-ppo", model).records(0, 3))

    policy, value = ([record.request.optimizer for record in records(name)] for name in ("policy", "value"))
    assert {(one.lr, one.weight_decay, one.beta1, one.max_grad_norm) for one in policy} == {(1e-3, 0.01, 0.9, 2.0)}
    assert {(one.weight_decay, one.beta1, one.beta2, one.max_grad_norm) for one in value} == {(0.25, 0.8, 0.999, 3.0)}
    assert [one.lr for one in value] == pytest.approx([0.5, 0.5, 0.05])  # down to a tenth
