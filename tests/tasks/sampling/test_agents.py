"""Agents play the episodes of a shard: processes of their own that call the tiny model over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from engine.local.engine import LocalEngine
from storage.chain.records import PolicyRef
from storage.errors import CorruptArtifact
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.tables import read_table
from tasks.batches.rl import prepare_batch
from tasks.environments.agents import AgentAttempt
from tasks.environments.episodes import EpisodeSegment, Trajectory
from tasks.environments.spec import AgentSpec, AgentSpecError, agent_spec
from tasks.evaluation.heldout import evaluate_policy
from tasks.plans import AgentPlan, BatchPlan, EvaluationPlan
from tasks.sampling.agents import AgentRunner, CommittedCall
from tasks.sampling.episodes import play_episodes
from tests.fixtures.guessing import PLAIN_AGENT
from tests.fixtures.runs.task_calls import GREEDY, SAMPLING, TaskCalls, three_times
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.waiting import alive, wait_until
from tests.fixtures.worklog import events

pytestmark = pytest.mark.usefixtures("prefect_server")

PLAIN = AgentPlan(agent=agent_spec(command=PLAIN_AGENT))


POLICY = PolicyRef(run="r", stage="s", model="m", step=0, state="a" * 64)


def plan_of(function: str, **limits: Any) -> AgentPlan:
    """The plan of an agent of tests.fixtures.agents. Its episodes may fail."""
    return AgentPlan(agent=agent_spec(f"tests.fixtures.agents:{function}"), **{"max_masked_fraction": 1.0} | limits)


async def play(calls: TaskCalls, plan: AgentPlan, **shard: Any) -> ArtifactRef:
    changed = calls.shard.model_copy(update={"rows": (0,), "completions": 1} | shard)
    return await play_episodes(calls.workspace, calls.policy, changed, SAMPLING, plan, step=0)


async def rows_of(calls: TaskCalls, plan: AgentPlan, **shard: Any) -> list[dict[str, Any]]:
    return read_table(calls.store, await play(calls, plan, **shard)).to_pylist()


async def test_a_command_plays_a_shard_once(calls: TaskCalls, worklog: Path) -> None:
    shard = {"rows": (0, 1), "completions": 4}
    ref = await three_times(lambda: play(calls, PLAIN, **shard))
    rows = read_table(calls.store, ref).to_pylist()
    assert read_manifest(calls.store, ref.key).extra == {
        "prompts": 2, "dropped": 0, "episodes": 8, "masked": 0, "turns": 16, "completion_tokens": 96,
        "segments": 8, "failed_attempts": 0,
        "truncated": sum("length" in row["stop_reasons"] for row in rows),
        "logprob_sum": pytest.approx(sum(sum(row["logprobs"]) for row in rows)),
    }  # fmt: skip
    # two calls of one conversation are one sequence, graded at its end
    assert len(rows) == 8
    for row in rows:
        assert (row["status"], row["ending"], row["turn_tokens"], row["graded_turns"]) == ("ok", "agent", [6, 6], [1])
        assert sum(row["loss_mask"]) == len(row["logprobs"]) == 12
    assert len({tuple(row["token_ids"]) for row in rows}) == 8
    # the committed table replaces the records of the calls
    assert list(calls.store.list(keys.calls_prefix(ref.key))) == []

    # Each episode is a row of the batch. tests/flows/test_agent_flows.py compares the logprobs of trainer and sampler.
    batch = await prepare_batch(calls.workspace, calls.policy, [ref], [ref], BatchPlan(reference=calls.policy), step=0)
    assert batch.rows == 8


async def test_an_agent_that_was_killed_gets_the_committed_answers(calls: TaskCalls, worklog: Path) -> None:
    ref = await play(calls, plan_of("killed_once"))
    (row,) = read_table(calls.store, ref).to_pylist()
    assert (row["status"], row["turn_tokens"]) == ("ok", [6, 6])
    assert len(events(worklog, "agent_failed")) == 1
    assert len(events(worklog, "call")) == 2  # of the three that its two attempts made
    assert read_manifest(calls.store, ref.key).extra["failed_attempts"] == 1


async def test_an_agent_that_fails_each_time_is_masked(calls: TaskCalls, worklog: Path) -> None:
    (row,) = await rows_of(calls, plan_of("killed_once", retries=0))
    assert row["status"] == "masked" and row["reason"].startswith("the agent ended with status -9")
    assert row["token_ids"] == [] and "Guess." in row["thread"]
    assert len(events(worklog, "agent_failed")) == 1


@pytest.mark.parametrize(
    ("function", "limits", "reason"),
    [
        ("silent", {}, "the agent made no call to the model"),
        ("no_number", {}, "the agent gave no reward"),
        ("greedy_of_memory", {"memory_mib": 3000}, "MemoryError"),
    ],
)
async def test_what_gives_no_reward_is_masked_with_its_reason(
    function: str, limits: dict[str, Any], reason: str, calls: TaskCalls
) -> None:
    (row,) = await rows_of(calls, plan_of(function, retries=0, **limits))
    assert row["status"] == "masked" and reason in row["reason"]


async def test_a_limit_on_calls_ends_an_endless_agent_with_the_reward_that_it_posted(calls: TaskCalls) -> None:
    rows = await rows_of(calls, plan_of("endless", max_calls=3))
    assert [row["ending"] for row in rows] == ["turns"] * 3  # equal calls are sequences of their own
    assert [grade for row in rows for grade in row["grades"]] == [0.25]
    assert rows[-1]["graded_turns"] == [2] and [row["first_turn"] for row in rows] == [0, 1, 2]


async def test_the_time_limit_kills_the_whole_process_group(
    calls: TaskCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "grandchild"
    monkeypatch.setenv("GRANDCHILD", str(note))
    agent = agent_spec(command=(*PLAIN.agent.command, "sleep"))
    (row,) = await rows_of(calls, AgentPlan(agent=agent, seconds=8, max_masked_fraction=1))
    assert row["status"] == "masked" and "a limit ended the agent (time)" in row["reason"]
    wait_until(lambda: not alive(int(note.read_text())))


async def test_a_process_that_an_agent_leaves_behind_is_killed(
    calls: TaskCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "grandchild"
    monkeypatch.setenv("GRANDCHILD", str(note))
    agent = agent_spec(command=(*PLAIN.agent.command, "leave"))
    (row,) = await rows_of(calls, AgentPlan(agent=agent, seconds=60))
    assert (row["status"], row["ending"]) == ("ok", "agent")  # although the output is held open
    wait_until(lambda: not alive(int(note.read_text())))


async def test_branches_are_segments_of_one_trajectory(calls: TaskCalls) -> None:
    rows = pandas.DataFrame(await rows_of(calls, plan_of("branches")))
    assert rows["segment"].tolist() == [0, 1, 2, 3] and rows["first_turn"].tolist() == [0, 1, 3, 4]
    assert rows["loss_mask"].map(sum).tolist() == [6, 12, 6, 6] == rows["logprobs"].map(len).tolist()
    assert [list(turns) for turns in rows["graded_turns"]] == [[], [], [], [4]]


async def test_the_policy_may_be_on_a_server(calls: TaskCalls) -> None:
    workspace = calls.workspace
    shard = calls.shard.model_copy(update={"rows": (0,), "completions": 2})
    with running_server(LocalEngine(workspace.store, workspace.engine)) as engine:
        remote = workspace.model_copy(update={"engine": engine})
        ref = await play_episodes(remote, calls.policy, shard, SAMPLING, PLAIN, step=0)
    rows = read_table(calls.store, ref).to_pylist()
    assert [(row["status"], row["turn_tokens"]) for row in rows] == [("ok", [6, 6])] * 2


async def test_an_evaluation_is_played_by_agents(calls: TaskCalls) -> None:
    prompts = calls.shard.model_copy(update={"completions": 1})
    plan = EvaluationPlan(prompts=prompts, sampling=GREEDY, source=PLAIN)
    rows = read_table(calls.store, await evaluate_policy(calls.workspace, calls.policy, plan)).to_pylist()
    assert len(rows) == 2
    for row in rows:
        assert row["status"] == "ok" and 0 <= row["reward"] <= 2
        assert row["text"].startswith("user: Guess.\nassistant: ") and "\nuser: Again.\nassistant: " in row["text"]


def test_only_the_tokens_of_episodes_that_are_kept_are_counted() -> None:
    newer = POLICY.model_copy(update={"step": 1, "state": "b" * 64})
    runner: Any = SimpleNamespace(_policies={POLICY.state: POLICY, newer.state: newer})
    tokenized: Any = None
    trajectories = []
    for ending, counts in (("agent", [2, 3]), ("masked", [10, 20]), ("turns", [0, 4])):
        segment = EpisodeSegment(
            tokenized, first_turn=0, policy_states=[POLICY.state, newer.state], policy_tokens=counts
        )
        trajectories.append(Trajectory({}, 0, segments=[segment], ending=ending))
    assert AgentRunner._tokens_of(runner, trajectories) == {POLICY: 2, newer: 3 + 4}


def test_a_damaged_record_of_a_call_is_no_answer() -> None:
    call = CommittedCall(
        prompt_id="p", completion=0, policies=[POLICY], policy_tokens=[2], prompt=[1, 2], sampling=SAMPLING, seed=7,
        token_ids=[11, 12], logprobs=[-0.5, -0.25], stop_reason="eos",
    )  # fmt: skip
    data = call.to_bytes()
    assert CommittedCall.from_bytes(data, "key") == call
    for damaged in (data.replace(b"11", b"13"), data[:-1]):
        with pytest.raises(CorruptArtifact, match="delete it to make the call again"):
            CommittedCall.from_bytes(damaged, "key")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"path": "tests.fixtures.agents:nothing"}, "has no 'nothing'"),
        ({"path": "tests.fixtures.agents:even_share"}, "expected an async function run"),
        ({"path": "tests.fixtures.guessing:Guess"}, "expected an async function run"),
        ({"command": ("no-such-program",)}, "there is no program 'no-such-program' in PATH"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused(agent: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentSpecError, match=message):
        agent_spec(**agent)


@pytest.mark.parametrize("agent", [{}, {"path": "a:b", "command": ("c",)}])
def test_an_agent_is_a_function_or_a_command(agent: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        AgentSpec(**agent)


def test_agents_do_not_inherit_the_tokens_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_ENGINE_TOKEN", "secret")
    monkeypatch.setenv("OWN_KEY", "kept")
    session: Any = SimpleNamespace(id="s", served=SimpleNamespace(model_id="m"))
    attempt = AgentAttempt(PLAIN.agent, session, "http://x", seconds=1, memory_mib=None)
    variables = attempt._variables()
    assert variables["OWN_KEY"] == "kept" and "secret" not in variables.values()
    assert variables["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
