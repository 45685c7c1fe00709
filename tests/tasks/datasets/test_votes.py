"""Tests of votes: each is stored once, and together they are a dataset of preferences."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.chain.records import Chain, Root
from storage.errors import CorruptArtifact
from storage.inspect.audit import audit_store
from storage.registry.datasets import list_datasets
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tasks.datasets.errors import EmptyDataset
from tasks.datasets.registered import RegisteredDataset, select_version
from tasks.datasets.votes import (
    Vote,
    VotedAnswer,
    commit_vote,
    count_wins,
    list_votes,
    preferred_model,
    register_votes,
)
from tests.fixtures.page import publish


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


def vote(number: int, choice: str, left: str = "four", right: str = "five") -> Vote:
    return Vote.model_validate({
        "id": f"v{number}", "messages": [["user", "2+2?"]], "choice": choice, "blind": True,
        "left": {"model": "m@1", "policy": "policy:served/m/0-a/policy@0#aa", "text": left},
        "right": {"model": "m@2", "policy": "policy:served/m/0-b/policy@0#bb", "text": right},
        "created": f"2026-11-28T19:00:0{number}+00:00",
    })  # fmt: skip


def test_the_preferred_model_is_registered_and_won_most_and_last(store: ObjectStore, tmp_path: Path) -> None:
    commit_vote(store, vote(0, "tie"))
    commit_vote(store, vote(1, "left"))
    assert preferred_model(store) is None
    publish(store, tmp_path, "m", "1")
    publish(store, tmp_path, "m", "2")
    assert preferred_model(store) == "m@1"
    commit_vote(store, vote(2, "right"))
    assert preferred_model(store) == "m@2"
    commit_vote(store, vote(3, "left"))
    assert preferred_model(store) == "m@1"


def test_votes_are_pairs_whose_chosen_answer_is_the_one_voted_for(store: ObjectStore) -> None:
    for number, choice in enumerate(("right", "tie", "left")):
        commit_vote(store, vote(number, choice))
    commit_vote(store, vote(4, "left", "same", "same"))  # teaches nothing
    data = register_votes(store, code_version="test")
    assert (data.rows, data.skipped, data.new) == (2, 1, True)
    rows = read_table(store, data.ref).to_pylist()
    assert [("five" in row["chosen"], "four" in row["rejected"]) for row in rows] == [(True, True), (False, False)]
    assert '"chosen_model":"m@2"' in rows[0]["metadata"] and '"chosen_model":"m@1"' in rows[1]["metadata"]
    # dpo reads it by its name
    assert select_version(store, RegisteredDataset(key="votes"), "preference").ref == data.ref
    assert audit_store(store).problems == ()


def test_the_same_votes_are_the_same_version_and_a_further_vote_a_new_one(store: ObjectStore) -> None:
    commit_vote(store, vote(1, "left"))
    first = register_votes(store, code_version="test")
    assert register_votes(store, code_version="test") == first.model_copy(update={"new": False})
    commit_vote(store, vote(2, "right"))
    assert register_votes(store, code_version="test").ref != first.ref
    assert len(list_datasets(store, "votes")) == 2


def test_blind_votes_are_counted_by_the_version_that_answered(store: ObjectStore, tmp_path: Path) -> None:
    """m@champion was version 1, and then 2."""
    answers = {}
    for version in ("1", "2"):
        base = publish(store, tmp_path, "m", version)
        root = Chain(store, "served/m", f"0-{version}", "policy").create_root(Root(base=base, base_digest=base.sha256))
        uri = f"policy:served/m/0-{version}/policy@0#{root.state()}"
        answers[version] = {"model": "m@champion", "policy": uri, "text": version}
    root = Chain(store, "tuned", "0-sft", "policy").create_root(Root(base_digest="b"))
    run = {"model": "tuned", "policy": f"policy:tuned/0-sft/policy@0#{root.state()}", "text": "run"}
    choices = [("1", "left"), ("1", "left"), ("1", "right"), ("2", "tie"), ("2", "right"), ("1", "left")]
    for number, (version, choice) in enumerate(choices):
        body = vote(number, choice).model_dump() | {"left": answers[version], "right": run}
        # the last one was not blind
        commit_vote(store, Vote.model_validate(body | {"blind": number < 5}))
    # a policy that is not in the store: the name by which it was chosen
    commit_vote(store, Vote.model_validate(vote(7, "tie").model_dump() | {"right": run}))
    assert [(tally.model, tally.won, tally.tied, tally.votes) for tally in count_wins(store, list_votes(store))] == [
        ("m@1", 2, 1, 4), ("tuned, step 0", 2, 2, 6), ("m@2", 0, 1, 2),
    ]  # fmt: skip
    # the version that answered as m@champion; an answer of a run is of no registered model
    assert preferred_model(store) == "m@1"


def test_a_model_that_was_chosen_without_its_version_is_preferred_in_the_version_that_answered(
    store: ObjectStore, tmp_path: Path
) -> None:
    base = publish(store, tmp_path, "m", "1")
    publish(store, tmp_path, "m", "2")
    root = Chain(store, "served/m", "0-1", "policy").create_root(Root(base=base, base_digest=base.sha256))
    answer = {"model": "m", "policy": f"policy:served/m/0-1/policy@0#{root.state()}", "text": "good"}
    commit_vote(store, Vote.model_validate(vote(1, "left").model_dump() | {"left": answer}))
    assert preferred_model(store) == "m@1"


def test_a_comparison_has_one_vote(store: ObjectStore) -> None:
    first = commit_vote(store, vote(1, "left"))
    assert commit_vote(store, vote(1, "right")) == first
    assert list_votes(store) == [first]


def test_no_preference_is_no_dataset_and_a_damaged_vote_is_named(store: ObjectStore) -> None:
    commit_vote(store, vote(1, "tie"))
    with pytest.raises(EmptyDataset):
        register_votes(store, code_version="test")
    store.put(keys.vote("v2"), b"{}")
    with pytest.raises(CorruptArtifact, match="votes/v2.json"):
        list_votes(store)


def test_an_answer_keeps_any_text(store: ObjectStore) -> None:
    text = "<script>alert(1)</script> \u202eabc\u0000"
    answer = commit_vote(store, vote(1, "left", text)).left
    assert answer == VotedAnswer(model="m@1", policy="policy:served/m/0-a/policy@0#aa", text=text)
