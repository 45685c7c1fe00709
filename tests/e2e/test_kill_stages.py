"""Tests of `kill -9` in the flows `dpo`, `reward_model`, `gspo` and `sft_to_gspo`, there on both sides of the border
between the stages. The same command, run again, continues in the same stage and ends with the same bytes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from storage.chain.records import Chain, CommitRecord
from storage.store.objects import open_store
from tests.e2e.test_kill_nine import Folder
from tests.fixtures.preferences import preference_config, write_pairs
from tests.fixtures.toy import toy_config

STAGES: dict[str, dict[str, int]] = {
    "dpo": {"0-dpo": 4},
    "reward_model": {"0-reward_model": 4},
    "gspo": {"0-gspo": 3},
    "sft_to_gspo": {"0-sft": 2, "1-gspo": 2},
}
"""Flow -> its stages, and the steps of each."""


@dataclass
class Staged(Folder):
    """A folder in which one run of a flow is driven by the command line."""

    flow: str

    def words(self) -> list[str]:
        return ["run", self.flow, "--config", "config.yaml", "--run", "kill"]

    def chain_of(self, stage: str) -> Chain:
        return Chain(open_store(str(self.path / "data")), "kill", stage, "policy")

    def records(self) -> list[CommitRecord]:
        records: list[CommitRecord] = []
        for stage, steps in STAGES[self.flow].items():
            records += self.chain_of(stage).records(after=0, until=steps)
        return records

    def states(self) -> list[str]:
        return [record.state for record in self.records()]

    def digests(self) -> list[str | None]:
        return [record.weights_digest for record in self.records()]

    def weights(self) -> bytes:
        files = sorted((self.path / "data" / "models" / "toy").glob("*/*.safetensors"))
        assert files
        return b"".join(file.read_bytes() for file in files)


def config_of(flow: str, path: Path, tiny_folder: Path, adapter: dict[str, Any] | None) -> dict[str, Any]:
    model = {"key": str(tiny_folder), "publish_as": "toy", "adapter": adapter}
    if flow in ("dpo", "reward_model"):
        return preference_config(path, tiny_folder, model=model)
    # a reward that an untrained model varies in: every step moves the weights
    grader = "tests.fixtures.grading:even_share"
    toy = toy_config(path, tiny_folder, grader__path=grader, model=model, algorithm__steps=3)
    if flow == "gspo":
        return toy | {"algorithm": toy["algorithm"] | {"samples_per_mini_batch": 8}}
    algorithm, optimizer = toy.pop("algorithm"), toy.pop("optimizer")
    pairs = write_pairs(path / "chats.jsonl")
    chats = {"kind": "file", "path": str(pairs), "columns": {"completion": "chosen"}}
    return toy | {
        "data": {"train": chats, "prompts": toy["data"]["train"]},
        "sft": {"algorithm": {"steps": 2, "samples_per_batch": 4}, "optimizer": optimizer},
        "gspo": {"algorithm": algorithm | {"steps": 2}, "optimizer": optimizer},
        "checkpoints": {"frequency": None},  # none but the last of each stage
    }


def make_folder(
    flow: str, path: Path, tiny_folder: Path, server: str, adapter: dict[str, Any] | None = None
) -> Staged:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config_of(flow, path, tiny_folder, adapter)))
    return Staged(path, server, flow)


def uninterrupted(flow: str, path: Path, tiny_folder: Path, server: str, adapter: dict[str, Any] | None) -> Staged:
    folder = make_folder(flow, path, tiny_folder, server, adapter)
    status, output = folder.run()
    assert status == 0, output
    assert not folder.events("redo")
    assert len(set(folder.digests())) == sum(STAGES[flow].values())  # equal bytes mean something
    return folder


def assert_killed_and_resumed(folder: Staged, whole: Staged, failpoint: str) -> None:
    status, output = folder.run(failpoint)
    assert status == -signal.SIGKILL, f"{failpoint} was not hit:\n{output}"
    status, output = folder.run()
    assert status == 0, output
    assert folder.states() == whole.states()
    assert folder.digests() == whole.digests()
    assert folder.weights() == whole.weights()


ONE_STAGE = ["batch.after_data:3", "step.before_commit:3", "step.after_commit:2", "checkpoint.mid_upload:1"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize("flow", ["dpo", "reward_model", "gspo"])
def test_a_kill_changes_nothing(
    flow: str, adapter: dict[str, Any] | None, tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    whole = uninterrupted(flow, tmp_path / "whole", tiny_folder, prefect_server, adapter)
    for number, failpoint in enumerate(ONE_STAGE if adapter is None else ONE_STAGE[1:2]):
        folder = make_folder(flow, tmp_path / str(number), tiny_folder, prefect_server, adapter)
        assert_killed_and_resumed(folder, whole, failpoint)
        assert [event["resumed_from"] > 0 for event in folder.events("start")] == [False, True]


BORDER = {
    "step.after_commit:2": ["0-sft", "0-sft", "1-gspo"],  # the last step of the first stage, and no checkpoint of it
    "checkpoint.mid_upload:1": ["0-sft", "0-sft", "1-gspo"],
    "rollout.sampling:1": ["0-sft", "1-gspo", "0-sft", "1-gspo"],  # the first thing of the second stage
    "step.before_commit:3": ["0-sft", "1-gspo", "0-sft", "1-gspo"],
    "step.after_commit:3": ["0-sft", "1-gspo", "0-sft", "1-gspo"],
}
"""Failpoint around the border -> the stages that are opened, by the killed process and then by the next."""


@pytest.fixture(scope="module", params=[None, {"rank": 4}], ids=["whole", "adapter"])
def two_stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str
) -> tuple[Staged, dict[str, Any] | None]:
    path = tmp_path_factory.mktemp("stages")
    return uninterrupted("sft_to_gspo", path, tiny_folder, prefect_server, request.param), request.param


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", sorted(BORDER))
def test_a_kill_around_the_border_of_two_stages_changes_nothing(
    failpoint: str,
    tmp_path: Path,
    tiny_folder: Path,
    prefect_server: str,
    two_stages: tuple[Staged, dict[str, Any] | None],
) -> None:
    whole, adapter = two_stages
    folder = make_folder("sft_to_gspo", tmp_path, tiny_folder, prefect_server, adapter)
    assert_killed_and_resumed(folder, whole, failpoint)
    opened = [event["policy"].split("/")[1] for event in folder.events("start")]
    assert opened == BORDER[failpoint]
    # a step of the first stage is taken again only where the kill came before the stage was complete
    again = len(folder.events("step")) - 4 + len(folder.events("redo"))
    assert again <= (2 if opened.count("1-gspo") == 1 else 1)
    assert_the_second_stage_is_held_to_the_end_of_the_first(folder)


def assert_the_second_stage_is_held_to_the_end_of_the_first(folder: Staged) -> None:
    last = folder.chain_of("0-sft").policy(2)
    root = folder.chain_of("1-gspo").root()
    assert root is not None and root.start == last and root.base_digest == last.state
    start = folder.chain_of("1-gspo").policy(0)
    assert all(record.request.reference == start for record in folder.chain_of("1-gspo").records(0, 2))


@pytest.mark.slow
def test_the_reference_of_the_second_stage_is_where_the_first_ended(
    two_stages: tuple[Staged, dict[str, Any] | None],
) -> None:
    folder, _ = two_stages
    assert_the_second_stage_is_held_to_the_end_of_the_first(folder)
    first = folder.chain_of("1-gspo").record(1)
    # the policy that sampled the first batch is the reference: it is not away from itself
    assert first is not None and first.metrics["kl_mean"] == pytest.approx(0, abs=1e-6)
