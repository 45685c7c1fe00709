"""Tests of the tasks of episodes: repeated and concurrent runs give one artifact, with a manifest, and errors are
raised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec, SampleTooLong
from engine.text.threads import StringThread
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.tables import read_table
from tasks.batches.rl import prepare_batch
from tasks.environments.episodes import Ending, Episode
from tasks.environments.runner import EnvironmentRunner
from tasks.environments.spec import build, environment_spec
from tasks.evaluation.heldout import evaluate_policy
from tasks.plans import BatchPlan, EpisodePlan, EvaluationPlan, TooManyMasked
from tasks.sampling.episodes import check_masked, play_episodes
from tests.fixtures.runs.batch_workspace import STAGE
from tests.fixtures.runs.task_calls import GREEDY, SAMPLING, TaskCalls, three_times
from tests.fixtures.worklog import events

pytestmark = pytest.mark.usefixtures("prefect_server")

PLAN = EpisodePlan(environment=environment_spec("tests.fixtures.guessing:SayAgain"), max_turns=4)


async def play(calls: TaskCalls, *, plan: EpisodePlan = PLAN, **shard: Any) -> ArtifactRef:
    return await play_episodes(
        calls.workspace, calls.policy, calls.shard.model_copy(update=shard), SAMPLING, plan, step=0
    )


async def test_play_episodes(calls: TaskCalls, worklog: Path) -> None:
    ref = await three_times(lambda: play(calls))
    assert ref.rows == 8 and ref.kind == "rollouts"
    assert ref.key == keys.step_artifact("twice", STAGE, 0, "rollouts", 0)
    assert set(ref.parents) == {calls.policy.uri, calls.dataset.uri}
    assert calls.manifests("runs/twice/", "rollouts") == [keys.manifest(ref.key)]
    # The engine generates once per turn. Two calls at once may both play. After the commit no call plays.
    drawn = len(events(worklog, "generate"))
    assert drawn in (2, 4)
    await play(calls)
    assert len(events(worklog, "generate")) == drawn
    extra = read_manifest(calls.store, ref.key).extra
    rows = read_table(calls.store, ref).to_pylist()
    assert extra == {
        "prompts": 2, "dropped": 0, "episodes": 8, "masked": 0, "turns": 16, "completion_tokens": 96,
        "truncated": sum("length" in row["stop_reasons"] for row in rows),
        "logprob_sum": pytest.approx(sum(sum(row["logprobs"]) for row in rows)),
    }  # fmt: skip


async def test_prepare_batch(calls: TaskCalls) -> None:
    played = await play(calls)
    plan = BatchPlan(reference=calls.policy)
    ref = await three_times(
        lambda: prepare_batch(calls.workspace, calls.policy, [played], [played], plan, step=0)
    )
    assert ref.rows == 8 and set(ref.parents) == {calls.policy.uri, played.uri}
    assert calls.manifests("runs/twice/", "batch") == [keys.manifest(ref.key)]
    assert read_manifest(calls.store, ref.key).extra["prompts"] == 2
    for row in read_table(calls.store, ref).to_pylist():
        trained = sum(weight > 0 for weight in row["loss_mask"])
        assert trained == 12 == len(row["advantages"]) == len(row["reference_logprobs"])


async def test_evaluate_policy(calls: TaskCalls) -> None:
    prompts = calls.shard.model_copy(update={"completions": 1})
    plan = EvaluationPlan(prompts=prompts, sampling=GREEDY, source=PLAN)
    ref = await three_times(lambda: evaluate_policy(calls.workspace, calls.policy, plan))
    rows = read_table(calls.store, ref).to_pylist()
    assert len(rows) == 2
    for row in rows:
        assert row["status"] == "ok" and 0 <= row["reward"] <= 2
        assert row["text"].startswith("assistant: ") and "\nuser: again\nassistant: " in row["text"]
    # patience is not what an evaluation is of
    patient = plan.model_copy(update={"source": PLAN.model_copy(update={"reaction_seconds": 5.0})})
    assert await evaluate_policy(calls.workspace, calls.policy, patient) == ref


async def test_a_long_prompt_is_dropped_and_counted_or_an_error(calls: TaskCalls) -> None:
    with pytest.raises(SampleTooLong, match=r"at most 3 are allowed .max_prompt_tokens, or max_tokens"):
        await play(calls, max_prompt_tokens=3)
    ref = await play(calls, max_prompt_tokens=3, truncation="drop")
    extra = read_manifest(calls.store, ref.key).extra
    assert (ref.rows, extra["prompts"], extra["dropped"], extra["episodes"]) == (0, 2, 2, 0)


def test_dropped_prompts_do_not_count_among_the_episodes_that_may_fail() -> None:
    def episode(ending: Ending) -> Episode:
        runner = EnvironmentRunner(build(PLAN.environment), seed=0, seconds=1)
        return Episode({"id": "p", "index": 0}, 0, environment=runner, ending=ending, reason="no luck")

    # one of two played episodes failed; eight prompts were too long
    episodes = [*(episode("too_long") for _ in range(8)), episode("masked"), episode("environment")]
    with pytest.raises(TooManyMasked, match="1 of 2 episodes of shard 0 could not be played, at most 40%"):
        check_masked(episodes, PLAN.model_copy(update={"max_masked_fraction": 0.4}), where="shard 0")
    check_masked(episodes, PLAN.model_copy(update={"max_masked_fraction": 0.5}), where="shard 0")


@pytest.mark.parametrize(
    ("plan", "shard", "message"),
    [
        ({}, {"truncation": "left"}, "the environment must see the same conversation"),
        ({"max_tokens": 6}, {}, "max_new_tokens=6 leaves no room for a prompt in 6 tokens"),
    ],
)
async def test_what_leaves_nothing_to_play_is_refused(
    plan: dict[str, Any], shard: dict[str, Any], message: str, calls: TaskCalls
) -> None:
    with pytest.raises(BadSpec, match=message):
        await play(calls, plan=PLAN.model_copy(update=plan), **shard)


async def test_an_episode_is_the_same_whoever_plays_it_again(calls: TaskCalls) -> None:
    ref = await play(calls)
    first = read_table(calls.store, ref).to_pylist()
    data = calls.data("runs/twice/stages/0-grpo/steps/000000/rollouts/", ".parquet")
    for name in (*data, keys.manifest(ref.key)):
        calls.store.delete(name)
    again = read_table(calls.store, await play(calls)).to_pylist()
    assert again == first
    threads = [StringThread.from_json(row["thread"]) for row in first]
    assert all([turn.role for turn in thread.turns] == ["user", "assistant"] * 2 for thread in threads)
    assert len({json.dumps(row["token_ids"]) for row in first}) == 8
