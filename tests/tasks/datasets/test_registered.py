"""Tests of datasets of the store: which version a key names, and that a run keeps the version that it began with."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.run_record import create_or_check_run
from storage.registry.datasets import list_datasets
from storage.store import key_patterns, keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tasks.datasets.errors import DatasetError, DatasetNotFound
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import FileDataset, InlinePairs, RegisteredDataset
from tasks.load import load_prompts

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


def add(store: ObjectStore, tmp_path: Path, rows: int, *, name: str = "big", **options: Any) -> LoadedDataset:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(rows)))
    return load_dataset(store, FileDataset(path=str(file)), provenance=PROVENANCE, **options)


def load(store: ObjectStore, key: str, **options: Any) -> LoadedDataset:
    return load_dataset(store, RegisteredDataset(key=key), provenance=PROVENANCE, **options)


def version_of(data: LoadedDataset) -> str:
    return keys.dataset_of(data.ref.key)[1]


def test_which_version_a_key_names(store: ObjectStore, tmp_path: Path) -> None:
    first, second = add(store, tmp_path, 3), add(store, tmp_path, 4)
    answers = add(store, tmp_path, 4, use="completion")
    assert load(store, "big").ref == second.ref
    assert load(store, "big", use="completion").ref == answers.ref
    for key in (f"big@{version_of(first)}", f"big@{version_of(first)[:8]}"):
        loaded = load(store, key)
        assert (loaded.ref, loaded.rows, loaded.new) == (first.ref, 3, False)
    # rows that the store has already do not become the newest version
    add(store, tmp_path, 3)
    assert load(store, "big").ref == second.ref


def test_datasets_are_listed_oldest_first(store: ObjectStore, tmp_path: Path) -> None:
    loaded = [add(store, tmp_path, 3), add(store, tmp_path, 2, name="small"), add(store, tmp_path, 4)]
    listed = list_datasets(store)
    assert [version.ref for version in listed] == [data.ref for data in loaded]
    assert [version.ref for version in list_datasets(store, "big")] == [loaded[0].ref, loaded[2].ref]
    assert (listed[1].use, listed[1].source) == ("prompt", str(tmp_path / "small.jsonl"))


def test_what_a_wrong_key_is_told(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="nor any other.*ostinato data add"):
        load(store, "big")
    added = add(store, tmp_path, 3)
    version = version_of(added)
    with pytest.raises(DatasetNotFound, match="did you mean 'big'.*it has big.*ostinato data ls"):
        load(store, "bigg")
    other = "0" if version[0] != "0" else "1"
    with pytest.raises(DatasetNotFound, match=f"no version '{other}'.*{version[:8]} \\(prompts\\)"):
        load(store, f"big@{other}")
    with pytest.raises(DatasetError, match="used for completions.*--use completion"):
        load(store, f"big@{version[:4]}", use="completion")


def test_completions_are_used_as_prompts(store: ObjectStore, tmp_path: Path) -> None:
    answers = add(store, tmp_path, 3, use="completion")
    data = load(store, f"big@{version_of(answers)[:8]}")
    assert (data.rows, data.new, data.ref.parents) == (3, True, (f"{answers.ref.key}#{answers.ref.sha256}",))
    # the rows are those of a dataset of prompts with the answers as metadata
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(3)))
    same = load_dataset(store, FileDataset(path=str(file), metadata_columns=("answer",)), provenance=PROVENANCE)
    assert read_table(store, data.ref) == read_table(store, same.ref)
    # loading them again returns the same table
    again = load(store, "big")
    assert (again.ref, again.new) == (data.ref, False)
    # a version of prompts is preferred to it
    prompts = add(store, tmp_path, 4)
    assert load(store, "big").ref == prompts.ref


def test_an_answer_in_the_metadata_is_kept_and_earlier_answers_stay_in_the_prompt(
    store: ObjectStore, tmp_path: Path
) -> None:
    turns = [("user", "2+3?"), ("assistant", "5"), ("user", "And 4+5?"), ("assistant", "It is 9.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    file = tmp_path / "sums.jsonl"
    file.write_text(json.dumps({"messages": messages, "metadata": {"answer": 9}}))
    load_dataset(store, FileDataset(path=str(file)), use="completion", provenance=PROVENANCE)
    (row,) = read_table(store, load(store, "sums").ref).to_pylist()
    thread = StringThread.from_json(row["thread"])
    assert thread == StringThread(turns[:3], {"answer": 9})
    assert json.loads(row["metadata"]) == {"answer": 9}


def test_the_prompts_of_pairs_come_with_the_preferred_answer(store: ObjectStore) -> None:
    prompt = StringThread([("user", "Capital of Peru?")])
    pairs = InlinePairs.of([(prompt.assistant("Lima"), prompt.assistant("Cusco"))])
    data = load_dataset(store, pairs, use="preference", provenance=PROVENANCE)
    name, version = keys.dataset_of(data.ref.key)
    (row,) = read_table(store, load(store, f"{name}@{version}").ref).to_pylist()
    assert StringThread.from_json(row["thread"]) == StringThread(prompt.turns, {"answer": "Lima"})


def test_a_completion_without_a_prompt_is_no_prompt(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    rows = [["user", "assistant"], ["assistant"]]
    file.write_text(
        "".join(json.dumps({"messages": [{"role": role, "content": "x"} for role in row]}) + "\n" for row in rows)
    )
    load_dataset(store, FileDataset(path=str(file)), use="completion", provenance=PROVENANCE)
    with pytest.raises(DatasetError, match=r"row 2 of talk@\w+ has no prompt: given an answer; expected a user"):
        load(store, "talk")


def test_a_run_keeps_the_version_whose_prompts_it_uses(store: ObjectStore, tmp_path: Path) -> None:
    add(store, tmp_path, 3, use="completion")
    workspace = Workspace(store=store.url, run="a", seed=0, provenance=PROVENANCE)
    create_or_check_run(store, "a", semantic={}, other={}, code_version="test")
    first = load_prompts(workspace, RegisteredDataset(key="big"), "prompt")
    add(store, tmp_path, 4, use="completion")
    assert load_prompts(workspace, RegisteredDataset(key="big"), "prompt").ref == first.ref
    other = workspace.model_copy(update={"run": "b"})
    assert load_prompts(other, RegisteredDataset(key="big"), "prompt").rows == 4


def test_a_beginning_of_two_versions_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    # 17 versions: two of them begin with the same hex digit
    versions = [version_of(add(store, tmp_path, rows)) for rows in range(1, 18)]
    first = next(digit for digit in "0123456789abcdef" if sum(v.startswith(digit) for v in versions) > 1)
    with pytest.raises(DatasetError, match=r"names \d+ versions.*more of its characters"):
        load(store, f"big@{first}")


@pytest.mark.parametrize("key", ["", "@12", "big@", "big@xyz", "a/b", "big@12@3", "../big", "big\n"])
def test_malformed_keys_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="name@version"):
        RegisteredDataset(key=key)


def test_a_run_keeps_the_version_that_it_began_with(store: ObjectStore, tmp_path: Path) -> None:
    first = add(store, tmp_path, 3)
    workspace = Workspace(store=store.url, run="a/1", seed=0, provenance=PROVENANCE)
    spec = RegisteredDataset(key="big")
    # before the run exists nothing is recorded for it
    assert load_prompts(workspace, spec, "prompt").ref == first.ref
    assert not list(store.list(keys.pinned_datasets_prefix("a/1")))
    create_or_check_run(store, "a/1", semantic={}, other={}, code_version="test")
    assert load_prompts(workspace, spec, "prompt").ref == first.ref
    second = add(store, tmp_path, 4)
    assert load_prompts(workspace, spec, "prompt").ref == first.ref
    assert load_prompts(workspace.model_copy(update={"run": "b"}), spec, "prompt").ref == second.ref
    # the record is an object of the run
    (record,) = store.list(keys.pinned_datasets_prefix("a/1"))
    assert keys.run_of(record.key) == "a/1" and key_patterns.is_standalone(record.key)
    assert json.loads(store.get(record.key)) == {"dataset": f"big@{version_of(first)}"}


def test_the_first_record_of_a_version_is_kept(store: ObjectStore, tmp_path: Path) -> None:
    first, second = add(store, tmp_path, 3), add(store, tmp_path, 4)
    source = RegisteredDataset(key="big")
    for data in (first, second):
        source.record_version(store, "run", "prompt", data)
    assert source.resolved(store, "prompt", run="run").version == version_of(first)
    # a full version needs no record
    full = RegisteredDataset(key=f"big@{version_of(second)}")
    full.record_version(store, "run", "prompt", second)
    assert full.resolved(store, "prompt", run="run") == full
    assert len(list(store.list(keys.pinned_datasets_prefix("run")))) == 1
