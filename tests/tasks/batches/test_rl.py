"""Tests of the batch of rollouts and grades: its rows, their advantages, and unusual prompts and groups."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from engine.errors import BadSpec, SampleTooLong
from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import Chain, OptimizerSpec, StepRequest
from storage.errors import ArtifactConflict
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.tables import commit_table, read_table, table_schema
from tasks.batches.advantages import Overlong, TokenSelection
from tasks.batches.columns import Grades, group_advantages
from tasks.batches.rl import prepare_batch
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import FileDataset
from tasks.graders.base import GradePart
from tasks.graders.running.grade_threads import GradeOutcome
from tasks.graders.spec import GraderSpec
from tasks.plans import BatchPlan, Grading, TooManyMasked, ValuePlan
from tasks.sampling.grading import grade_rollouts, graded_table
from tasks.sampling.shards import rows_that_fit
from tasks.task_runs import work_of
from tests.fixtures.runs.batch_workspace import STAGE, BatchWorkspace, prompt_ids, sampled_ids


@pytest.fixture
async def batches(tmp_path: Path, tiny_folder: Path) -> BatchWorkspace:
    """A run at policy 0 over three prompts. Two have one letter, and the third has 40."""
    batches = await BatchWorkspace.create(tmp_path, tiny_folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0", "1", "x" * 40)))
    batches.dataset = batches.load(FileDataset(path=str(prompts)))
    return batches


def advantages(batch: list[dict[str, Any]]) -> list[float]:
    """One per row; every trained token of a row has the same."""
    for row in batch:
        assert len(set(row["advantages"])) == 1
    return [row["advantages"][0] for row in batch]


# -- masked grades -----------------------------------------------------------------------------------------------


async def test_a_masked_row_leaves_the_statistics_and_the_batch_and_its_group_stays(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [0.0, 1.0, None, 2.0, 1.0, 1.0, 3.0, 3.0])
    batch = await batches.batch(rollouts, graded)
    assert [row["completion"] for row in batch] == [0, 1, 3, 0, 1, 2, 3]
    # of 0, 1, 2: mean 1, population std sqrt(2/3); of 1, 1, 3, 3: mean 2, std 1
    third = math.sqrt(3 / 2)
    assert advantages(batch) == pytest.approx([-third, 0.0, third, -1.0, -1.0, 1.0, 1.0], abs=1e-6)
    masked_ids = sampled_ids(batches.rows(rollouts)[2])
    assert all(row["token_ids"][-6:] != masked_ids for row in batch)


async def test_a_masked_row_leaves_the_loss(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [0.0, 1.0, None, 2.0, 1.0, 1.0, 3.0, 3.0])
    plan = BatchPlan(reference=batches.policy)
    batch = await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)
    request = StepRequest(
        parent=batches.policy, batch=batch, reference=batches.policy, loss=GRPOSpec().model_dump(),
        optimizer=OptimizerSpec(lr=1e-3),
    )  # fmt: skip
    record = await batches.workspace.connect().take_gradient_step(request, epoch=1)
    assert record.metrics["tokens"] == 7 * 6


@pytest.mark.parametrize(("kind", "low"), [("kl_cov", 1.0), ("clip_cov", -100.0)])
async def test_the_selected_tokens_are_chosen_over_the_whole_batch_and_committed(
    batches: BatchWorkspace, kind: Any, low: float
) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [0.0, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0, 3.0])
    selection = TokenSelection(kind=kind, fraction=0.1, low=low, high=100.0)
    plan = BatchPlan(reference=None, selection=selection)
    batch = await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)
    rows = batches.rows(batch)
    logprobs = np.concatenate([row["old_logprobs"] for row in rows])
    advantages = np.concatenate([row["advantages"] for row in rows])
    selected = np.concatenate([row["selected"] for row in rows])
    assert selected.sum() == 4  # of 48 tokens
    covariances = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    if kind == "kl_cov":
        assert covariances[selected == 1].min() >= covariances[selected == 0].max()
    # the step trains them, and reads nothing but the batch
    loss = {"kind": kind, "kl_beta": 0.0}
    request = StepRequest(parent=batches.policy, batch=batch, loss=loss, optimizer=OptimizerSpec(lr=1e-3))
    record = await batches.workspace.connect().take_gradient_step(request, epoch=1)
    trained = [row for row in rows if kind == "kl_cov" or any(row["advantages"])]
    expected = sum(sum(row["selected"]) for row in trained) / sum(len(row["selected"]) for row in trained)
    assert record.metrics["selected_fraction_mean"] == pytest.approx(expected)


# -- parts of rewards --------------------------------------------------------------------------------------------


def outcome(**parts: float | None) -> GradeOutcome:
    """A grade with these parts; `b` has weight 0.5."""
    given = [(name, value) for name, value in parts.items() if value is not None]
    graded = tuple(GradePart(name=name, value=value, weight=0.5 if name == "b" else 1.0) for name, value in given)
    return GradeOutcome(reward=sum(value for _, value in given), status="ok", parts=graded)


def grades_of(outcomes: dict[str, list[GradeOutcome]]) -> Grades:
    """The grades of a step, by prompt."""
    rows = []
    for number, (prompt, members) in enumerate(outcomes.items()):
        rows += [{"prompt_index": number, "prompt_id": prompt, "completion": n} for n in range(len(members))]
    return Grades(graded_table(rows, [one for members in outcomes.values() for one in members]))


def test_gdpo_normalises_the_parts_by_hand() -> None:
    """The sums of the first two completions are 2 and 0, and those of the last two are equal, which GRPO cannot tell
    apart. Normalised parts (1, -1, -1, 1) and 0.5 (1, -1, 1, -1), sum (1.5, -1.5, -0.5, 0.5); the other prompt has 0.
    Over all eight, the mean is 0 and the variance 0.625."""
    first = [outcome(a=1.0, b=1.0), outcome(a=0.0, b=0.0), outcome(a=0.0, b=1.0), outcome(a=1.0, b=0.0)]
    equal = [outcome(a=1.0, b=1.0)] * 4
    grades = grades_of({"x": first, "y": equal})
    expected = [1.897367, -1.897367, -0.632456, 0.632456, 0, 0, 0, 0]
    assert grades.advantages("gdpo").tolist() == pytest.approx(expected, abs=1e-6)
    assert grades.advantages("group")[2:4].tolist() == [0.0, 0.0]
    # a part that is missing leaves the statistics of its part: (1, -1) for b, and 0 in its place
    missing = [outcome(a=1.0, b=None), outcome(a=0.0, b=0.0), outcome(a=0.0, b=1.0), outcome(a=1.0, b=None)]
    sums = np.array([1.0, -1.5, -0.5, 1.0])
    assert grades_of({"x": missing}).advantages("gdpo") == pytest.approx(sums / np.sqrt(sums.var()), abs=1e-6)


def test_a_masked_completion_is_outside_the_statistics_of_gdpo_and_grades_without_parts_are_refused() -> None:
    masked = GradeOutcome(reward=None, status="masked", reason="late")
    grades = grades_of({"x": [outcome(a=1.0), masked, outcome(a=0.0)]})
    assert grades.advantages("gdpo").tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-6)
    with pytest.raises(BadSpec, match="no grade of the step has parts; give a tasks.graders.CombinedGrader"):
        grades_of({"x": [GradeOutcome(reward=1.0, status="ok")] * 2}).advantages("gdpo")
    with pytest.raises(ValidationError, match=r"\['overlong'\] is a penalty on their sum"):
        BatchPlan(reference=None, advantage_estimator="gdpo", overlong=Overlong(limit=8, buffer=2))


def test_pass_at_k_is_within_the_group_of_a_prompt() -> None:
    """Prompt x, pairs: 2 gains 2 - 0 and 2 - 1, and 1 gains 1 - 0, of 3 pairs. Prompt y has two grades and one pair."""
    masked = GradeOutcome(reward=None, status="masked", reason="late")
    rewards = [GradeOutcome(reward=reward, status="ok") for reward in (0.0, 2.0, 1.0)]
    grades = grades_of({"x": rewards, "y": [rewards[1], masked, rewards[0]]})
    expected = [0.0, 1.0, 1 / 3, 2.0, 0.0, 0.0]
    assert grades.advantages("pass_at_k", pass_k=2).tolist() == pytest.approx(expected, abs=1e-6)
    # of k = 3, y has no estimate: the best of x gains 2 - 1
    assert grades.advantages("pass_at_k", pass_k=3).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValidationError, match="pass_at_k needs pass_k"):
        BatchPlan(reference=None, advantage_estimator="pass_at_k")


async def test_the_parts_of_a_combined_grader_are_in_the_grades_and_in_the_batch(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graders = [{"path": "tests.fixtures.toy:digit_share"}, {"path": "tests.fixtures.grading:even_share"}]
    arguments = {"grader_key": "both", "graders": graders, "weights": [2.0, 1.0]}
    grading = Grading(grader=GraderSpec(path="tasks.graders:CombinedGrader", arguments=arguments), retries=0)
    graded = await work_of(grade_rollouts)(batches.workspace, rollouts, grading, stage=STAGE, step=0, shard=0)
    rows = batches.rows(graded)
    names = [part["name"] for part in rows[0]["parts"]]
    for row in rows:
        weighed = [part["weight"] * part["value"] for part in row["parts"]]
        assert row["reward"] == pytest.approx(sum(weighed) / 3)
    sums = read_manifest(batches.store, graded.key).extra["reward_parts"]
    assert sums == {name: [pytest.approx(sum(r["parts"][n]["value"] for r in rows)), 8] for n, name in enumerate(names)}
    plan = BatchPlan(reference=None, advantage_estimator="gdpo")
    batch = await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)
    trained = np.array(advantages(batches.rows(batch)))
    assert trained.mean() == pytest.approx(0, abs=1e-6) and trained.std() == pytest.approx(1, abs=1e-4)


async def test_a_grader_that_fails_on_one_prompt_masks_only_that_prompt(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = await batches.grade(rollouts, "tests.fixtures.grading:even_share_of_most", max_masked_fraction=0.5)
    rows = batches.rows(graded)
    assert [row["status"] for row in rows] == ["masked"] * 4 + ["ok"] * 4
    assert all(row["reward"] is None and "no grade for the prompt 0" in row["reason"] for row in rows[:4])
    batch = await batches.batch(rollouts, graded)
    assert {row["group"] for row in batch} == {rows[4]["prompt_id"]} and len(batch) == 4


async def test_more_masked_than_allowed_fails_and_keeps_nothing_half_graded(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    with pytest.raises(TooManyMasked, match=r"4 of 8 .*at most 49%.*no grade for the prompt 0.*max_masked_fraction"):
        await batches.grade(rollouts, "tests.fixtures.grading:even_share_of_most", max_masked_fraction=0.49)
    # After a repair of the grader, the rollouts are graded without sampling again.
    assert batches.rows(await batches.grade(rollouts, "tests.fixtures.grading:even_share"))[0]["status"] == "ok"


async def test_grades_of_other_rollouts_are_refused(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    other = await batches.sample(step=1, shard={"rows": (1, 0)})
    graded = batches.commit_grades(other, [1.0] * 8, step=1)
    with pytest.raises(BadSpec, match="do not match the rows of .*expected one grade per row"):
        await batches.batch(rollouts, graded)


async def test_two_models_of_one_stage_do_not_train_on_each_others_samples(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = await batches.grade(rollouts, "tests.fixtures.grading:even_share")
    await batches.batch(rollouts, graded)
    assert await batches.sample() == rollouts
    batches.policy = batches.policy.model_copy(update={"model": "other"})
    for again in (batches.sample(), batches.batch(rollouts, graded)):
        with pytest.raises(ArtifactConflict, match="not from policy:run/.*/other@0"):
            await again


async def test_a_step_without_a_grade_has_an_empty_batch(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [None] * 8)
    plan = BatchPlan(reference=batches.policy)
    batch = await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)
    assert batch.rows == 0 and len(read_table(batches.workspace.open_store(), batch)) == 0
    assert read_manifest(batches.workspace.open_store(), batch.key).extra == {"prompts": 0, "logprob_gap": None}


async def test_a_step_of_ppo_without_a_grade_has_an_empty_batch(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [None] * 8)
    plan, values = BatchPlan(reference=batches.policy), ValuePlan(value=batches.policy)
    prepare = work_of(prepare_batch)
    batch = await prepare(batches.workspace, batches.policy, [rollouts], [graded], plan, values, step=0)
    assert batch.rows == 0


async def test_graded_completions_that_a_rule_leaves_out_are_refused(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = batches.commit_grades(rollouts, [1.0] * 7 + [None])
    plan = BatchPlan(reference=None, drop_equal_groups=True)
    with pytest.raises(BadSpec, match="of 8 sampled completions 7 got a grade, and each of these is empty or left out"):
        await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)


# -- odd groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6])
@pytest.mark.parametrize("estimator", ["group", "group_sample_std", "centred", "leave_one_out"])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(estimator: Any, reward: float) -> None:
    prompts = np.array([0] * 7 + [1] + [2] * 3)
    advantages = group_advantages(prompts, [reward] * 7 + [reward + 1] + [5.0, None, None], estimator)
    assert advantages.dtype == np.float32
    assert advantages[:9].tolist() == [0.0] * 9 and np.isnan(advantages[9:]).all()


def test_a_group_is_one_wherever_in_the_step_its_members_are() -> None:
    prompts = np.array([0, 1, 0, 2, 1, 0])
    # of 0: 0, 3, 6, mean 3; of 1: 1, 2, mean 1.5; 2 is alone
    assert group_advantages(prompts, [0.0, 1.0, 3.0, 9.0, 2.0, 6.0], "centred").tolist() == [-3, -0.5, 0, 0, 0.5, 3]


async def test_equal_rewards_move_no_weight(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    graded = await batches.grade(rollouts, "tests.fixtures.grading:constant")
    plan = BatchPlan(reference=None)
    batch = await work_of(prepare_batch)(batches.workspace, batches.policy, [rollouts], [graded], plan, step=0)
    assert advantages(batches.rows(batch)) == [0.0] * 8
    request = StepRequest(
        parent=batches.policy, batch=batch, loss=GRPOSpec(kl_beta=0.0).model_dump(), optimizer=OptimizerSpec(lr=1e-3)
    )
    record = await batches.workspace.connect().take_gradient_step(request, epoch=1)
    assert record.metrics["loss"] == 0.0 and record.metrics["grad_norm"] == 0.0
    assert list(Chain.of(batches.store, batches.policy).steps()) == [1]


async def test_an_empty_completion_is_graded_and_left_out_of_the_batch(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample()
    rows = batches.rows(rollouts)
    prompt = prompt_ids(rows[1])
    rows[1] |= {"token_ids": prompt, "loss_mask": [False] * len(prompt), "turn_tokens": [0], "logprobs": [], "text": ""}
    emptied = commit_table(
        batches.store, keys.step_artifact("run", STAGE, 1, "rollouts", 0),
        pa.Table.from_pylist(rows, schema=table_schema("rollouts", rows[0])), kind="rollouts",
        provenance=batches.workspace.provenance,
    )  # fmt: skip
    graded = await batches.grade(emptied, "tests.fixtures.grading:even_share", step=1)
    grades = batches.rows(graded)
    assert grades[1]["status"] == "ok" and grades[1]["reward"] == 0.0
    batch = await batches.batch(emptied, graded, step=1)
    assert [row["completion"] for row in batch] == [0, 2, 3, 0, 1, 2, 3]
    # the empty answer counts in its group's mean
    rewards = [row["reward"] for row in grades[:4]]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    expected = [(r - mean) / std for i, r in enumerate(rewards) if i != 1]
    assert advantages(batch)[:3] == pytest.approx(expected, abs=1e-5)


async def test_old_logprobs_are_the_policys_own(batches: BatchWorkspace) -> None:
    rollouts = await batches.sample(min_new_tokens=0)
    batch = await batches.batch(rollouts, batches.commit_grades(rollouts, [0.0, 1.0] * 4))
    row = batch[0]
    length = len(row["old_logprobs"])
    assert row["old_logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-4)
    weights = [0.0] * (len(row["token_ids"]) - length) + [1.0] * length
    assert row["loss_mask"] == weights
    request = LogprobsRequest(batches.policy, [TokenSequence(row["token_ids"], weights)])
    (alone,) = await batches.workspace.connect().logprobs(request, epoch=1)
    assert row["old_logprobs"] == pytest.approx(alone, abs=1e-4)
    assert row["reference_logprobs"] == row["old_logprobs"]  # at step 0 the policy is the reference


# -- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", ["error", "left", "right", "drop"])
async def test_a_prompt_that_is_too_long(batches: BatchWorkspace, truncation: str) -> None:
    rollouts = batches.rows(await batches.sample(shard={"rows": (0, 2)}))
    whole = {row["prompt_index"]: prompt_ids(row) for row in rollouts}
    limit = len(whole[0])
    assert len(whole[2]) == limit + 39
    shard = {"rows": (0, 2), "max_prompt_tokens": limit, "truncation": truncation}
    if truncation == "error":
        message = rf"\(row 3 of .*prompts\.jsonl\) has {limit + 39} tokens, at most {limit}.*left, right"
        with pytest.raises(SampleTooLong, match=message):
            await batches.sample(step=1, shard=shard)
        return
    ref = await batches.sample(step=1, shard=shard)
    rows = batches.rows(ref)
    assert [prompt_ids(row) for row in rows[:4]] == [whole[0]] * 4  # at the limit is not over it
    extra = read_manifest(batches.store, ref.key).extra
    assert extra["prompts"] == 2
    if truncation == "drop":
        assert {row["prompt_index"] for row in rows} == {0} and extra["dropped"] == 1
        return
    cut = whole[2][-limit:] if truncation == "left" else whole[2][:limit]
    assert [prompt_ids(row) for row in rows[4:]] == [cut] * 4 and extra["dropped"] == 0


async def test_long_prompts_are_found_before_batches_are_formed(batches: BatchWorkspace) -> None:
    """As verl's RLHFDataset.maybe_filter_out_long_prompts (utils/dataset/rl_dataset.py) does: the limit itself fits."""
    limit = len(batches.rows(await batches.sample(shard={"rows": (0,)}))[0]["token_ids"]) - 6
    assert batches.dataset is not None
    data = LoadedDataset(ref=batches.dataset, rows=3)

    def fitting(max_prompt_tokens: int | None) -> list[int]:
        sampling = SamplingParams(max_new_tokens=6)
        return rows_that_fit(
            batches.workspace, data, batches.base, max_prompt_tokens=max_prompt_tokens, sampling=sampling
        )

    assert fitting(None) == [0, 1, 2]
    assert fitting(limit + 38) == fitting(limit) == [0, 1]
    with pytest.raises(BadSpec, match=f"all 3 prompts have more than {limit - 1} tokens"):
        fitting(limit - 1)


async def test_a_prompt_that_comes_twice_in_a_step_is_sampled_again(batches: BatchWorkspace) -> None:
    again = await batches.sample(shard={"rows": (0, 1, 0), "repetitions": (0, 0, 1)})
    rows = batches.rows(again)
    assert [row["completion"] for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert len({row["seed"] for row in rows}) == 12
    assert [sampled_ids(row) for row in rows[:4]] != [sampled_ids(row) for row in rows[8:]]
    # The first occurrence is sampled as it would be without the second.
    alone = batches.rows(await batches.sample(step=0, shard={"index": 1, "rows": (0,)}))
    assert [row["seed"] for row in alone] == [row["seed"] for row in rows[:4]]


@pytest.mark.parametrize("truncation", ["error", "left", "drop"])
async def test_without_a_limit_the_models_context_is_one(batches: BatchWorkspace, truncation: str) -> None:
    rollouts = batches.rows(await batches.sample(shard={"rows": (0, 2)}))
    longest = max(len(prompt_ids(row)) for row in rollouts)
    # The tiny model's context is 4,096 tokens. This leaves one less than the longest prompt needs.
    room = {"max_new_tokens": 4096 - longest + 1, "min_new_tokens": 0, "stop_token_ids": tuple(range(259))}
    shard = {"rows": (0, 2), "truncation": truncation}
    if truncation == "error":
        with pytest.raises(SampleTooLong, match=rf"has {longest} tokens, at most {longest - 1} are allowed"):
            await batches.sample(step=1, shard=shard, **room)
        return
    rollouts = batches.rows(await batches.sample(step=1, shard=shard, **room))
    lengths = {len(prompt_ids(row)) for row in rollouts}
    assert (longest - 1 in lengths) is (truncation == "left")
    assert max(lengths) < longest


async def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused(batches: BatchWorkspace) -> None:
    with pytest.raises(BadSpec, match=r"max_new_tokens=4096 leaves no room .* context of 4096"):
        await batches.sample(max_new_tokens=4096)
