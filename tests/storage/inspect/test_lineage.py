"""Lineage leads from a model to its prompts, and from a prompt to everything that was trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.chain.deletion import delete_runs
from storage.chain.fork import fork_run
from storage.chain.records import Chain, Root
from storage.chain.run_record import create_or_check_run
from storage.errors import ObjectNotFound
from storage.inspect.accounting import step_inputs
from storage.inspect.lineage import lineage_of, runs_by_dataset, step_lineage, training_datasets
from storage.inspect.prompt_lineage import prompt_report
from storage.registry.decisions import commit_decision
from storage.registry.models import find_model, registered_key
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.index import record_run
from storage.store.objects import open_store
from storage.store.tables import read_table
from tests.fixtures.runs.toy_run import ToyRun


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def version(toy: ToyRun) -> str:
    return str(json.loads(toy.store.get("runs/toy/result.json"))["model"])


def sampled_ids(toy: ToyRun, step: int) -> list[str]:
    """Returns the prompt id of each completion of a step, read from its tables."""
    record = toy.chain.record(step)
    assert record is not None
    prompt_ids: list[str] = []
    for ref in step_inputs(toy.store, record).rollouts:
        prompt_ids += read_table(toy.store, ref, ["prompt_id"])["prompt_id"].to_pylist()
    return prompt_ids


def test_a_model_a_policy_and_a_run_have_one_lineage(toy: ToyRun) -> None:
    head = toy.chain.policy(4)
    for target in ("toy", version(toy), "toy/0-grpo/policy@4", head.uri):
        lineage = lineage_of(toy.store, target)
        assert lineage.policy == head
        assert [(s.title, s.until) for s in lineage.segments] == [("toy/0-grpo/policy", 4)]
        assert lineage.base is not None
        assert lineage.base.startswith("tiny@")
    assert lineage_of(toy.store, "toy").target == f"model {version(toy)}"
    assert lineage_of(toy.store, "toy/0-grpo/policy@2").segments[0].until == 2


def test_an_alias_has_the_lineage_of_its_version(toy: ToyRun) -> None:
    name, _, number = version(toy).partition("@")
    provenance = Provenance(code_version="test", config_digest="0" * 64, seed=0)
    commit_decision(
        toy.store, name, number, "promote", over=None, reasons=["a start"], who="ada", provenance=provenance
    )  # fmt: skip
    assert lineage_of(toy.store, f"{name}@champion") == lineage_of(toy.store, version(toy))
    with pytest.raises(ObjectNotFound):
        lineage_of(toy.store, f"{name}@best")


def test_a_base_model_was_made_by_nothing(toy: ToyRun) -> None:
    base = lineage_of(toy.store, "toy").base
    assert base is not None
    lineage = lineage_of(toy.store, base)
    assert (lineage.policy, lineage.segments, lineage.base) == (None, (), base)


def test_a_fork_is_its_own_run(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "nightly/1", step=3, code_version="test")
    lineage = lineage_of(toy.store, "nightly/1")
    assert [(s.title, s.until) for s in lineage.segments] == [("nightly/1/0-grpo/policy", 3)]
    assert lineage.target == "run nightly/1"


@pytest.mark.parametrize("trained_further", [False, True])
def test_a_lineage_begins_at_the_model_whose_run_was_deleted(toy: ToyRun, trained_further: bool) -> None:
    model = find_model(toy.store, "toy", None)
    assert model is not None
    target = registered_key(model)
    if trained_further:
        Chain(toy.store, "next", "0-sft", "policy").create_root(Root(base=model, base_digest=model.sha256))
        target = "next"
    delete_runs(toy.store, "toy", force=True)
    lineage = lineage_of(toy.store, target)
    assert (lineage.base, lineage.deleted) == (registered_key(model), "toy")
    assert [segment.run for segment in lineage.segments] == ["next"] * trained_further
    assert training_datasets(toy.store, target) == set()


@pytest.mark.parametrize("target", ["nothing", "toy@000009-none", "toy/0-grpo/policy@9", "../x"])
def test_what_is_not_there(toy: ToyRun, target: str) -> None:
    with pytest.raises(ObjectNotFound):
        lineage_of(toy.store, target)


def test_a_step_names_what_it_was_made_from(toy: ToyRun) -> None:
    record = toy.chain.record(2)
    assert record is not None
    step = step_lineage(toy.store, record)
    assert step.batch == record.request.batch.uri
    assert [uri.partition("#")[0] for uri in step.rollouts] == [
        f"runs/toy/stages/0-grpo/steps/000001/rollouts/0000{n}" for n in (0, 1)
    ]
    assert len(step.graded) == 2
    assert len(step.datasets) == 1
    # 16 samples of groups of 4
    assert (len(step.prompts), step.completions) == (4, 16)
    assert set(step.prompts) == set(sampled_ids(toy, 2))
    rewards = read_table(toy.store, record.request.batch, ["reward"])["reward"].to_pylist()
    assert step.reward_mean == pytest.approx(sum(rewards) / 16)


def test_the_record_of_a_run_is_read_once_for_all_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    reads: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: (reads.append(key), get(key))[1])

    def record(run: str, dataset: str) -> None:
        create_or_check_run(store, run, semantic={"inputs": {"dataset": dataset}}, other={}, code_version="test")

    record("a", "1" * 64)
    record_run(store, "fork")
    assert runs_by_dataset(store) == {"1" * 64: ["a"]}
    assert runs_by_dataset(store) == {"1" * 64: ["a"]}
    assert reads.count(keys.run_json("a")) == 1
    # a fork that runs now, and a run that was deleted and created again
    record("fork", "1" * 64)
    delete_runs(store, "a", force=True)
    record("a", "2" * 64)
    assert runs_by_dataset(store) == {"1" * 64: ["fork"], "2" * 64: ["a"]}


def test_what_a_prompt_touched(toy: ToyRun) -> None:
    # ten prompts in an epoch, four a step: the first of step 3 was not seen before
    prompt = next(i for i in sampled_ids(toy, 3) if i not in sampled_ids(toy, 1) + sampled_ids(toy, 2))
    fork_run(toy.store, "toy", "before", step=2, code_version="test")
    fork_run(toy.store, "toy", "after", step=4, code_version="test")
    report = prompt_report(toy.store, lineage_of(toy.store, "toy"), prompt)
    assert report.ids == (prompt,)
    expected = {step: n for step in (1, 2, 3, 4) if (n := sampled_ids(toy, step).count(prompt))}
    assert {step: sum(use.step == step for use in report.uses) for step in expected} == expected
    assert len(report.uses) == sum(expected.values())
    assert all(use.status == "ok" and use.trained and use.reward is not None for use in report.uses)
    # the checkpoints at step 2, of the run and of the fork, are before the first use of the prompt
    assert report.checkpoints == ("after/0-grpo/policy@4", "toy/0-grpo/policy@4")
    assert report.models == (version(toy),)


def test_a_prompt_by_its_text(toy: ToyRun) -> None:
    by_text = prompt_report(toy.store, lineage_of(toy.store, "toy"), "7")
    # the prompts are the digits themselves; ids may be another text
    assert len(by_text.ids) == 1
    assert by_text == prompt_report(toy.store, lineage_of(toy.store, "toy"), by_text.ids[0]).model_copy(
        update={"asked": "7"}
    )


def test_a_prompt_that_was_never_used(toy: ToyRun) -> None:
    report = prompt_report(toy.store, lineage_of(toy.store, "toy"), "no such text")
    assert (report.ids, report.uses, report.checkpoints, report.models) == ((), (), (), ())
