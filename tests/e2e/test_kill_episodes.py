"""Tests of `kill -9` while episodes are played: the same command, run again, ends with the same bytes and
plays one shard again. With weights that are updated in flight the tokens differ, and each step trains each episode
once, on tokens that are not too old."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.local.verify import verify_run
from storage.chain.records import Chain
from storage.inspect.accounting import check_accounting, step_inputs
from storage.store.objects import open_store
from storage.store.tables import read_table
from tests.e2e.test_kill_nine import CHECKPOINT_EVERY, Folder
from tests.fixtures.guessing import agent_config, guess_config

STEPS, SHARDS_PER_STEP = 3, 2

KILLED = ["trajectory.turn:10", "rollout.after_data:4"]
"""In the middle of an episode of step 2 (three turns a shard), and where its shard is about to be committed."""


@dataclass
class Episodes(Folder):
    """A folder in which one run of env_grpo is driven by the command line."""

    def words(self) -> list[str]:
        return ["run", "env_grpo", "--config", "config.yaml", "--run", "kill"]

    def chain(self) -> Chain:
        return Chain(open_store(str(self.path / "data")), "kill", "0-env_grpo", "policy")

    def states(self) -> list[str]:
        return [self.chain().policy(step).state for step in range(STEPS + 1)]

    def digests(self) -> list[str | None]:
        return [record.weights_digest for record in self.chain().records(after=0, until=STEPS)]


def make_folder(path: Path, tiny_folder: Path, server: str, **changes: Any) -> Episodes:
    changes = {"environment__arguments": {"grade_each": True}} | changes
    return write_folder(path, server, guess_config, tiny_folder, changes)


def make_agent_folder(path: Path, tiny_folder: Path, server: str) -> Episodes:
    return write_folder(path, server, agent_config, tiny_folder, {})


def write_folder(
    path: Path, server: str, make_config: Callable[..., dict[str, Any]], tiny_folder: Path, changes: dict[str, Any]
) -> Episodes:
    path.mkdir(parents=True, exist_ok=True)
    config = make_config(
        path, tiny_folder, algorithm__steps=STEPS, checkpoints__recovery_steps=CHECKPOINT_EVERY, **changes
    )
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return Episodes(path, server)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str) -> Episodes:
    folder = make_folder(tmp_path_factory.mktemp("uninterrupted"), tiny_folder, prefect_server)
    status, output = folder.run()
    assert status == 0, output
    assert len(folder.events("shard")) == STEPS * SHARDS_PER_STEP
    assert len(set(folder.digests())) == STEPS
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", KILLED)
def test_a_kill_among_episodes_changes_nothing(
    failpoint: str, tmp_path: Path, tiny_folder: Path, prefect_server: str, uninterrupted: Episodes
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server)
    status, output = folder.run(failpoint)
    assert status == -signal.SIGKILL, f"{failpoint} was not hit:\n{output}"
    assert len(folder.events("step")) >= 1  # it is a resumption, and not a second start
    status, output = folder.run()
    assert status == 0, output
    assert folder.weights() == uninterrupted.weights()
    assert folder.states() == uninterrupted.states()
    assert folder.digests() == uninterrupted.digests()
    assert len(folder.events("shard")) <= STEPS * SHARDS_PER_STEP + 1
    assert [event["resumed_from"] > 0 for event in folder.events("start")] == [False, True]


@pytest.mark.slow
def test_episodes_take_newer_weights_in_flight_also_after_a_kill(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    folder = make_folder(
        tmp_path, tiny_folder, prefect_server,
        rules__max_staleness=1, rules__weight_updates="in_flight", rules__segment_seconds=0.02,
        engine__sampler={"kind": "torch", "own_lane": True},
    )  # fmt: skip
    status, output = folder.run(KILLED[0])
    assert status == -signal.SIGKILL, f"{KILLED[0]} was not hit:\n{output}"
    status, output = folder.run()
    assert status == 0, output
    chain, states, mixed = folder.chain(), folder.states(), 0
    for record in chain.records(after=0, until=STEPS):
        step = record.request.parent.step
        assert check_accounting(chain.store, record) == []
        for ref in step_inputs(chain.store, record).rollouts:
            for row in read_table(chain.store, ref).to_pylist():
                assert set(row["policy_states"]) <= set(states[max(0, step - 1) : step + 1])
                assert sum(row["policy_tokens"]) == len(row["logprobs"])
                mixed += len(set(row["policy_states"])) > 1
    assert mixed
    report = verify_run(chain.store, "kill")
    assert not report.problems
    assert any("sampled tokens were scored" in note for note in report.chains[0].notes)


CALLS_PER_STEP = 16
"""Eight agents, with two calls each."""


@pytest.fixture(scope="module")
def uninterrupted_agents(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str
) -> Episodes:
    folder = make_agent_folder(tmp_path_factory.mktemp("agents"), tiny_folder, prefect_server)
    status, output = folder.run()
    assert status == 0, output
    assert len(folder.events("call")) == STEPS * CALLS_PER_STEP
    assert len(set(folder.digests())) == STEPS
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", ["trajectory.call:20", "trajectory.turn:23"])
def test_a_kill_between_the_calls_of_agents_changes_nothing(
    failpoint: str, tmp_path: Path, tiny_folder: Path, prefect_server: str, uninterrupted_agents: Episodes
) -> None:
    """In the second step, after an answer was committed and before one is sampled."""
    folder = make_agent_folder(tmp_path, tiny_folder, prefect_server)
    status, output = folder.run(failpoint)
    assert status == -signal.SIGKILL, f"{failpoint} was not hit:\n{output}"
    assert len(folder.events("step")) >= 1  # it is a resumption, and not a second start
    before = len(folder.events("call"))
    assert before > CALLS_PER_STEP
    status, output = folder.run()
    assert status == 0, output
    assert folder.weights() == uninterrupted_agents.weights()
    assert folder.states() == uninterrupted_agents.states()
    assert folder.digests() == uninterrupted_agents.digests()
    # what was committed is not sampled again
    assert len(folder.events("call")) == STEPS * CALLS_PER_STEP
    assert verify_run(folder.chain().store, "kill").problems == []
