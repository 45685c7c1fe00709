"""Samples of steps that are graded in part, and of episodes."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from storage.chain.records import Chain, Root
from storage.errors import ObjectNotFound
from storage.inspect.step_samples import missing_grade_hint, newest_sampled_step, step_samples
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from storage.store.schemas import table_schema
from storage.store.tables import commit_table

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
PROMPT: dict[str, Any] = {
    "prompt_index": 0, "prompt_id": "p", "completion": 0, "segment": 0, "first_turn": 0, "token_ids": [1, 2],
    "loss_mask": [False, True], "logprobs": [-1.0], "turn_tokens": [1], "stop_reasons": ["eos"], "thread": "{}",
    "policy_state": "0",
}  # fmt: skip
COMPLETION = PROMPT | {"seed": 0, "text": "an answer"}
EPISODE = PROMPT | {"graded_turns": [0], "grades": [0.5], "status": "ok", "ending": "environment", "reason": None}
GRADE = {"prompt_index": 0, "prompt_id": "p", "completion": 0, "status": "ok", "reason": "good", "reward": 1.0}


@pytest.fixture
def store() -> ObjectStore:
    store = open_store(f"memory://samples-{uuid4().hex}")
    Chain(store, "r", "0-grpo", "policy").create_root(Root(base_digest="0" * 64))
    return store


def commit(store: ObjectStore, step: int, kind: str, shard: int, row: dict[str, Any]) -> None:
    key = keys.step_artifact("r", "0-grpo", step - 1, kind, shard)
    table = pa.Table.from_pylist([row], schema=table_schema(kind, row))
    commit_table(store, key, table, kind=kind, parents=(), provenance=PROVENANCE)


def test_a_shard_that_is_not_graded_yet_hides_no_other(store: ObjectStore) -> None:
    commit(store, 1, "rollouts", 0, COMPLETION)
    with pytest.raises(ObjectNotFound, match="step 1 of r/0-grpo has no graded completions"):
        list(step_samples(store, "r", "0-grpo", 1))
    with pytest.raises(ObjectNotFound, match="the run 'r' has no graded samples in"):
        newest_sampled_step(store, "r")
    commit(store, 1, "rollouts", 1, COMPLETION | {"text": "another"})
    commit(store, 1, "graded", 1, GRADE)
    (sample,) = step_samples(store, "r", "0-grpo", 1)
    assert (sample.text, sample.reward, sample.reason) == ("another", 1.0, "good")
    assert newest_sampled_step(store, "r") == ("0-grpo", 1)


def test_episodes_are_graded_by_their_environment(store: ObjectStore) -> None:
    commit(store, 1, "rollouts", 0, EPISODE | {"graded_turns": [0, 1], "grades": [0.5, 0.25], "turn_tokens": [1, 1]})
    commit(store, 1, "rollouts", 1, EPISODE | {"grades": [], "graded_turns": [], "status": "ignored", "reason": "away"})
    played, ignored = step_samples(store, "r", "0-grpo", 1)
    assert (played.reward, played.text, ignored.reward, ignored.status) == (0.75, None, None, "ignored")
    hint = missing_grade_hint(store, "r", "0-grpo", 1)
    assert hint.startswith("The first reason: away. It is in ")
    assert "/rollouts/00001" in hint and "ostinato runs samples r --stage 0-grpo --step 1" in hint
