"""Tests of `rft`: what a round keeps, rounds from the base and from the last round, resumption and budgets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import flows.training.supervised_loop
from engine.protocol import SamplingParams
from engine.workspace import connect
from flows.configs.rejection import RFTConfig
from flows.rft import RFT, rft
from storage.chain.records import Chain, CommitRecord
from storage.inspect.accounting import check_accounting, step_inputs
from storage.inspect.audit import audit_store
from storage.store.artifacts import read_manifest
from storage.store.tables import read_table
from tasks.graders.spec import grader_spec
from tasks.plans import KeepRule
from tasks.sampling.selection import Candidate, NothingKept, keep_best
from tests.fixtures.runs.flow_runs import GRADED, FlowRuns
from tests.fixtures.runs.interruption import Interrupted, interrupt_at
from tests.fixtures.toy import toy_config

MODEL: Any = SimpleNamespace(sampling=SamplingParams())
ROUNDS = {
    "rounds": 2, "prompts_per_round": 5, "completions_per_sample": 4, "keep": "top", "keep_per_prompt": 1,
    "samples_per_batch": 3, "prompts_per_shard": 2,
}  # fmt: skip
"""Two rounds of two steps: each keeps one of four completions of five prompts."""


def candidates(*graded: tuple[float, str]) -> list[Candidate]:
    return [Candidate(reward, answer, (0, row)) for row, (reward, answer) in enumerate(graded)]


@pytest.mark.parametrize(
    ("kind", "per_prompt", "kept"),
    [
        ("top", 2, [1, 3]),  # of equal rewards, the first
        ("top", 9, [1, 3, 4, 0, 2]),
        ("threshold", 9, [1, 3, 4]),
        ("threshold", 1, [1]),
        ("distinct", 9, [1, 4]),
        ("distinct", 1, [1]),
    ],
)
def test_what_is_kept_of_a_prompt(kind: Any, per_prompt: int, kept: list[int]) -> None:
    graded = candidates((0.5, "a"), (1.0, "b"), (0.0, "c"), (1.0, "b"), (0.9, "d"))
    rule = KeepRule(kind=kind, per_prompt=per_prompt, min_reward=0.9)
    assert [candidate.place[1] for candidate in keep_best(graded, rule)] == kept


def test_options_are_checked_when_the_class_is_created() -> None:
    grader = grader_spec("tests.fixtures.grading:even_share")
    trainer = RFT([], MODEL, grader, rounds=2, epochs=3, lr=1e-4)
    assert [one_round.stage for one_round in trainer.rounds] == ["rft-1", "rft-2"]
    assert [one_round.epochs for one_round in trainer.rounds] == [3, 3]
    with pytest.raises(ValueError, match=r"rounds=2.5; give a whole number"):
        RFT([], MODEL, grader, rounds=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"RFT\(\) got an unexpected keyword argument 'round'; did you mean 'rounds'"):
        RFT([], MODEL, grader, round=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": {"patience": 2}}, "each round is a stage; give algorithm.rounds, or leave patience out"),
        ({"evaluation": {"every_steps": 2}}, "rft evaluates after each round; leave them out"),
        ({"sampling__temperature": 0}, "sampling.temperature=0 gives a prompt equal completions"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    tmp_path: Path, tiny_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        RFTConfig.model_validate(toy_config(tmp_path, tiny_folder, algorithm=ROUNDS, **changes))


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    defaults = GRADED | {"algorithm": ROUNDS}
    return FlowRuns(tmp_path, tiny_folder, rft, RFTConfig, stage="0-rft-1", defaults=defaults)


def rounds_of(runs: FlowRuns, run: str) -> list[list[CommitRecord]]:
    """The records of each round."""
    chains = [Chain(runs.store, run, stage, "policy") for stage in ("0-rft-1", "1-rft-2")]
    return [[chain.committed_record(step) for step in chain.steps()] for chain in chains]


def test_two_rounds_keep_the_best_and_name_their_rollouts(runs: FlowRuns) -> None:
    result = runs.run("rounds")
    first, second = rounds_of(runs, "rounds")
    assert (len(first), len(second)) == (2, 2) and runs.published(result).is_dir()
    root = Chain(runs.store, "rounds", "1-rft-2", "policy").root()
    assert root is not None and root.start == first[-1].policy
    for number, records in enumerate((first, second), start=1):
        (kept,) = step_inputs(runs.store, records[0]).datasets
        assert kept.key.startswith(f"datasets/rounds-round-{number}/")
        rows = read_table(runs.store, kept).to_pylist()
        assert len(rows) == 5
        for row in rows:
            thread, origin = json.loads(row["thread"]), json.loads(row["metadata"])["rollout"]
            table = f"runs/rounds/{origin['table']}"
            sampled = runs.rows(read_manifest(runs.store, table).ref)
            own = sampled[origin["row"]]
            assert thread["turns"][-1] == {"role": "assistant", "content": own["text"]}
            assert thread["weights"] is None  # its only answer is trained
            # it is the first with the highest reward of its prompt
            graded = runs.rows(read_manifest(runs.store, table.replace("/rollouts/", "/graded/")).ref)
            rewards = [grade["reward"] for grade in graded if grade["prompt_index"] == own["prompt_index"]]
            assert origin["reward"] == max(rewards) and rewards.index(max(rewards)) == own["completion"]
            # sampled from the policy of the round before
            assert own["policy_state"] == (root.start.state if number == 2 else first[0].request.parent.state)
        for record in records:
            assert check_accounting(runs.store, record) == []
    assert audit_store(runs.store).problems == ()
    # the prompts of the second round follow those of the first in the order of the dataset
    tokens = [record.request.used.tokens_sampled for record in (*first, *second) if record.request.used]
    assert tokens == [120, 120, 240, 240]


@pytest.mark.slow
@pytest.mark.parametrize("start_from", ["base", "last"])
def test_an_interrupted_second_round_ends_in_the_same_bytes(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch, start_from: str
) -> None:
    changes = {"algorithm": ROUNDS | {"start_from": start_from}}
    whole = runs.run("whole", **changes)
    first, second = rounds_of(runs, "whole")
    start = first[0].request.parent if start_from == "base" else first[-1].policy
    root = Chain(runs.store, "whole", "1-rft-2", "policy").root()
    assert root is not None and root.start == start
    # a budget of 120 tokens is used up when the first round has sampled: it ends with its first step
    connect.cache_clear()
    ended = runs.run("again", rules={"max_tokens_sampled": 120}, **changes)
    assert ended["ending"]["step"] == 1 and ended["policy"].startswith("policy:again/0-rft-1/policy@1#")
    # 121 tokens let the first round end, and are used up when the second has sampled
    connect.cache_clear()
    ended = runs.run("again", rules={"max_tokens_sampled": 121}, **changes)
    # a round that begins at the base is trained to its end, since its first steps are worse than the round before
    assert ended["policy"].startswith(f"policy:again/1-rft-2/policy@{1 if start_from == 'last' else 2}#")
    if start_from == "last":
        # without a budget, the run is interrupted at the next step of the second round
        connect.cache_clear()
        with monkeypatch.context() as patch:
            interrupt_at(patch, flows.training.supervised_loop, "take_gradient_step", step=1)
            with pytest.raises(Interrupted):
                runs.run("again", **changes)
        # a budget below what the second round has used ends it where it is, and not the round before
        connect.cache_clear()
        ended = runs.run("again", rules={"max_tokens_sampled": 120}, **changes)
        assert ended["policy"].startswith("policy:again/1-rft-2/policy@1#")
    connect.cache_clear()
    result = runs.run("again", **changes)
    assert [[record.state for record in records] for records in rounds_of(runs, "again")] == [
        [record.state for record in records] for records in (first, second)
    ]
    assert result["policy"].split("#")[1] == whole["policy"].split("#")[1]


def test_a_round_that_keeps_nothing_ends_the_run(runs: FlowRuns) -> None:
    strict = {"algorithm": ROUNDS | {"keep": "threshold", "min_reward": 2.0}}
    with pytest.raises(NothingKept, match=r"strict-round-1: none of 20 completions got a reward of at least 2"):
        runs.run("strict", **strict)


def test_a_later_round_that_keeps_nothing_publishes_the_round_before(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = flows.rft.keep_completions

    def keep_once(workspace: Any, name: str, *rest: Any) -> Any:
        if name.endswith("-round-2"):
            raise NothingKept("none of 20 completions")
        return keep(workspace, name, *rest)

    monkeypatch.setattr(flows.rft, "keep_completions", keep_once)
    result = runs.run("short")
    assert result["policy"].startswith("policy:short/0-rft-1/policy@2#") and runs.published(result).is_dir()
