"""Runs with an adapter on a base in 4 bits (QLoRA): the config, learning, and a resume to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import flows.training.supervised_loop
from engine.local.verify import verify_run
from engine.workspace import connect
from flows.configs.common import SFTConfig
from flows.configs.ppo import PPOConfig
from tests.fixtures.runs.flow_runs import FlowRuns
from tests.fixtures.runs.interruption import Interrupted, interrupt_at
from tests.flows.test_sft_flow import sft_config, sft_runs

IN_4_BIT = {"load_in_4bit": True}


def test_a_config_whose_engine_has_no_base_in_4_bits_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    config = sft_config(tmp_path, tiny_folder, model__adapter=IN_4_BIT)
    assert SFTConfig.model_validate(config).semantic()["model"]["adapter"]["load_in_4bit"] is True
    config["engine"] = {"trainer": {"kind": "deepspeed", "ranks": 2}}
    with pytest.raises(ValidationError, match=r"load_in_4bit=true was given, .* set engine.trainer.kind='torch'"):
        SFTConfig.model_validate(config)
    # A served engine checks for itself.
    SFTConfig.model_validate(config | {"engine": {"kind": "http", "url": "http://127.0.0.1:1"}})
    valued: dict[str, Any] = {
        "model": {"key": "m"}, "value_model": {"adapter": IN_4_BIT}, "grader": {"path": "m:f"},
        "data": {"train": {"kind": "file", "path": "rows.jsonl"}}, "engine": {"sampler": {"kind": "vllm"}},
    }  # fmt: skip
    with pytest.raises(ValidationError, match="load_in_4bit=true was given, .* set engine.sampler.kind='torch'"):
        PPOConfig.model_validate(valued)


def test_a_config_with_plain_weights_has_the_digest_that_it_had(tmp_path: Path, tiny_folder: Path) -> None:
    config = SFTConfig.model_validate(sft_config(tmp_path, tiny_folder, model__adapter={}))
    assert "load_in_4bit" not in config.semantic()["model"]["adapter"]


@pytest.mark.slow
def test_a_run_learns_and_ends_in_the_same_bytes_after_an_interruption(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    runs: FlowRuns = sft_runs(tmp_path, tiny_folder)
    settings = {"model__adapter": {"rank": 8} | IN_4_BIT, "optimizer__lr": 2e-2, "algorithm__steps": 12}
    runs.run("whole", **settings)
    losses = [line["loss"] for line in runs.metrics("whole")]
    assert losses[-1] < losses[0] - 1  # a frozen random head and embedding limit what can be learnt

    with monkeypatch.context() as patched:
        interrupt_at(patched, flows.training.supervised_loop, "take_gradient_step", step=3)
        with pytest.raises(Interrupted):
            runs.run("interrupted", **settings)
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("interrupted", **settings)
    assert runs.digests("interrupted") == runs.digests("whole")
    # Redone from the root, with the published model compared.
    assert verify_run(runs.store, "interrupted").problems == []
