"""Tests of the checks at the start of a run: what a config names is there, before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.backends.torch.backend import TorchBackend
from flows.configs.common import GRPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError
from flows.configs.ppo import PPOConfig
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from flows.evaluation import evaluation
from flows.grpo import grpo
from flows.recurring import recurring
from flows.runs.input_checks import check_inputs, check_length, check_warmup
from flows.sweep import sweep
from storage.store.objects import open_store
from tests.fixtures.configs import with_changes
from tests.fixtures.runs.deployed import suite
from tests.fixtures.toy import toy_config

FILE = {"kind": "file", "path": "none.jsonl"}
GYM = {"kind": "reasoning_gym", "size": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": FILE}, "data.train: no file at 'none.jsonl'"),
        ({"data__heldout": {"kind": "file", "path": "held.jsonl"}}, "data.heldout: no file at 'held.jsonl'"),
        ({"data__train": FILE | {"path": __file__}}, "data.train: .*suffix '.py'; expected one of .jsonl"),
        ({"model__key": "/no/such"}, "model.key: '/no/such' is not a model folder; give a folder, the key of"),
        ({"model__key": "nobody@1"}, "model.key: no model 'nobody@1': not a local folder, and not registered"),
        ({"grader__path": "no_such_module:f"}, "grader: 'no_such_module:f': no module 'no_such_module'"),
        ({"grader__arguments": {"speed": 2}}, r"grader: .* given the arguments \['speed'\]"),
        ({"data__train": {"kind": "python", "path": "os:nothing"}}, "data.train: 'os:nothing': os has no 'nothing'"),
        (
            {"data__train": {"kind": "python", "path": "os.path:join", "arguments": {"size": 2}}},
            r"data.train: 'os.path:join' with the arguments \['size'\]: missing",
        ),
        ({"data__train": GYM | {"name": "chain_sun"}}, "data.train: .*chain_sun.*"),
    ],
    ids=["file", "held-out", "format", "folder", "key", "grader", "arguments", "function", "its arguments", "gym"],
)
def test_an_input_that_is_not_there_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path, tiny_folder: Path
) -> None:
    good = GRPOConfig.model_validate(toy_config(tmp_path, tiny_folder))
    check_inputs(good, open_store(good.storage.url))
    bad = GRPOConfig.model_validate(toy_config(tmp_path, tiny_folder, **changes))
    with pytest.raises(ConfigError, match=message):
        check_inputs(bad, open_store(bad.storage.url))


def test_all_missing_files_are_named_before_code_is_imported(tmp_path: Path, tiny_folder: Path) -> None:
    changes = {"data__train": FILE, "model__key": "./none", "grader__path": "no_such_module:f"}
    config = GRPOConfig.model_validate(toy_config(tmp_path, tiny_folder, **changes))
    with pytest.raises(ConfigError) as refused:
        check_inputs(config, open_store(config.storage.url))
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == ["model.key", "data.train"]


def test_an_environment_is_imported(tmp_path: Path, tiny_folder: Path) -> None:
    body = toy_config(tmp_path, tiny_folder) | {"environment": {"path": "tests.fixtures.guessing:Nothing"}}
    del body["grader"]
    config = ENVGRPOConfig.model_validate(body)
    with pytest.raises(ConfigError, match=r"environment: '.*has no 'Nothing'"):
        check_inputs(config, open_store(config.storage.url))


def test_a_new_run_has_no_warm_up_longer_than_itself(tmp_path: Path, tiny_folder: Path) -> None:
    body = toy_config(tmp_path, tiny_folder, optimizer__warmup_steps=4)
    check_warmup(GRPOConfig.model_validate(body))
    body["optimizer"]["warmup_steps"] = 5
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps=5 is more than algorithm.steps=4, .*lower"):
        check_warmup(GRPOConfig.model_validate(body))


def test_a_run_that_trains_only_the_value_model_is_refused_with_its_config(tmp_path: Path, tiny_folder: Path) -> None:
    body = toy_config(tmp_path, tiny_folder)
    del body["algorithm"]["kl_beta"]
    with pytest.raises(ValueError, match=r"credit.value_only_fraction=0.25 leaves no step .* of 1 in all; lower it"):
        PPOConfig.model_validate(with_changes(body, {"algorithm__steps": 1}))
    # with epochs, the rows decide
    config = PPOConfig.model_validate(with_changes(body, {"algorithm__steps": None, "algorithm__epochs": 1}))
    check_length(config, 10)
    with pytest.raises(ConfigError, match="leaves no step"):
        check_length(config, 4)


def refused_grpo(folder: Path, tiny: Path) -> tuple[Any, Any]:
    return grpo, GRPOConfig.model_validate(toy_config(folder, tiny, data__train=FILE))


def refused_evaluation(folder: Path, tiny: Path) -> tuple[Any, Any]:
    body = {"models": [str(tiny)], "suite": suite(folder), "storage": {"url": str(folder / "data")}}
    body["suite"]["datasets"][0]["source"]["path"] = "none.jsonl"
    return evaluation, EvaluationFlowConfig.model_validate(body)


def refused_recurring(folder: Path, tiny: Path) -> tuple[Any, Any]:
    training = {"kind": "grpo", "config": toy_config(folder, tiny, data__train=FILE)}
    del training["config"]["model"]["publish_as"]
    return recurring, RecurringConfig.model_validate({"model": "m", "training": training, "suite": suite(folder)})


def refused_sweep(folder: Path, tiny: Path) -> tuple[Any, Any]:
    search = {"kind": "grid", "values": {"data.train.path": [str(folder / "prompts.jsonl"), "none.jsonl"]}}
    training = {"kind": "grpo", "config": toy_config(folder, tiny)}
    return sweep, SweepConfig.model_validate({"name": "s", "training": training, "search": search})


@pytest.mark.parametrize("case", [refused_grpo, refused_evaluation, refused_recurring, refused_sweep])
async def test_a_flow_says_it_at_once_and_writes_nothing(
    case: Callable[[Path, Path], tuple[Any, Any]],
    tmp_path: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefect_server: str,
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(TorchBackend, "try_load", loaded)
    flow, config = case(tmp_path, tiny_folder)
    begun = time.monotonic()
    state = await flow(config, return_state=True)
    seconds = time.monotonic() - begun
    assert state.is_failed()
    assert state.message.endswith("expected a file of JSON lines, JSON, CSV or Parquet")
    assert "no file at 'none.jsonl'" in state.message
    assert "\n" not in state.message
    assert list((tmp_path / "data").rglob("*.parquet")) == []
    assert seconds < 5, "most of it is Prefect's"
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        await flow(config)
