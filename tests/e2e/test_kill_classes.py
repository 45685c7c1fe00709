"""Tests of two `kill -9` in a run of every training flow. The same command, run again, ends with the bytes of a run
without kills in every chain, and `ostinato verify` accepts each chain."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.backends.torch.tiny import build_tiny_model
from flows.catalogue import TRAININGS
from storage.chain.listing import run_chains
from storage.chain.records import CommitRecord
from storage.store.objects import open_store
from tests.e2e.test_kill_nine import Folder
from tests.fixtures.commands import Command
from tests.fixtures.guessing import guess_config
from tests.fixtures.preferences import label_config, preference_config, write_pairs
from tests.fixtures.toy import toy_config

STEPS = 3
IN_DATA, IN_SAMPLING, IN_EPISODES = "batch.after_data:2", "rollout.after_data:3", "rollout.after_data:3"
"""Of the second step: its batch; the first of its two shards."""
IN_STEP = "step.before_commit:2"
"""Of a process that goes on where the first was killed: with two chains, the value model's, over a committed policy."""

FORWARD_KL = "distill with forward_kl"
"""A second run of distill: half of the prompts have answers of the dataset, and there are two teachers."""
FIRST = {
    "sft": IN_DATA, "dpo": IN_DATA, "simpo": IN_DATA, "orpo": IN_DATA, "kto": IN_DATA,
    "reward_model": IN_DATA, "rft": IN_DATA, "sft_to_gspo": IN_DATA,
    "grpo": IN_SAMPLING, "gspo": IN_SAMPLING, "ppo": IN_SAMPLING, "distill": IN_SAMPLING,
    FORWARD_KL: IN_DATA,
    "env_grpo": IN_EPISODES, "env_gspo": IN_EPISODES, "env_ppo": IN_EPISODES,
}  # fmt: skip
"""Flow -> where its first process is killed; the second is at IN_STEP, in all of them."""
ON_A_MIXTURE = ("sft", "dpo", "gspo")
"""Flows that train on a mixture here: one each of conversations, preferences and prompts."""


@dataclass
class Trained(Folder):
    """A folder in which one run of a flow is driven by the command line."""

    flow: str

    def words(self) -> list[str]:
        return ["run", self.flow, "--config", "config.yaml", "--run", "kill"]

    def records(self) -> dict[str, list[CommitRecord]]:
        """Chain -> its records, without the chains of frozen teachers."""
        chains = run_chains(open_store(str(self.path / "data")), "kill")
        chains = [one for one in chains if not one.model.startswith("teacher")]
        return {f"{one.stage}/{one.model}": list(one.records(after=0, until=one.head().step)) for one in chains}

    def history(self) -> dict[str, list[tuple[str, str | None]]]:
        """Chain -> state and digest of each of its policies."""
        return {name: [(one.state, one.weights_digest) for one in found] for name, found in self.records().items()}

    def weights(self) -> bytes:
        (file,) = (self.path / "data" / "models" / "toy").glob("*/*.safetensors")
        return file.read_bytes()

    def verify(self) -> tuple[int, str]:
        words = ["verify", "kill", "--storage", "data"]
        return Command(words, folder=self.path, environment=self.environment()).wait(timeout=300)


def config_of(flow: str, path: Path, tiny_folder: Path) -> dict[str, Any]:
    """Every step moves the weights; a step of reinforcement learning has two shards."""
    if flow in ("dpo", "simpo", "orpo", "kto", "reward_model"):
        make_config = label_config if flow == "kto" else preference_config
        optimizer = {"optimizer__kind": "muon"} if flow == "simpo" else {}
        return make_config(path, tiny_folder, algorithm={"steps": STEPS, "samples_per_batch": 4}, **optimizer)
    value = {"value_model": {"lr": 1e-3}, "credit": {"value_only_fraction": 0.3}} if flow.endswith("ppo") else {}
    if flow.startswith("env_"):
        return guess_config(path, tiny_folder, algorithm__steps=STEPS, algorithm__samples_per_mini_batch=8) | value
    if flow == "rft":
        rounds = {
            "rounds": 2, "completions_per_sample": 4, "keep": "top", "keep_per_prompt": 1, "samples_per_batch": 5,
            "prompts_per_shard": 5,
        }  # fmt: skip
        return toy_config(path, tiny_folder, grader__path="tests.fixtures.grading:even_share", algorithm=rounds)
    toy = toy_config(
        path, tiny_folder, grader__path="tests.fixtures.grading:even_share", algorithm__steps=STEPS,
        algorithm__samples_per_mini_batch=8,
    ) | value  # fmt: skip
    if flow == "distill":
        teacher = build_tiny_model(path / "teacher", seed=7, layers=2)
        return toy | {"teacher": {"key": str(teacher)}}
    if flow == FORWARD_KL:
        return with_answers(toy, path)
    if not flow.startswith("sft"):
        return toy
    chats = {"kind": "file", "path": str(write_pairs(path / "chats.jsonl")), "columns": {"completion": "chosen"}}
    if flow == "sft":
        del toy["grader"], toy["sampling"]
        return toy | {"data": {"train": chats}, "algorithm": {"steps": STEPS, "samples_per_batch": 4}}
    algorithm, optimizer = toy.pop("algorithm"), toy.pop("optimizer")
    return toy | {
        "data": {"train": chats, "prompts": toy["data"]["train"]},
        "sft": {"algorithm": {"steps": 2, "samples_per_batch": 4}, "optimizer": optimizer},
        "gspo": {"algorithm": algorithm | {"steps": 2}, "optimizer": optimizer},
    }


def with_answers(toy: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of FORWARD_KL. Its settings of a policy loss are the defaults."""
    teachers = {name: str(build_tiny_model(path / name, seed=seed)) for name, seed in (("odd", 7), ("even", 8))}
    rows = []
    for number in range(10):
        metadata = {"kind": "odd" if number % 2 else "even"}
        rows.append({"prompt": str(number), "completion": "ab" * (number % 4 + 1), "metadata": metadata})
    (path / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = toy["algorithm"] | {"divergence": "forward_kl", "teacher_top_k": 8, "kl_beta": 0.0}
    del algorithm["clip_range"]
    return toy | {
        "teacher": {"column": "kind", "by_value": teachers},
        "data": {"train": {"kind": "file", "path": str(path / "answered.jsonl")}, "on_policy": 0.5},
        "algorithm": algorithm,
    }


def make_folder(flow: str, path: Path, tiny_folder: Path, server: str) -> Trained:
    path.mkdir()
    config = config_of(flow, path, tiny_folder)
    if flow in ON_A_MIXTURE:
        dataset = config["data"]["train"]
        parts = [{"dataset": dataset | {"order": "file"}, "weight": 3}, {"dataset": dataset, "weight": 1}]
        config["data"]["train"] = {"kind": "mixture", "parts": parts}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return Trained(path, server, "distill" if flow == FORWARD_KL else flow)


def test_every_training_flow_is_killed() -> None:
    assert FIRST.keys() == TRAININGS.keys() | {FORWARD_KL}


@pytest.mark.slow
@pytest.mark.parametrize("flow", sorted(FIRST))
def test_two_kills_change_nothing(flow: str, tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    whole, killed = (make_folder(flow, tmp_path / name, tiny_folder, prefect_server) for name in ("whole", "killed"))
    status, output = whole.run()
    assert status == 0, output
    for failpoint in (FIRST[flow], IN_STEP):
        status, output = killed.run(failpoint)
        assert status == -signal.SIGKILL, f"{failpoint} was not hit:\n{output}"
        assert killed.events("step")  # it is a resumption, and not a second start
    if flow.endswith("ppo"):
        policies, values = (len(killed.records()[f"0-{flow}/{model}"]) for model in ("policy", "value"))
        assert policies == values + 1  # killed between the two commits of an iteration
    status, output = killed.run()
    assert status == 0, output
    assert killed.history() == whole.history()
    assert killed.weights() == whole.weights()
    for chain, found in whole.records().items():
        taught = [one.weights_digest for one in found if one.updates]
        assert taught and len(set(taught)) == len(taught), chain  # equal bytes mean something
    for folder in (whole, killed):
        status, output = folder.verify()
        assert status == 0, output
