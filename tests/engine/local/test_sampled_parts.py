"""Verification scores the tokens that were sampled in flight under the policies that they name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.local.redo import PolicyRebuilder, clean_backend
from engine.local.sampled_parts import SampledParts
from engine.local.verify import verify_run
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.records import Chain
from storage.inspect.accounting import step_inputs
from storage.inspect.audit import audit_store
from storage.inspect.findings import Findings
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tests.fixtures.toy import toy_config

STEPS, COMPLETIONS, LENGTH, FIRST = 4, 16, 32, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str) -> ObjectStore:
    """A finished run of the toy task whose weights were updated in flight."""
    folder = tmp_path_factory.mktemp("in-flight")
    config = toy_config(
        folder, tiny_folder, run="toy", grader__path="tests.fixtures.grading:even_share",
        sampling={"max_new_tokens": LENGTH, "min_new_tokens": FIRST, "ignore_eos": True}, optimizer__lr=0.01,
        rules={"max_staleness": 1, "weight_updates": "in_flight", "segment_seconds": 0.02},
        engine__sampler={"kind": "torch", "own_lane": True},
    )  # fmt: skip
    asyncio.run(grpo(GRPOConfig.model_validate(config)))
    return open_store(folder / "data")


def chain_of(store: ObjectStore) -> Chain:
    return Chain(store, "toy", "0-grpo", "policy")


@pytest.mark.slow
def test_a_run_with_updates_in_flight_is_verified(store: ObjectStore) -> None:
    """All tokens but the first ones, whose ends of sequence the sampler masked."""
    for from_checkpoints in (False, True):
        report = verify_run(store, "toy", from_checkpoints=from_checkpoints)
        assert report.problems == []
        (chain,) = report.chains
        assert chain.sampled_tokens == STEPS * COMPLETIONS * (LENGTH - FIRST)
        assert any("sampled tokens were scored under the policies that they name" in note for note in chain.notes)
    assert audit_store(store).problems == ()


@pytest.mark.slow
def test_tokens_of_another_policy_than_they_name_are_a_problem(store: ObjectStore) -> None:
    """The tokens that name policy 0, scored by policy 1."""
    chain = chain_of(store)
    record = chain.committed_record(1)
    with clean_backend(record.numerics) as backend:
        rebuilder = PolicyRebuilder(store, backend)
        trainer = rebuilder.after_rebase(chain, None)
        found = Findings()
        SampledParts(chain, found).compare(trainer, chain.policy(0))
        assert not found.problems
        rebuilder.redo_step(trainer, record)
        SampledParts(chain, found).compare(trainer, chain.policy(0))
    assert found.problems and all("rounding explains 0.001" in problem.what for problem in found.problems)
    assert {problem.key for problem in found.problems} <= {
        ref.key for step in (1, 2) for ref in step_inputs(store, chain.committed_record(step)).rollouts
    }


@pytest.mark.slow
def test_the_parts_of_a_completion_are_all_of_its_tokens(store: ObjectStore) -> None:
    for record in chain_of(store).records(after=0, until=STEPS):
        for ref in step_inputs(store, record).rollouts:
            for row in read_table(store, ref).to_pylist():
                assert sum(row["policy_tokens"]) == len(row["logprobs"]) == LENGTH
