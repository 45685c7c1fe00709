"""Verification scores the tokens that were sampled in flight under the policies that they name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from engine.local.redo import PolicyRebuilder, clean_backend
from engine.local.replay_rollouts import replay_rollouts
from engine.local.sampled_parts import SampledParts
from engine.local.verify import verify_run
from flows.cli.main import app
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
    return run_in_flight(tmp_path_factory.mktemp("in-flight"), tiny_folder)


@pytest.fixture(scope="module")
def deterministic_store(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str
) -> ObjectStore:
    """The same with `deterministic`, whose calls are not joined into batches."""
    return run_in_flight(tmp_path_factory.mktemp("deterministic"), tiny_folder, engine__deterministic=True)


def run_in_flight(folder: Path, tiny_folder: Path, **changes: Any) -> ObjectStore:
    config = toy_config(
        folder, tiny_folder, run="toy", grader__path="tests.fixtures.grading:even_share",
        sampling={"max_new_tokens": LENGTH, "min_new_tokens": FIRST, "ignore_eos": True}, optimizer__lr=0.01,
        rules={"max_staleness": 1, "weight_updates": "in_flight", "segment_seconds": 0.02},
        engine__sampler={"kind": "torch", "own_lane": True}, **changes,
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
    assert found.problems and all("rounding explains 0.00" in problem.what for problem in found.problems)
    assert {problem.key for problem in found.problems} <= {
        ref.key for step in (1, 2) for ref in step_inputs(store, chain.committed_record(step)).rollouts
    }


@pytest.mark.slow
def test_the_parts_of_a_completion_are_all_of_its_tokens(store: ObjectStore) -> None:
    for record in chain_of(store).records(after=0, until=STEPS):
        for ref in step_inputs(store, record).rollouts:
            for row in read_table(store, ref).to_pylist():
                assert sum(row["policy_tokens"]) == len(row["logprobs"]) == LENGTH


@pytest.mark.slow
def test_completions_with_cuts_are_sampled_again(deterministic_store: ObjectStore) -> None:
    """Each call is repeated with its policies and cuts, which makes the tokens equal."""
    chain, cuts = chain_of(deterministic_store), 0
    for step in range(1, STEPS + 1):
        report = replay_rollouts(chain, step)
        assert report.equal and report.different_completions == 0
        assert (report.completions, report.tokens) == (COMPLETIONS, COMPLETIONS * LENGTH)
        assert report.gap_max == 0
        cuts += report.cuts
    assert cuts > 0


@pytest.mark.slow
def test_a_changed_token_is_found(deterministic_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_changed(*arguments: Any) -> pa.Table:
        table = read_table(*arguments)
        if "policy_tokens" not in table.column_names:
            return table
        rows = table.to_pylist()
        rows[0]["token_ids"][-1] += 1
        return pa.Table.from_pylist(rows, table.schema)

    monkeypatch.setattr("engine.local.replay_rollouts.read_table", read_changed)
    report = replay_rollouts(chain_of(deterministic_store), 2)
    assert not report.equal and report.different_tokens >= 1


@pytest.mark.slow
def test_the_command_says_that_the_tokens_are_equal(deterministic_store: ObjectStore) -> None:
    words = ["replay", "toy", "--step", "3", "--rollouts", "--storage", deterministic_store.url]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "equal tokens" in result.output, result.output
    refused = CliRunner().invoke(app, [*words, "--lr", "0.1"])
    assert refused.exit_code == 2 and "--rollouts" in refused.output
