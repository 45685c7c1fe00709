"""Tests of the titles of flow runs."""

from __future__ import annotations

from pathlib import Path

from flows.configs.common import GRPOConfig, SFTConfig, model_title
from flows.configs.evaluation import EvaluationFlowConfig
from tasks.datasets.spec import FileDataset, ReasoningGymDataset, RegisteredDataset
from tests.fixtures.toy import toy_config

GYM = {"kind": "reasoning_gym", "name": "chain_sum", "size": 4}


def test_a_run_is_called_by_what_it_is(tmp_path: Path) -> None:
    body = toy_config(tmp_path, tmp_path, model__key=".ostinato/models/smollm2-135m", data__train=GYM, seed=3)
    assert GRPOConfig.model_validate(body).title == "grpo smollm2-135m on chain_sum, seed 3"
    sft = {"model": {"key": "helper@latest"}, "data": {"train": {"kind": "file", "path": "data/chats.jsonl"}}}
    assert SFTConfig.model_validate(sft).title == "sft helper@latest on chats, seed 0"


def test_an_evaluation_names_its_models() -> None:
    suite = {"datasets": [{"source": GYM}], "graders": [{"path": "tests.fixtures.toy:digit_share"}]}
    config = EvaluationFlowConfig.model_validate({"models": ["/models/base", "helper@champion"], "suite": suite})
    assert config.title == "evaluation of base, helper@champion"


def test_a_digest_is_cut_and_a_word_is_not() -> None:
    assert model_title("helper@" + "0123456789abcdef" * 4) == "helper@01234567"
    assert model_title("models/helper/") == "helper"


def test_a_pattern_is_called_by_its_folder() -> None:
    assert FileDataset(path="data/train/*.parquet").title == "train"
    assert FileDataset(path="*.parquet").title == "*"
    assert FileDataset(path="a/x.parquet", further_paths=("a/y.parquet", "b")).title == "x and 2 more"
    assert ReasoningGymDataset.model_validate(GYM).title == "chain_sum"
    assert RegisteredDataset(key="chats@" + "0123456789abcdef" * 2).title == "chats@01234567"
