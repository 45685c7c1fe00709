"""Tests that a verl config with verl's rows and a reward function for verl trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from flows.cli.import_verl import as_yaml
from flows.configs.common import GRPOConfig
from flows.configs.overrides import parse_config
from flows.grpo import grpo
from flows.verl.importer import import_verl
from storage.chain.records import Chain
from storage.store.objects import open_store

pytestmark = pytest.mark.slow

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "letters" and extra_info["index"] >= 0
    return {"score": sum(ord(letter) % 2 for letter in solution_str) / 10, "truth": float(ground_truth)}
"""


def test_an_imported_config_trains(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    # A config of verl, imported and written as a config of this project.
    verl = {
        "data": {
            "train_files": str(tmp_path / "train.parquet"), "train_batch_size": 4, "max_prompt_length": 64,
            "max_response_length": 6,
        },
        "actor_rollout_ref": {
            "model": {"path": str(tiny_folder)},
            "actor": {"ppo_mini_batch_size": 4, "use_kl_loss": True, "optim": {"lr": 1e-3}},
            "rollout": {"name": "hf", "n": 4},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "custom_reward_function": {"path": str(tmp_path / "reward.py")},
        "trainer": {"experiment_name": "letters", "total_training_steps": 2},
    }  # fmt: skip
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(verl))
    sets = ["engine={deterministic: true, threads: 1, kind: local}", f"storage.url={tmp_path / 'data'}"]
    ours = tmp_path / "ours.yaml"
    ours.write_text(as_yaml(import_verl(tmp_path / "verl.yaml", sets=sets), "verl.yaml"))

    asyncio.run(grpo(parse_config(GRPOConfig, ours)))

    # Both steps are committed and have moved the weights.
    chain = Chain(open_store(str(tmp_path / "data")), "letters", "0-grpo", "policy")
    records = [chain.record(step) for step in chain.steps()]
    assert [record is not None for record in records] == [True, True]
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].weights_digest != records[1].weights_digest
