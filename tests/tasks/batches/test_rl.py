"""From rollouts and grades to a batch: who is in it, with which advantage, and what an odd prompt or group does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.errors import BadSpec, SampleTooLong
from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from storage.chain.records import Chain, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.errors import ArtifactConflict
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, read_manifest
from storage.store.tables import SCHEMAS, commit_table, read_table
from tasks.batches.columns import group_advantages
from tasks.batches.rl import BatchPlan, rollout_batch
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import FileDataset
from tasks.graders.spec import grader_spec
from tasks.sampling.completions import PromptShard, sample_shard
from tasks.sampling.grading import Grading, TooManyMasked, grade_shard

STAGE = "0-grpo"


class Stand:
    """A run at policy 0 over a dataset of prompts."""

    def __init__(self, workspace: Workspace, base: ArtifactRef, policy: PolicyRef, dataset: ArtifactRef) -> None:
        self.workspace, self.base, self.policy, self.dataset = workspace, base, policy, dataset
        self.store = workspace.open_store()

    async def sample(self, *, step: int = 0, shard: dict[str, Any] | None = None, **sampling: Any) -> ArtifactRef:
        spec = {"base": self.base, "dataset": self.dataset, "index": 0, "rows": (0, 1), "completions": 4}
        params = {"max_new_tokens": 6, "min_new_tokens": 6} | sampling
        return await sample_shard(
            self.workspace, self.policy, PromptShard(**(spec | (shard or {}))), SamplingParams(**params), step=step
        )

    async def grade(self, rollouts: ArtifactRef, path: str, *, step: int = 0, **grading: Any) -> ArtifactRef:
        spec = grader_spec(path, grading.pop("arguments", None))
        return await grade_shard(
            self.workspace, rollouts, Grading(grader=spec, retries=0, **grading), stage=STAGE, step=step, shard=0
        )

    def graded(self, rollouts: ArtifactRef, rewards: list[float | None], *, step: int = 0) -> ArtifactRef:
        """Grades as given; None is masked."""
        rows = [
            {name: row[name] for name in ("prompt_index", "prompt_id", "completion")}
            | {"reward": reward, "status": "masked" if reward is None else "ok", "reason": ""}
            for row, reward in zip(self.rows(rollouts), rewards, strict=True)
        ]
        table = pa.Table.from_pylist(rows, schema=SCHEMAS["graded"])
        key = keys.step_artifact("run", STAGE, step, "graded", 0)
        return commit_table(self.store, key, table, kind="graded", provenance=self.workspace.provenance)

    async def batch(self, rollouts: ArtifactRef, graded: ArtifactRef, *, step: int = 0) -> list[dict[str, Any]]:
        ref = await rollout_batch(
            self.workspace, self.policy, [rollouts], [graded], BatchPlan(reference=self.policy), step=step
        )
        return self.rows(ref)

    def rows(self, ref: ArtifactRef) -> list[dict[str, Any]]:
        return read_table(self.store, ref).to_pylist()


@pytest.fixture
async def stand(tmp_path: Path, tiny_folder: Path) -> Stand:
    workspace = Workspace(
        store=str(tmp_path / "data"),
        engine=LocalEngineSpec(deterministic=True, threads=1),
        run="run",
        epoch=1,
        provenance=Provenance(code_version="test", config_digest="none", seed=0),
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0", "1", "x" * 40)))
    engine = workspace.connect()
    base = await engine.import_model(str(tiny_folder), provenance=workspace.provenance)
    root = Root(base=base, base_digest=base.sha256)
    policy = await engine.create_policy(PolicySpec(run="run", stage=STAGE, model="policy", root=root))
    data = load_dataset(workspace.open_store(), FileDataset(path=str(prompts)), provenance=workspace.provenance)
    return Stand(workspace, base, policy, data.ref)


def advantages(batch: list[dict[str, Any]]) -> list[float]:
    """One per row; every trained token of a row has the same."""
    for row in batch:
        assert len(set(row["advantages"])) == 1
    return [row["advantages"][0] for row in batch]


# -- masked grades -----------------------------------------------------------------------------------------------


async def test_a_masked_row_leaves_the_statistics_and_the_batch_and_its_group_stays(stand: Stand) -> None:
    rollouts = await stand.sample()
    graded = stand.graded(rollouts, [0.0, 1.0, None, 2.0, 1.0, 1.0, 3.0, 3.0])
    batch = await stand.batch(rollouts, graded)
    assert [row["completion"] for row in batch] == [0, 1, 3, 0, 1, 2, 3]
    # of 0, 1, 2: mean 1, population std sqrt(2/3); of 1, 1, 3, 3: mean 2, std 1
    third = math.sqrt(3 / 2)
    assert advantages(batch) == pytest.approx([-third, 0.0, third, -1.0, -1.0, 1.0, 1.0], abs=1e-6)
    masked_ids = stand.rows(rollouts)[2]["completion_ids"]
    assert all(row["token_ids"][-6:] != masked_ids for row in batch)


async def test_a_masked_row_leaves_the_loss(stand: Stand) -> None:
    rollouts = await stand.sample()
    graded = stand.graded(rollouts, [0.0, 1.0, None, 2.0, 1.0, 1.0, 3.0, 3.0])
    plan = BatchPlan(reference=stand.policy)
    batch = await rollout_batch(stand.workspace, stand.policy, [rollouts], [graded], plan, step=0)
    request = StepRequest(
        parent=stand.policy, batch=batch, reference=stand.policy, loss=GRPOSpec().model_dump(),
        optimizer=OptimizerSpec(lr=1e-3),
    )  # fmt: skip
    record = await stand.workspace.connect().take_gradient_step(request, epoch=1)
    assert record.metrics["tokens"] == 7 * 6


async def test_a_grader_that_fails_on_one_prompt_masks_only_that_prompt(stand: Stand) -> None:
    rollouts = await stand.sample()
    graded = await stand.grade(rollouts, "tests.fixtures.grading:even_share_of_most", max_masked_fraction=0.5)
    rows = stand.rows(graded)
    assert [row["status"] for row in rows] == ["masked"] * 4 + ["ok"] * 4
    assert all(row["reward"] is None and "no grade for the prompt 0" in row["reason"] for row in rows[:4])
    batch = await stand.batch(rollouts, graded)
    assert {row["group"] for row in batch} == {rows[4]["prompt_id"]} and len(batch) == 4


async def test_more_masked_than_allowed_fails_and_keeps_nothing_half_graded(stand: Stand) -> None:
    rollouts = await stand.sample()
    with pytest.raises(TooManyMasked, match=r"4 of 8 .*at most 49%.*no grade for the prompt 0.*max_masked_fraction"):
        await stand.grade(rollouts, "tests.fixtures.grading:even_share_of_most", max_masked_fraction=0.49)
    # a mended grader goes on from the rollouts that are there
    assert stand.rows(await stand.grade(rollouts, "tests.fixtures.grading:even_share"))[0]["status"] == "ok"


async def test_grades_of_other_rollouts_are_refused(stand: Stand) -> None:
    rollouts = await stand.sample()
    other = await stand.sample(step=1, shard={"rows": (1, 0)})
    graded = stand.graded(other, [1.0] * 8, step=1)
    with pytest.raises(BadSpec, match="do not match the rows of .*expected one grade per row"):
        await stand.batch(rollouts, graded)


async def test_two_models_of_one_stage_do_not_train_on_each_others_samples(stand: Stand) -> None:
    rollouts = await stand.sample()
    graded = await stand.grade(rollouts, "tests.fixtures.grading:even_share")
    await stand.batch(rollouts, graded)
    assert await stand.sample() == rollouts
    stand.policy = stand.policy.model_copy(update={"model": "other"})
    for again in (stand.sample(), stand.batch(rollouts, graded)):
        with pytest.raises(ArtifactConflict, match="not from policy:run/.*/other@0"):
            await again


async def test_a_step_without_one_gradable_completion_is_refused(stand: Stand) -> None:
    rollouts = await stand.sample()
    with pytest.raises(BadSpec, match="no gradable completion: all 8 sampled completions"):
        await stand.batch(rollouts, stand.graded(rollouts, [None] * 8))


# -- odd groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6])
@pytest.mark.parametrize("estimator", ["group", "group_sample_std", "centred", "leave_one_out"])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(estimator: Any, reward: float) -> None:
    prompts = pa.array(["a"] * 7 + ["b"] + ["c"] * 3)
    advantages = group_advantages(prompts, [reward] * 7 + [reward + 1] + [5.0, None, None], estimator)
    assert advantages.dtype == np.float32
    assert advantages[:9].tolist() == [0.0] * 9 and np.isnan(advantages[9:]).all()


def test_a_group_is_one_wherever_in_the_step_its_members_are() -> None:
    prompts = pa.array(["a", "b", "a", "c", "b", "a"])
    # of a: 0, 3, 6, mean 3; of b: 1, 2, mean 1.5; c is alone
    assert group_advantages(prompts, [0.0, 1.0, 3.0, 9.0, 2.0, 6.0], "centred").tolist() == [-3, -0.5, 0, 0, 0.5, 3]


async def test_equal_rewards_move_no_weight(stand: Stand) -> None:
    rollouts = await stand.sample()
    graded = await stand.grade(rollouts, "tests.fixtures.grading:constant")
    plan = BatchPlan(reference=None)
    batch = await rollout_batch(stand.workspace, stand.policy, [rollouts], [graded], plan, step=0)
    assert advantages(stand.rows(batch)) == [0.0] * 8
    request = StepRequest(
        parent=stand.policy, batch=batch, loss=GRPOSpec(kl_beta=0.0).model_dump(), optimizer=OptimizerSpec(lr=1e-3)
    )
    record = await stand.workspace.connect().take_gradient_step(request, epoch=1)
    assert record.metrics["loss"] == 0.0 and record.metrics["grad_norm"] == 0.0
    assert list(Chain.of(stand.store, stand.policy).steps()) == [1]


async def test_an_empty_completion_is_graded_and_left_out_of_the_batch(stand: Stand) -> None:
    rollouts = await stand.sample()
    rows = stand.rows(rollouts)
    rows[1] |= {"completion_ids": [], "logprobs": [], "text": ""}
    emptied = commit_table(
        stand.store, keys.step_artifact("run", STAGE, 1, "rollouts", 0),
        pa.Table.from_pylist(rows, schema=SCHEMAS["rollouts"]), kind="rollouts",
        provenance=stand.workspace.provenance,
    )  # fmt: skip
    graded = await stand.grade(emptied, "tests.fixtures.grading:even_share", step=1)
    grades = stand.rows(graded)
    assert grades[1]["status"] == "ok" and grades[1]["reward"] == 0.0
    batch = await stand.batch(emptied, graded, step=1)
    assert [row["completion"] for row in batch] == [0, 2, 3, 0, 1, 2, 3]
    # the empty answer counts in its group's mean
    rewards = [row["reward"] for row in grades[:4]]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    expected = [(r - mean) / std for i, r in enumerate(rewards) if i != 1]
    assert advantages(batch)[:3] == pytest.approx(expected, abs=1e-5)


async def test_old_logprobs_are_the_policys_own(stand: Stand) -> None:
    rollouts = await stand.sample(min_new_tokens=0)
    batch = await stand.batch(rollouts, stand.graded(rollouts, [0.0, 1.0] * 4))
    row = batch[0]
    length = len(row["old_logprobs"])
    assert row["old_logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-4)
    weights = [0.0] * (len(row["token_ids"]) - length) + [1.0] * length
    assert row["weights"] == weights
    request = LogprobsRequest(stand.policy, [TokenSequence(row["token_ids"], weights)])
    (alone,) = await stand.workspace.connect().logprobs(request, epoch=1)
    assert row["old_logprobs"] == pytest.approx(alone, abs=1e-4)
    assert row["reference_logprobs"] == row["old_logprobs"]  # at step 0 the policy is the reference


# -- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", ["error", "left", "right", "drop"])
async def test_a_prompt_that_is_too_long(stand: Stand, truncation: str) -> None:
    whole = {row["prompt_index"]: row["prompt_ids"] for row in stand.rows(await stand.sample(shard={"rows": (0, 2)}))}
    limit = len(whole[0])
    assert len(whole[2]) == limit + 39
    shard = {"rows": (0, 2), "max_prompt_tokens": limit, "truncation": truncation}
    if truncation == "error":
        said = rf"\(row 3 of .*prompts\.jsonl\) has {limit + 39} tokens, at most {limit}.*left, right"
        with pytest.raises(SampleTooLong, match=said):
            await stand.sample(step=1, shard=shard)
        return
    ref = await stand.sample(step=1, shard=shard)
    rows = stand.rows(ref)
    assert [row["prompt_ids"] for row in rows[:4]] == [whole[0]] * 4  # at the limit is not over it
    extra = read_manifest(stand.store, ref.key).extra
    assert extra["prompts"] == 2
    if truncation == "drop":
        assert {row["prompt_index"] for row in rows} == {0} and extra["dropped"] == 1
        return
    cut = whole[2][-limit:] if truncation == "left" else whole[2][:limit]
    assert [row["prompt_ids"] for row in rows[4:]] == [cut] * 4 and extra["dropped"] == 0


async def test_a_prompt_that_comes_twice_in_a_step_is_sampled_anew(stand: Stand) -> None:
    again = await stand.sample(shard={"rows": (0, 1, 0), "repetitions": (0, 0, 1)})
    rows = stand.rows(again)
    assert [row["completion"] for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert len({row["seed"] for row in rows}) == 12
    assert [row["completion_ids"] for row in rows[:4]] != [row["completion_ids"] for row in rows[8:]]
    # the first time it is what it would have been without the second
    once = stand.rows(await stand.sample(step=0, shard={"index": 1, "rows": (0,)}))
    assert [row["seed"] for row in once] == [row["seed"] for row in rows[:4]]


@pytest.mark.parametrize("truncation", ["error", "left", "drop"])
async def test_without_a_limit_the_models_context_is_one(stand: Stand, truncation: str) -> None:
    longest = max(len(row["prompt_ids"]) for row in stand.rows(await stand.sample(shard={"rows": (0, 2)})))
    # the tiny model's context is 4,096 tokens: this leaves one less than the longest prompt needs
    room = {"max_new_tokens": 4096 - longest + 1, "min_new_tokens": 0, "stop_token_ids": tuple(range(259))}
    shard = {"rows": (0, 2), "truncation": truncation}
    if truncation == "error":
        with pytest.raises(SampleTooLong, match=rf"has {longest} tokens, at most {longest - 1} are allowed"):
            await stand.sample(step=1, shard=shard, **room)
        return
    lengths = {len(row["prompt_ids"]) for row in stand.rows(await stand.sample(step=1, shard=shard, **room))}
    assert (longest - 1 in lengths) is (truncation == "left")
    assert max(lengths) < longest


async def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused(stand: Stand) -> None:
    with pytest.raises(BadSpec, match=r"max_new_tokens=4096 leaves no room .* context of 4096"):
        await stand.sample(max_new_tokens=4096)
