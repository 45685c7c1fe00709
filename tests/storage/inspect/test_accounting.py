"""The accounting of a step reports what is wrong with its episodes, and nothing that only follows from it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pyarrow as pa

from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, Root, StepRequest
from storage.inspect import accounting
from storage.inspect.accounting import check_accounting
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.schemas import table_schema
from storage.store.tables import commit_table

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
NUMERICS = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)


def segment(index: int, policy_state: str) -> dict[str, Any]:
    """The only segment of the episode number `index` of the prompt `p`, with one graded turn of one token."""
    return {
        "prompt_index": 0, "prompt_id": "p", "completion": index, "segment": 0, "token_ids": [1, 2],
        "loss_mask": [False, True], "logprobs": [-1.0], "first_turn": 0, "turn_tokens": [1], "stop_reasons": ["eos"],
        "graded_turns": [0], "grades": [1.0], "status": "ok", "ending": "environment", "thread": "{}",
        "policy_state": policy_state,
    }  # fmt: skip


def test_a_second_sampling_of_prompts_that_have_grades_is_a_problem() -> None:
    """Two shards of one prompt with a completion each. The second one says that it was sampled again."""
    for first_status, problems in (("ignored", 0), ("ok", 1)):
        store = open_store(f"memory://accounting-{uuid4().hex}")
        chain = Chain(store, "r", "0-grpo", "policy")
        chain.create_root(Root(base_digest="0" * 64))
        parent, rows, parents = chain.policy(0), [], [chain.policy(0).uri]
        for shard, status in enumerate((first_status, "ok")):
            rollout = {
                "prompt_index": 0, "prompt_id": "p", "completion": shard, "segment": 0, "first_turn": 0,
                "token_ids": [1, 2], "loss_mask": [False, True], "logprobs": [-1.0], "turn_tokens": [1],
                "stop_reasons": ["eos"], "seed": shard, "text": "a", "thread": "{}", "policy_state": parent.state,
            }  # fmt: skip
            rollouts = commit_table(
                store, keys.step_artifact("r", "0-grpo", 0, "rollouts", shard), table_of([rollout], "rollouts"),
                kind="rollouts", parents=[parent.uri], provenance=PROVENANCE,
                extra={"prompts": 1, "dropped": 0, **({"resampled": True} if shard else {})},
            )  # fmt: skip
            grade = {
                "prompt_index": 0, "prompt_id": "p", "completion": shard, "status": status, "reason": "",
                "reward": 1.0 if status == "ok" else None,
            }  # fmt: skip
            graded = commit_table(
                store, keys.step_artifact("r", "0-grpo", 0, "graded", shard), table_of([grade], "graded"),
                kind="graded", parents=[rollouts.uri], provenance=PROVENANCE,
            )  # fmt: skip
            parents += [rollouts.uri, graded.uri]
            if status == "ok":
                rows.append({"group": "p", "completion": shard, "token_ids": [1, 2], "loss_mask": [False, True]})
        batch = commit_table(
            store, keys.step_artifact("r", "0-grpo", 0, "batch", 0), table_of(rows, "batch"), kind="batch",
            parents=parents, provenance=PROVENANCE,
        )  # fmt: skip
        request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
        record = CommitRecord(
            request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0"
        )
        found = check_accounting(store, record)
        assert len(found) == problems
        assert all("samples prompts again although their completions have grades" in problem for problem in found)


def table_of(rows: list[dict[str, Any]], kind: str) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=table_schema(kind, rows[0]))


def test_a_shard_of_another_policy_is_one_problem() -> None:
    store = open_store(f"memory://accounting-{uuid4().hex}")
    chain = Chain(store, "r", "0-env_grpo", "policy")
    chain.create_root(Root(base_digest="0" * 64))
    parent = chain.policy(0)
    # three episodes, all in the batch; the first was sampled by another policy
    segments = [segment(index, "another state" if index == 0 else parent.state) for index in range(3)]
    shard = commit_table(
        store, keys.step_artifact("r", "0-env_grpo", 0, "rollouts", 0),
        table_of(segments, "rollouts"), kind="rollouts", parents=[parent.uri], provenance=PROVENANCE,
        extra={"prompts": 1},
    )  # fmt: skip
    rows = [{"group": "p", "completion": index, "token_ids": [1, 2], "loss_mask": [False, True]} for index in range(3)]
    batch = commit_table(
        store, keys.step_artifact("r", "0-env_grpo", 0, "batch", 0), table_of(rows, "batch"), kind="batch",
        parents=[parent.uri, shard], provenance=PROVENANCE,
    )  # fmt: skip
    request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
    record = CommitRecord(request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0")
    assert check_accounting(store, record) == [
        f"{shard.key} was sampled by another policy than the one that the step says"
    ]


def test_the_parts_of_a_completion_are_of_allowed_policies_in_their_order() -> None:
    """States 1 and 2 may have sampled. The row has a completion of three tokens."""
    cases = [
        (["1"], [3], True), (["1", "2"], [1, 2], True), (["1", "1", "2"], [1, 1, 1], True),
        (["2", "1"], [1, 2], False), (["0", "1"], [1, 2], False), (["1", "2"], [1, 1], False),
    ]  # fmt: skip
    for states, tokens, is_allowed in cases:
        row = {"policy_state": states[0], "policy_states": states, "policy_tokens": tokens, "turn_tokens": [3]}
        assert accounting._is_sampled_by(row, ["1", "2"]) == is_allowed
    assert accounting._is_sampled_by({"policy_state": "2"}, ["1", "2"])
    assert not accounting._is_sampled_by({"policy_state": "3"}, ["1", "2"])
