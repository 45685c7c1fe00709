"""The examples with a model and a dataset of the hub run as a user would run them, against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.chain.run_record import read_run
from storage.store.objects import open_store
from tests.fixtures.servers.hub import Hub, hub_server

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = pytest.mark.slow


def jsonl(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def environment(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub with the repositories of the examples, and the variables with which a process uses it."""
    sums = [{"question": f"{n}+1?", "answer": f"One more than {n}.\n#### {n + 1}"} for n in range(8)]
    chats = []
    for number in range(40):
        turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "Yes."}]
        chats.append({"messages": turns, "num_turns": 2})
    card = b"---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with hub_server() as hub:
        hub.commit_folder("model", MODEL, tiny_folder)
        hub.commit("dataset", "openai/gsm8k", {"main/train.jsonl": jsonl(sums), "README.md": card})
        hub.commit("dataset", "trl-lib/Capybara", {"train.jsonl": jsonl(chats)})
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PREFECT_API_URL": prefect_server}
        unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        yield hub, {**kept, **variables, "PYTHONPATH": str(ROOT)}


def run(folder: Path, environment: dict[str, str], *words: str) -> str:
    process = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_config(environment: tuple[Hub, dict[str, str]], tmp_path: Path) -> None:
    hub, variables = environment
    command = ["-m", "flows.cli.main", "run", "sft", "--config", "examples/hub.yaml", "--run", "capybara"]
    further = ["--set", "algorithm.steps=1", "--set", "algorithm.samples_per_batch=4"]
    run(tmp_path, variables, *command, *further, "--server", variables["PREFECT_API_URL"])
    recorded = read_run(open_store(tmp_path / "ostinato-data"), "capybara")
    commits = {f"hf://{MODEL}": hub.repositories["model", MODEL].branches["main"]}
    commits["hf://datasets/trl-lib/Capybara"] = hub.repositories["dataset", "trl-lib/Capybara"].branches["main"]
    assert recorded.other["hub"] == commits


def test_the_recipe_with_a_mapping(environment: tuple[Hub, dict[str, str]], tmp_path: Path) -> None:
    _, variables = environment
    assert "gsm8k@" in run(tmp_path, variables, "examples/hub_recipe.py")
