"""Tests of addresses with a password: they are refused with the variable to use, and never shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.models.openai_model import OpenAIModel
from engine.protocol import SamplingParams
from engine.specs.engine import HttpEngineSpec
from flows.configs.common import SFTConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.display import log_file
from storage.registry.hub import parse_hub_repo
from storage.secrets import SecretInURL, refuse_secrets, without_secrets
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import FileDataset, HubDataset
from tasks.graders.reward_server import RewardServerGrader

SECRETS = ("hunter2", "AKIA", "wJal")


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://AKIA:wJal/rXUt@bucket/prefix", "AWS_SECRET_ACCESS_KEY"),
        ("s3://AKIA:wJal@bucket", "AWS_ACCESS_KEY_ID"),
        ("http://ada:hunter2@127.0.0.1:8000/v1", "OPENAI_API_KEY"),
        ("https://hunter2@host/data.parquet", "HF_TOKEN"),
        ("hf://ada:hunter2@owner/name", "HF_TOKEN"),
        ("openai://judge@https://ada:hunter2@host/v1", "OPENAI_API_KEY"),
    ],
)
def test_an_address_with_a_password_names_the_variable_and_is_not_shown(url: str, variable: str) -> None:
    config: Any = {"data": {"train": [{"path": url}]}}
    with pytest.raises(SecretInURL, match=rf"^data.train.0.path: .*set .*{variable}") as refusal:
        refuse_secrets(config)
    assert not any(secret in str(refusal.value) for secret in SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b", "hf://gpt2@v1", "hf://owner/name@main", "openai://llama3:8b@http://127.0.0.1:8000/v1", "http://host:80/a@b",
        "mail ada@example.com about http://x", "http://ada:x@host is an example", "name@champion", "https://[::1]:8/v1",
    ],
)  # fmt: skip
def test_other_texts_are_no_secrets(text: str) -> None:
    refuse_secrets([text])


def test_every_surface_refuses_an_address_with_a_password(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("storage: s3://AKIA:wJal@bucket\nmodel: {key: tiny}\n")
    store, provenance = open_store(tmp_path / "store"), Provenance(code_version="test", config_digest="0" * 64, seed=0)
    refusals: list[BaseException] = []
    for call in (
        lambda: parse_config(SFTConfig, file),
        lambda: parse_config(SFTConfig, None, ["storage.url=s3://AKIA:wJal@bucket"]),
        lambda: SFTConfig.model_validate({"storage": "s3://AKIA:wJal@bucket"}),
        lambda: open_store("s3://AKIA:wJal@bucket"),
        lambda: OpenAIModel.of("openai://j@http://ada:hunter2@h/v1", "j", SamplingParams(max_new_tokens=1)),
        lambda: RewardServerGrader("r", "http://ada:hunter2@h/score"),
        lambda: parse_hub_repo("hf://ada:hunter2@owner/name", "dataset"),
        lambda: HttpEngineSpec(url="http://ada:hunter2@127.0.0.1:8000"),
        lambda: load_dataset(store, FileDataset(path="https://ada:hunter2@h/x.parquet"), provenance=provenance),
        lambda: load_dataset(store, FileDataset(path="s3://AKIA:wJal/x@b/x.parquet"), provenance=provenance),
        lambda: load_dataset(store, HubDataset(path="https://ada:hunter2@h/name"), provenance=provenance),
    ):
        with pytest.raises((ConfigError, SecretInURL, ValidationError)) as refusal:
            call()
        refusals.append(refusal.value)
    for error in refusals:
        assert "address" in str(error) and not any(secret in str(error) for secret in SECRETS), error


@pytest.mark.parametrize("scheme", ["http", "https", "postgresql+psycopg2", "s3"])
def test_errors_of_trackers_are_shown_without_their_passwords(scheme: str) -> None:
    text = f"API request to {scheme}://ada:hunter2@host:5000/api/2.0/x?a=b@c failed; mail ada@example.com"
    shown = without_secrets(text)
    assert shown == f"API request to {scheme}://…@host:5000/api/2.0/x?a=b@c failed; mail ada@example.com"


def test_the_folder_of_the_logs_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log_file.LOG_FOLDER.mkdir(parents=True, mode=0o755)
    with log_file.log_file("run"):
        logging.getLogger("test").warning("x")
    assert log_file.LOG_FOLDER.stat().st_mode & 0o777 == 0o700
