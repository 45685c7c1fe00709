"""Steps whose completions all stay without a grade: sampled a second time, then skipped, counted and limited."""

from __future__ import annotations

from pathlib import Path

import pytest

import flows.grpo
from engine.local.verify import verify_run
from engine.workspace import connect
from flows.configs.common import GRPOConfig
from flows.configs.ppo import PPOConfig
from flows.ppo import ppo
from flows.training.rollout_collection import TooManySkipped
from storage.chain.records import CommitRecord
from storage.inspect.accounting import check_accounting, step_inputs
from storage.inspect.audit import audit_store
from storage.inspect.step_samples import step_samples
from storage.store.artifacts import read_manifest
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.interruption import Killed, interrupt_at
from tests.fixtures.runs.ppo_runs import PPO_DEFAULTS
from tests.fixtures.toy import toy_config

SMALL = {
    "algorithm__steps": 10, "algorithm__samples_per_batch": 4, "algorithm__samples_per_mini_batch": 4,
    "algorithm__completions_per_sample": 2, "algorithm__prompts_per_shard": 1,
}  # fmt: skip
"""Two shards of a prompt with two completions each."""
DECLINING = SMALL | {"grader__path": "tests.fixtures.grading:mostly_declined", "rules": {"max_skipped_steps": 10}}


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return grpo_runs(tmp_path, tiny_folder)


def samplings(runs: FlowRuns, record: CommitRecord) -> tuple[list[bool], list[str]]:
    """Of each shard of a step, whether it is a second sampling, and the statuses of all grades."""
    resampled = [
        bool(read_manifest(runs.store, ref.key).extra.get("resampled"))
        for ref in step_inputs(runs.store, record).rollouts
    ]
    policy = record.policy
    grades = step_samples(runs.store, policy.run, policy.stage, policy.step)
    return resampled, [grade.status for grade in grades]


def test_a_step_without_grades_is_sampled_again_and_then_skipped(runs: FlowRuns) -> None:
    records = runs.train("declined", **DECLINING)
    assert len(records) == 10
    kinds = {"at once": 0, "second sampling": 0, "skipped": 0}
    metrics = runs.metrics("declined")
    for record, measured in zip(records, metrics, strict=True):
        resampled, statuses = samplings(runs, record)
        is_skipped = "ok" not in statuses
        # a second sampling has the same prompts, and happens exactly if the first one has no grade
        assert resampled == ([False] * 2 + [True] * 2 if "ok" not in statuses[:4] else [False] * 2)
        kinds["skipped" if is_skipped else "second sampling" if resampled[-1] else "at once"] += 1
        # a skipped step is a record without an update, whose weights are those of the step before
        assert (record.request.batch.rows == 0, record.updates == 0) == (is_skipped, is_skipped)
        assert measured["skipped"] == is_skipped
        assert (measured["reward_mean"] is None) == is_skipped
        # the cursor passes the two prompts of a step once, however often they are sampled
        before, after = record.request.cursor_in, record.request.cursor_out
        assert (after["epoch"] * 10 + after["index"]) - (before.get("epoch", 0) * 10 + before.get("index", 0)) == 2
        assert check_accounting(runs.store, record) == []
    assert min(kinds.values()) > 0, kinds
    # the random numbers of the second sampling differ from those of the first
    for record in records:
        seeds = [row["seed"] for ref in step_inputs(runs.store, record).rollouts for row in runs.rows(ref)]
        assert len(set(seeds)) == len(seeds)
    digests = [record.weights_digest for record in records]
    for before, record, digest in zip(digests, records[1:], digests[1:], strict=False):
        assert digest == before or record.request.batch.rows
    # a redo from the root gives the same bits, and the audit finds nothing
    (chain,) = verify_run(runs.store, "declined").chains
    assert (chain.redone, chain.problems) == (10, ())
    assert audit_store(runs.store).problems == ()


@pytest.mark.parametrize("task", ["prepare_batch", "take_gradient_step"])
def test_a_run_killed_at_a_skipped_step_ends_with_the_same_weights(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    records = runs.train("whole", **DECLINING)
    skipped = next(record.policy.step for record in records if record.request.batch.rows == 0)
    with monkeypatch.context() as patched:
        interrupt_at(patched, flows.grpo, task, step=skipped - 1, error=Killed)
        with pytest.raises(Killed):
            runs.run("interrupted", **DECLINING)
    connect.cache_clear()
    runs.run("interrupted", **DECLINING)
    assert runs.digests("interrupted") == [record.weights_digest for record in records]


def test_both_models_of_ppo_skip_the_step(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    """The reward has a KL penalty and the advantages are whitened, which need the logprobs of the batch's rows."""
    runs = FlowRuns(tmp_path, tiny_folder, ppo, PPOConfig, stage="0-ppo", defaults=PPO_DEFAULTS)
    one_per_prompt = {"algorithm__completions_per_sample": 1, "credit__value_only_fraction": 0.0}
    whitened = {"credit__whiten_advantages": True, "algorithm__steps": 4}
    runs.run("declined", **DECLINING | one_per_prompt | whitened)
    policies, values = runs.records("declined", "policy"), runs.records("declined", "value")
    skipped = [record.request.batch.rows == 0 for record in policies]
    assert 0 < sum(skipped) < 4
    assert [record.updates == 0 for record in policies] == [record.updates == 0 for record in values] == skipped
    assert [check_accounting(runs.store, record) for record in (*policies, *values)] == [[]] * 8


def test_a_skipped_step_of_an_estimator_over_the_whole_batch(runs: FlowRuns) -> None:
    never = SMALL | {"grader__path": "tests.fixtures.grading:mostly_declined", "grader__arguments": {"graded": 0.0}}
    whole = {"algorithm__advantage_estimator": "reinforce_plus_plus", "algorithm__steps": 1}
    (record,) = runs.train("whole-batch", **never | whole)
    assert (record.request.batch.rows, record.updates) == (0, 0)


def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_reason(runs: FlowRuns) -> None:
    never = SMALL | {"grader__path": "tests.fixtures.grading:mostly_declined", "grader__arguments": {"graded": 0.0}}
    with pytest.raises(TooManySkipped) as refused:
        runs.run("never", **never, rules={"max_skipped_steps": 2})
    message = str(refused.value)
    assert "no completion of step 3 got a grade, although its prompts were sampled twice" in message
    assert "The first reason: not an answer that can be judged." in message
    table = Path(message.partition("It is in ")[2].partition(";")[0])
    assert table.is_file() and table.suffix == ".parquet"
    assert f"ostinato runs samples never --stage 0-grpo --step 3 --storage {runs.store.url}" in message
    assert len(runs.records("never")) == 2
    # the same run goes on with a higher limit, which changes no result
    with pytest.raises(TooManySkipped, match="no completion of step 5"):
        runs.run("never", **never, rules={"max_skipped_steps": 4})
    assert len(runs.records("never")) == 4


def test_the_limit_may_change_between_attempts(tmp_path: Path) -> None:
    plain = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path))
    higher = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path, rules={"max_skipped_steps": 9}))
    assert plain.semantic() == higher.semantic()
    assert higher.other()["rules"] == {"max_idle_steps": 20, "max_skipped_steps": 9}
