"""Weights that are updated in flight, also after `kill -9` when a segment has been committed: no committed token is
sampled again, and every step trains its prompts once, on tokens that are not too old."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from storage.inspect.accounting import check_accounting, step_inputs
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tests.e2e.test_kill_nine import SHARDS_PER_STEP, STEPS, Folder, make_folder
from tests.fixtures.runs.batch_workspace import sampled_ids

STALENESS, LENGTH = 2, 48
IN_FLIGHT: dict[str, Any] = {
    "rules__max_staleness": STALENESS,
    "rules__weight_updates": "in_flight",
    "rules__segment_seconds": 0.02,
    "sampling__max_new_tokens": LENGTH,
    "sampling__min_new_tokens": LENGTH,
    "engine__sampler": {"kind": "torch", "own_lane": True},
}


def segments_of(store: ObjectStore, step: int, shard: int) -> list[ArtifactRef]:
    segments: list[ArtifactRef] = []
    while (ref := find_artifact(store, keys.segment("kill", "0-grpo", step, shard, len(segments)))) is not None:
        segments.append(ref)
    return segments


def check_run(folder: Folder) -> int:
    """Checks all steps of a finished run. Returns the number of completions with tokens of several policies."""
    chain, mixed = folder.chain(), 0
    states = folder.states()
    for record in chain.records(after=0, until=STEPS):
        step = record.request.parent.step
        assert check_accounting(chain.store, record) == []
        allowed = states[max(0, step - STALENESS) : step + 1]
        for shard, ref in enumerate(step_inputs(chain.store, record).rollouts):
            rows = read_table(chain.store, ref).to_pylist()
            counts = {uri: 0 for uri in read_manifest(chain.store, ref.key).extra["policies"]}  # type: ignore[union-attr]
            for row in rows:
                assert len(sampled_ids(row)) == len(row["logprobs"]) == sum(row["policy_tokens"]) == LENGTH
                assert set(row["policy_states"]) <= set(allowed) and row["policy_state"] == row["policy_states"][0]
                mixed += len(set(row["policy_states"])) > 1
                for state, tokens in zip(row["policy_states"], row["policy_tokens"], strict=True):
                    counts[chain.policy(states.index(state)).uri] += tokens
            assert counts == read_manifest(chain.store, ref.key).extra["policies"]
            # The completions are their committed segments, and what was sampled after the last one.
            committed: list[list[int]] = [[] for _ in rows]
            for segment in segments_of(chain.store, step, shard):
                for part in read_table(chain.store, segment).to_pylist():
                    committed[part["index"]] += part["token_ids"]
            for row, tokens in zip(rows, committed, strict=True):
                assert sampled_ids(row)[: len(tokens)] == tokens
    return mixed


@pytest.mark.slow
def test_tokens_of_several_policies_are_trained(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server, **IN_FLIGHT)
    status, output = folder.run()
    assert status == 0, output
    check_run(folder)
    assert folder.events("segment")
    assert len(folder.events("shard")) == STEPS * SHARDS_PER_STEP


@pytest.mark.slow
@pytest.mark.parametrize("place", ["segment.committed:2", "segment.committed:7", "publish.loaded:2"])
def test_a_kill_loses_no_committed_segment(
    place: str, tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server, **IN_FLIGHT)
    status, output = folder.run(place)
    assert status == -signal.SIGKILL, f"{place} was not hit:\n{output}"
    before = {}
    for step in range(STEPS):
        for shard in range(SHARDS_PER_STEP):
            for ref in segments_of(folder.chain().store, step, shard):
                before[ref.key] = ref
    assert before
    status, output = folder.run()
    assert status == 0, output
    check_run(folder)
    for key, ref in before.items():
        assert find_artifact(folder.chain().store, key) == ref
    # Each committed segment was sampled once.
    events = [(event["step"], event["shard"], event["number"]) for event in folder.events("segment")]
    assert len(events) == len(set(events))
    assert len(folder.events("shard")) <= STEPS * SHARDS_PER_STEP + 1
