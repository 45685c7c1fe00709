"""Tests of steps of many shards: read in order, a few at a time, scored in pieces, and measured from manifests."""

from __future__ import annotations

import math
import threading
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

import storage.store.tables
import tasks.batches.rl
from engine.errors import PermanentEngineError
from storage.chain.records import CommitRecord, Numerics, OptimizerSpec, PolicyRef, StepRequest
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, single_file_entry
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import AHEAD, RecentTables, commit_table, read_rows, read_table, read_tables, table_schema
from tasks.batches.advantages import RewardKL
from tasks.batches.rl import prepare_batch
from tasks.committed import commit_once
from tasks.plans import BatchPlan, ValuePlan
from tasks.reports.clock import NO_TIME, Lap
from tasks.reports.step_metrics import measure_step
from tasks.task_runs import work_of

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
POLICY = PolicyRef(run="r", stage="0-s", model="m", step=0, state="5" * 64)


@pytest.fixture
def store() -> ObjectStore:
    return open_store(f"memory://{uuid4().hex}")


def rollouts(store: ObjectStore, shard: int, prompts: list[str], *, first: int = 0, extra: Any = None) -> ArtifactRef:
    """Two completions of each prompt, of 1 and of 2 tokens."""
    rows = [
        {
            "prompt_index": 0, "prompt_id": prompt, "completion": first + n, "segment": 0, "first_turn": 0,
            "token_ids": [7, 8, 9] + [10 + n] * (n + 1), "loss_mask": [False] * 3 + [True] * (n + 1),
            "logprobs": [-1.0] * (n + 1), "turn_tokens": [n + 1], "stop_reasons": ["eos"], "seed": 0, "text": "",
            "thread": "{}", "policy_state": POLICY.state,
        }
        for prompt, n in product(prompts, range(2))
    ]  # fmt: skip
    return commit(store, "rollouts", shard, rows, parents=(POLICY.uri,), extra=extra)


def graded(store: ObjectStore, shard: int, of: ArtifactRef, rewards: list[float | None]) -> ArtifactRef:
    rows = [
        {name: row[name] for name in ("prompt_index", "prompt_id", "completion")}
        | {"reward": reward, "status": "masked" if reward is None else "ok", "reason": ""}
        for row, reward in zip(read_table(store, of).to_pylist(), rewards, strict=True)
    ]
    return commit(store, "graded", shard, rows, parents=(of.uri,))


def commit(store: ObjectStore, kind: str, shard: int, rows: list[dict[str, Any]], **fields: Any) -> ArtifactRef:
    key = keys.step_artifact(POLICY.run, POLICY.stage, POLICY.step, kind, shard)
    table = pa.Table.from_pylist(rows, schema=table_schema(kind, rows[0]))
    return commit_table(store, key, table, kind=kind, provenance=PROVENANCE, **fields)


class Scorer:
    """A workspace and an engine: the logprob of a token is minus its id; it counts the rows of each call."""

    provenance, epoch, max_tokens = PROVENANCE, 0, None

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.calls = store, list[int]()

    def open_store(self) -> ObjectStore:
        return self.store

    def connect(self) -> Scorer:
        return self

    async def logprobs_of_rows(self, request: Any, *, epoch: int) -> np.ndarray:
        logprobs, rows = list[float](), 0
        for part in request.tables:
            for row, taken in zip(read_table(self.store, part.table).to_pylist(), part.rows, strict=True):
                if taken:
                    rows += 1
                    logprobs += [-float(i) for i, t in zip(row["token_ids"], row["loss_mask"], strict=True) if t]
        self.calls.append(rows)
        return np.array(logprobs)


# -- reading -------------------------------------------------------------------------------------------------------


def test_tables_come_in_their_order_and_a_few_at_a_time(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [rollouts(store, shard, [f"p{shard}"]) for shard in range(2 * AHEAD + 3)]
    lock, begun, most = threading.Lock(), 0, 0
    taken = 0

    def counting(*arguments: Any) -> pa.Table:
        nonlocal begun, most
        with lock:
            begun += 1
            most = max(most, begun - taken)
        return read_table(*arguments)

    monkeypatch.setattr(storage.store.tables, "read_step_table", counting)
    first_prompts = []
    for table in read_tables(store, refs, ["prompt_id"]):
        first_prompts.append(table["prompt_id"][0].as_py())
        taken += 1
    assert first_prompts == [f"p{shard}" for shard in range(2 * AHEAD + 3)]
    assert begun == len(refs) and most <= AHEAD + 1  # one may begin between the yield and the count


def test_a_missing_shard_is_an_error_where_it_is_missing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [rollouts(store, shard, ["p"]) for shard in range(3)]
    # as in another process, which has not committed them
    monkeypatch.setattr(storage.store.tables, "RECENT", RecentTables())
    store.delete(keys.manifest(refs[1].key))
    tables = read_tables(store, refs)
    assert next(tables).num_rows == 2
    with pytest.raises(ObjectNotFound, match="00001"):
        next(tables)


def test_the_rows_of_a_remote_table_are_fetched_once(store: ObjectStore) -> None:
    ref = rollouts(store, 0, ["a", "b"])
    assert [row["prompt_id"] for row in read_rows(store, ref, [3, 0])] == ["b", "a"]
    store.delete(keys.manifest(ref.key))  # from here on only the copy can answer
    assert [row["prompt_id"] for row in read_rows(store, ref, [1, 2])] == ["a", "b"]


def test_a_copy_of_a_damaged_table_is_refused(store: ObjectStore) -> None:
    ref = rollouts(store, 0, ["a"])
    store.put(single_file_entry(store, ref).key, b"other bytes")
    with pytest.raises(CorruptArtifact, match="sha256"):
        read_rows(store, ref, [0])


def test_a_local_table_is_read_in_place(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    ref = rollouts(store, 0, ["a"])
    assert read_rows(store, ref, [1])[0]["token_ids"] == [7, 8, 9, 11, 11]


async def test_looking_for_a_table_that_is_not_committed_is_one_request(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get, key, ref = store.get, keys.step_artifact(POLICY.run, POLICY.stage, 0, "batch", 0), rollouts(store, 0, ["a"])
    monkeypatch.setattr(store, "get", lambda key: asked.append(key) or get(key))  # type: ignore[func-returns-value]

    async def build() -> ArtifactRef:
        return ref

    assert await commit_once(Scorer(store), key, build) == ref  # type: ignore[arg-type]
    assert asked == [keys.manifest(key)]


# -- the batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "calls"), [(1 << 20, [5, 5]), (1, [2, 2, 2, 2, 1, 1])])
async def test_a_batch_is_the_same_however_it_is_cut(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tokens: int, calls: list[int]
) -> None:
    monkeypatch.setattr(tasks.batches.rl, "CHUNK_TOKENS", tokens)
    # prompt a comes twice in the step, and the second time in another shard: one group of four
    refs = [rollouts(store, 0, ["a"]), rollouts(store, 1, ["b"]), rollouts(store, 2, ["a"], first=2)]
    rewards: list[list[float | None]] = [[0.0, 1.0], [3.0, 5.0], [5.0, None]]
    grades = [graded(store, n, ref, given) for n, (ref, given) in enumerate(zip(refs, rewards, strict=True))]
    scorer = Scorer(store)
    plan = BatchPlan(reference=POLICY, advantage_estimator="centred")
    batch = await work_of(prepare_batch)(scorer, POLICY, refs, grades, plan, step=0)  # type: ignore[arg-type]
    rows = read_table(store, batch).to_pylist()
    # of a: 0, 1, 5 with mean 2; of b: 3, 5 with mean 4
    assert [(row["group"], row["completion"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2)]
    assert [row["advantages"] for row in rows] == [[-2.0], [-1.0, -1.0], [-1.0], [1.0, 1.0], [3.0]]
    assert [row["token_ids"] for row in rows[:2]] == [[7, 8, 9, 10], [7, 8, 9, 11, 11]]
    assert [row["loss_mask"] for row in rows[:2]] == [[0, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert [row["old_logprobs"] for row in rows[:2]] == [[-10.0], [-11.0, -11.0]]
    assert [row["reference_logprobs"] for row in rows] == [row["old_logprobs"] for row in rows]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 3.0, 5.0, 5.0]
    assert scorer.calls == calls


def one_episode(store: ObjectStore) -> ArtifactRef:
    """A table of one trajectory with one graded turn of two tokens."""
    row = {
        "prompt_index": 0, "prompt_id": "a", "completion": 0, "segment": 0, "token_ids": [7, 8, 9],
        "loss_mask": [False, True, True], "logprobs": [-1.0, -1.0], "first_turn": 0, "turn_tokens": [2],
        "stop_reasons": ["eos"], "graded_turns": [0], "grades": [1.0], "status": "ok", "ending": "environment",
        "thread": "{}", "policy_state": POLICY.state,
    }  # fmt: skip
    return commit(store, "rollouts", 0, [row], parents=(POLICY.uri,))


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "env_grpo", "env_ppo"])
async def test_a_policy_whose_weights_overflowed_is_named(store: ObjectStore, algorithm: str, logprob: float) -> None:
    class Overflowed(Scorer):
        async def logprobs_of_rows(self, request: Any, *, epoch: int) -> np.ndarray:
            return np.full_like(await super().logprobs_of_rows(request, epoch=epoch), logprob)

    workspace: Any = Overflowed(store)
    plan, values = BatchPlan(reference=None), ValuePlan(value=POLICY)
    message = r"step 3: policy:r/0-s/m@0.* gives NaN or infinity for the logprobs .*Lower optimizer.lr"
    with pytest.raises(PermanentEngineError, match=message):
        if algorithm.startswith("env_"):
            refs = grades = [one_episode(store)]
        else:
            refs = [rollouts(store, 0, ["a"])]
            grades = [graded(store, 0, refs[0], [0.0, 1.0])]
        critic = values if algorithm.endswith("ppo") else None
        await work_of(prepare_batch)(workspace, POLICY, refs, grades, plan, critic, step=2)


@pytest.mark.parametrize("old_logprobs", ["sampler", "forward"])
async def test_without_trainer_logprobs_the_engine_is_not_asked(store: ObjectStore, old_logprobs: Any) -> None:
    ref = rollouts(store, 0, ["a"])
    scorer = Scorer(store)
    plan = BatchPlan(reference=None, old_logprobs=old_logprobs)
    batch = await work_of(prepare_batch)(scorer, POLICY, [ref], [graded(store, 0, ref, [0.0, 1.0])], plan, step=0)  # type: ignore[arg-type]
    row = read_table(store, batch).to_pylist()[0]
    assert scorer.calls == [] and row["old_logprobs"] is None and row["sampler_logprobs"] == [-1.0]


def test_a_penalty_on_the_reward_needs_the_old_logprobs_before_the_step() -> None:
    with pytest.raises(ValidationError, match="reward_kl needs the old logprobs before the step"):
        BatchPlan(reference=POLICY, reward_kl=RewardKL(beta=0.1), old_logprobs="forward")


# -- the metrics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hand_written", [False, True])
async def test_metrics_are_the_same_from_manifests_and_from_tables(store: ObjectStore, hand_written: bool) -> None:
    extra = {"dropped": 1, "prompts": 3, "completion_tokens": 6, "truncated": 1, "logprob_sum": -1.5}
    refs = [rollouts(store, n, [f"a{n}", f"b{n}"], extra=extra) for n in range(2)]
    grades = [graded(store, n, ref, [0.0, 1.0, None, 3.0]) for n, ref in enumerate(refs)]
    scorer = Scorer(store)
    batch = await work_of(prepare_batch)(scorer, POLICY, refs, grades, BatchPlan(reference=None), step=0)  # type: ignore[arg-type]
    if hand_written:  # the manifest of such a batch has no counts
        table = read_table(store, batch)
        batch = commit(store, "batch", 1, table.to_pylist())
    request = StepRequest(parent=POLICY, batch=batch, loss={"kind": "grpo"}, optimizer=OptimizerSpec(lr=1.0))
    numerics = Numerics(backend="x", device="x", compute_dtype="x", threads=1, max_tokens=1)
    record = CommitRecord(request=request, state=request.next_state(), updates=1, numerics=numerics, weights_digest="0")
    lap = Lap({"rollout": 2.0}, {"rollout": [(0.0, 2.0)]})
    metrics = measure_step(store, record, refs, grades, total_steps=1, lap=lap)
    assert (metrics.completions, metrics.completion_tokens, metrics.completion_length_mean) == (8, 12, 1.5)
    assert (metrics.prompts, metrics.masked, metrics.dropped, metrics.tokens_per_second) == (4, 2, 2, 6.0)
    assert metrics.reward_mean == pytest.approx(4 / 3)
    assert metrics.reward_std == pytest.approx(np.std([0.0, 1.0, 3.0]))
    # two of eight completions were cut; the logprobs of 12 tokens add up to -3
    assert (metrics.truncated, metrics.entropy, metrics.turns_mean) == (0.25, 0.25, None)
    # of the eight completions, each prompt's two: 0 and 1, none and 3; only the first group has two rewards
    assert metrics.equal_groups == 0.0
    # trained tokens of each shard: one 10 (gap 9) and two pairs of 11 (gap 10): (9 + 4 x 10) / 5
    assert metrics.logprob_gap == pytest.approx(9.8)
    # the gap of the step's own forward pass, where the record has it
    record = record.model_copy(update={"metrics": {"logprob_gap_mean": 0.5}})
    assert measure_step(store, record, refs, grades, total_steps=1, lap=NO_TIME).logprob_gap == 0.5


def test_the_lag_of_a_step_counts_every_sampled_token(store: ObjectStore) -> None:
    """A step after policy 5 with 3 tokens of policy 5 and 6 tokens of policy 3: (3 · 0 + 6 · 2) / 9 steps."""
    refs = []
    for shard, (policy, tokens) in enumerate([(5, 3), (3, 6)]):
        rows = read_table(store, rollouts(store, 10 + shard, ["p"])).to_pylist()
        extra = {"prompts": 1, "dropped": 0, "completion_tokens": tokens}
        uri = POLICY.model_copy(update={"step": policy}).uri
        refs.append(commit(store, "rollouts", shard, rows, parents=(uri,), extra=extra))
    for step, rules, expected in ((5, {"max_staleness": 2}, (4 / 3, 2)), (6, {}, (None, None))):
        metrics = measure_step(store, record_after(store, step, rules), refs, [], total_steps=9, lap=NO_TIME)
        assert (metrics.lag_mean, metrics.lag_max) == expected
        assert ("lag_mean" in metrics.model_dump()) == bool(rules)


def test_the_lag_of_tokens_of_several_policies_counts_each_token(store: ObjectStore) -> None:
    """A step after policy 5 with 2 tokens of policy 5 and 4 tokens of policy 4: (2 · 0 + 4 · 1) / 6 steps."""
    rows = read_table(store, rollouts(store, 10, ["p"])).to_pylist()
    oldest, middle, newest = (POLICY.model_copy(update={"step": step}).uri for step in (3, 4, 5))
    extra = {"prompts": 1, "dropped": 0, "completion_tokens": 6, "policies": {middle: 4, newest: 2}}
    ref = commit(store, "rollouts", 0, rows, parents=(oldest, middle, newest), extra=extra)
    rules = {"max_staleness": 2, "weight_updates": "in_flight"}
    metrics = measure_step(store, record_after(store, 5, rules), [ref], [], total_steps=9, lap=NO_TIME)
    assert (metrics.lag_mean, metrics.lag_max) == (2 / 3, 1)


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        # (1 + 3 + 0)² / (3 · (1 + 9)) = 16 / 30
        ({"effective_weight_mean": 4 / 3, "effective_weight_square_mean": 10 / 3}, 16 / 30),
        ({"effective_weight_mean": 0.7, "effective_weight_square_mean": 0.49}, 1.0),
        # every token is masked
        ({"effective_weight_mean": 0.0, "effective_weight_square_mean": 0.0}, 0.0),
        ({}, None),
    ],
)
def test_the_effective_sample_size_is_that_of_kish(
    store: ObjectStore, weights: dict[str, float], size: float | None
) -> None:
    record = record_after(store, 0, {}).model_copy(update={"metrics": weights | {"masked_fraction_mean": 0.25}})
    metrics = measure_step(store, record, [], [], total_steps=1, lap=NO_TIME)
    assert metrics.effective_sample_size == (None if size is None else pytest.approx(size))
    assert metrics.masked_token_fraction == 0.25


def record_after(store: ObjectStore, step: int, rules: dict[str, Any]) -> CommitRecord:
    """A step after the policy of that number, on a batch with these rules."""
    extra = {"prompts": 1, "logprob_gap": None} | ({"rules": rules} if rules else {})
    rows = [{"group": "p", "completion": 0, "segment": 0, "token_ids": [1, 2], "loss_mask": [False, True]}]
    batch = commit(store, "batch", step, rows, extra=extra)
    parent = POLICY.model_copy(update={"step": step})
    request = StepRequest(parent=parent, batch=batch, loss={"kind": "grpo"}, optimizer=OptimizerSpec(lr=1.0))
    numerics = Numerics(backend="x", device="x", compute_dtype="x", threads=1, max_tokens=1)
    return CommitRecord(request=request, state=request.next_state(), updates=1, numerics=numerics, weights_digest="0")
