"""Tests of runs on datasets of the store: a resumed run keeps its version, and wrong datasets are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from flows.catalogue import AnyTraining, SFTToGSPOConfig
from flows.configs.common import SFTConfig, TrainingConfig
from flows.configs.overrides import ConfigError
from flows.sft import sft
from storage.chain.fork import fork_run
from storage.chain.run_record import read_run
from storage.errors import SemanticMismatch
from storage.registry.datasets import list_datasets
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetUse, FileDataset, RegisteredDataset
from tests.fixtures.runs.sft_runs import sft_config, write_chats
from tests.fixtures.toy import toy_config

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


def add(store: ObjectStore, folder: Path, rows: int, use: DatasetUse = "completion") -> LoadedDataset:
    file = write_chats(folder / "chats.jsonl", rows)
    return load_dataset(store, FileDataset(path=str(file)), use=use, provenance=PROVENANCE)


def registered_config(folder: Path, tiny_folder: Path, key: str = "chats", **changes: Any) -> SFTConfig:
    return sft_config(folder, str(tiny_folder), {"kind": "registered", "key": key}, **changes)


async def test_a_resumed_run_keeps_its_version(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    store = open_store(tmp_path / "data")
    first = add(store, tmp_path, 8)
    config = registered_config(tmp_path, tiny_folder)
    assert config.title.endswith("on chats, seed 0")
    result = await sft(config)
    assert read_run(store, "tuned").semantic["inputs"]["dataset"] == first.ref.sha256  # type: ignore[index, call-overload]
    # with a newer version, the same command finds the same run
    second = add(store, tmp_path, 12)
    assert await sft(config) == result
    source = RegisteredDataset(key="chats")
    assert source.resolved(store, "completion").version == keys.dataset_of(second.ref.key)[1]
    # a fork continues on the same version, too
    fork_run(store, "tuned", "forked", step=1, code_version="test")
    assert source.resolved(store, "completion", run="forked").version == keys.dataset_of(first.ref.key)[1]
    # a config that names the newer one is another config
    with pytest.raises(SemanticMismatch, match=r"data\.train\.key"):
        await sft(registered_config(tmp_path, tiny_folder, f"chats@{keys.dataset_of(second.ref.key)[1][:8]}"))


async def test_wrong_datasets_are_refused_before_a_model_loads(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    store = open_store(tmp_path / "data")
    add(store, tmp_path, 8, "prompt")
    with pytest.raises(DatasetError, match="used for completions.*ostinato data add FILE --use completion"):
        await sft(registered_config(tmp_path, tiny_folder))
    with pytest.raises(ConfigError, match=r"data\.train: no dataset 'chat' .*did you mean 'chats'"):
        await sft(registered_config(tmp_path, tiny_folder, "chat"))
    # the held-out data is checked as early as the training data
    prompts = next(version for version in list_datasets(store))
    add(store, tmp_path, 8)
    data = {"train": {"kind": "registered", "key": "chats"}}
    with pytest.raises(ConfigError, match=r"data\.heldout: no dataset 'absent'"):
        heldout = {"kind": "registered", "key": "absent"}
        await sft(registered_config(tmp_path, tiny_folder, data=data | {"heldout": heldout}))
    with pytest.raises(DatasetError, match=f"'{prompts.key}' is used for completions"):
        heldout = {"kind": "registered", "key": prompts.key}
        await sft(registered_config(tmp_path, tiny_folder, data=data | {"heldout": heldout}))
    assert not list(store.list(keys.runs_prefix()))


def chosen(config: TrainingConfig) -> AnyTraining:
    return TypeAdapter(AnyTraining).validate_python({"kind": config.flow, "config": config})


def test_child_runs_get_full_versions(tmp_path: Path, tiny_folder: Path) -> None:
    store = open_store(tmp_path / "data")
    prompts, answers = add(store, tmp_path, 8, "prompt"), add(store, tmp_path, 8)
    registered = {"kind": "registered", "key": "chats"}
    data = {"train": registered, "heldout": registered}
    config = registered_config(tmp_path, tiny_folder, data=data)
    full: Any = chosen(config).with_full_versions(store).config.data
    expected = keys.dataset_of(answers.ref.key)[1]
    assert (full.train.version, full.heldout.version) == (expected, expected)
    # the prompts of the second stage are a version of another use
    body = toy_config(tmp_path, tiny_folder, data=data | {"prompts": registered})
    stages = {name: body[name] for name in ("model", "data", "grader")} | {"gspo": {"algorithm": {"steps": 1}}}
    two_stages = SFTToGSPOConfig.model_validate(stages)
    full = chosen(two_stages).with_full_versions(store).config.data
    assert full.train.version == expected
    assert full.prompts.version == full.heldout.version == keys.dataset_of(prompts.ref.key)[1]
