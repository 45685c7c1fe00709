"""Tests of runs on models and datasets of the hub: branches are pinned to commits, and a resumed run needs no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.configs.common import SFTConfig
from flows.configs.overrides import ConfigError
from flows.parameters import Model
from flows.recipe import InputConfig, RecipeContext, recipe_main
from flows.runs.recorded_config import read_config
from flows.sft import sft
from storage.chain.fork import fork_run
from storage.chain.run_record import read_run
from storage.errors import SemanticMismatch
from storage.store import keys
from storage.store.objects import open_store
from tests.fixtures.runs.sft_runs import sft_config, write_chats
from tests.fixtures.servers.hub import Hub


async def test_a_resumed_run_keeps_its_commits_and_needs_no_hub(
    hub: Hub, tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    def config_of(key: str = "ada/tiny", **changes: Any) -> SFTConfig:
        train = {"kind": "hub", "path": "ada/chats"}
        return sft_config(tmp_path, key, train, algorithm={"samples_per_batch": 4, "steps": 2}, **changes)

    def chats(letter: str) -> dict[str, bytes]:
        return {"train.jsonl": write_chats(tmp_path / "chats.jsonl", 8, letter).read_bytes()}

    first = hub.commit_folder("model", "ada/tiny", tiny_folder)
    first_data = hub.commit("dataset", "ada/chats", chats("a"))
    config, store = config_of(), open_store(tmp_path / "data")
    assert config.title.startswith("sft tiny on chats")
    result = await sft(config)
    recorded = read_run(store, "tuned")
    assert recorded.other["hub"] == {"hf://ada/tiny": first, "hf://datasets/ada/chats": first_data}
    assert read_config(store, "tuned").values["model"]["key"] == "ada/tiny"
    # the branches move: a new run gets the new commits, and the old one keeps its own
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    second = hub.commit("model", "ada/tiny", files | {"LICENSE": b"free"})
    second_data = hub.commit("dataset", "ada/chats", chats("b"))
    await sft(config_of(run="new"))
    assert read_run(store, "new").other["hub"] == {"hf://ada/tiny": second, "hf://datasets/ada/chats": second_data}
    # without the hub, the run is opened as before, and ends in the same result
    hub.stop()
    store.delete(keys.result_json("tuned"))
    assert await sft(config) == result
    assert read_run(store, "tuned") == recorded
    # so is a fork, which takes its second step from the rows of its own
    fork_run(store, "tuned", "forked", step=1, code_version="test")
    await sft(config_of(run="forked"))
    assert read_run(store, "forked").semantic["inputs"] == recorded.semantic["inputs"]
    # another revision is another run
    with pytest.raises(SemanticMismatch, match=r"model\.key: the run has .ada/tiny., given .ada/tiny@" + second):
        await sft(config_of(f"ada/tiny@{second}"))


async def test_models_that_the_hub_does_not_give_are_refused_at_once(
    hub: Hub, tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    hub.commit_folder("model", "ada/gated", tiny_folder, access="gated")
    train = {"kind": "file", "path": str(write_chats(tmp_path / "chats.jsonl", 8))}
    with pytest.raises(ConfigError, match=r"^model\.key: http.* has no model 'ada/tiny', or it is private"):
        await sft(sft_config(tmp_path, "ada/tiny", train))
    with pytest.raises(ConfigError, match=r"^model\.key: the model 'ada/gated' .* is gated"):
        await sft(sft_config(tmp_path, "ada/gated", train))
    assert not list(open_store(tmp_path / "data").list(keys.runs_prefix()))


class Config(InputConfig):
    model: Model


@recipe_main
async def spawn(config: Config, ctx: RecipeContext) -> str:
    model = await config.model.to_builder(ctx).spawn_train("policy")
    return model.base.sha256


async def test_a_recipe_keeps_its_commit(hub: Hub, tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    first = hub.commit_folder("model", "ada/tiny", tiny_folder)
    body = {"run": "mine", "model": "ada/tiny", "storage": {"url": str(tmp_path / "data")}}
    config, store = Config.model_validate(body), open_store(tmp_path / "data")
    digest = await spawn(config)
    assert read_run(store, "mine").other["hub"] == {"hf://ada/tiny": first}
    assert "hub" not in read_config(store, "mine").values
    hub.commit("model", "ada/tiny", {})
    store.delete(keys.result_json("mine"))
    assert await spawn(config) == digest
