"""Tests of preferences and ratings: the columns of a row, the compared turns, and the error of each kind of bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from engine.text.threads import StringThread
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.load import LoadedDataset, SkippedRows, load_dataset
from tasks.datasets.spec import FileDataset, InlineDataset, InlinePairs, ReasoningGymDataset
from tests.fixtures.dataset_rows import read_pairs, read_threads

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
U, A, S = "user", "assistant", "system"


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def jsonl(folder: Path, *lines: dict[str, Any]) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def parquet(folder: Path, *lines: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(lines)), folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


def turns(thread: StringThread) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in thread.turns]


TEXTS = {"prompt": "q", "chosen": "good", "rejected": "bad"}
WANTED = ([(U, "q"), (A, "good")], [(U, "q"), (A, "bad")])


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    "row",
    [
        TEXTS,
        {"chosen": messages((U, "q"), (A, "good")), "rejected": messages((U, "q"), (A, "bad"))},
        {"prompt": messages((U, "q")), "chosen": messages((A, "good")), "rejected": messages((A, "bad"))},
        {"prompt": "q", "chosen": messages((U, "q"), (A, "good")), "rejected": messages((U, "q"), (A, "bad"))},
    ],
)
def test_every_layout_gives_the_same_pair(tmp_path: Path, write: Any, row: dict[str, Any]) -> None:
    (pair,) = read_pairs(FileDataset(path=write(tmp_path, row)))
    assert (turns(pair.chosen), turns(pair.rejected)) == WANTED
    assert pair.chosen.get_turn_weights() == pair.rejected.get_turn_weights() == [0.0, 1.0]


def test_only_what_differs_is_compared(tmp_path: Path) -> None:
    shared = [(S, "s"), (U, "a"), (A, "b"), (U, "c")]
    row = {
        "chosen": messages(*shared, (A, "d"), (U, "e"), (A, "f")),
        "rejected": messages(*shared, (A, "g")),
    }
    (pair,) = read_pairs(FileDataset(path=jsonl(tmp_path, row)))
    assert pair.chosen.get_turn_weights() == [0, 0, 0, 0, 1, 0, 1]
    assert pair.rejected.get_turn_weights() == [0, 0, 0, 0, 1]


def test_columns_metadata_and_system_prompt(tmp_path: Path) -> None:
    row = {"question": "q", "yes": "good", "no": "bad", "metadata": {"n": 1}, "source": "x"}
    spec = FileDataset(
        path=jsonl(tmp_path, row),
        columns={"prompt": "question", "chosen": "yes", "rejected": "no"},
        metadata_columns=("source",),
        system_prompt="be kind",
    )
    (pair,) = read_pairs(spec)
    assert turns(pair.rejected) == [(S, "be kind"), (U, "q"), (A, "bad")]
    assert pair.rejected.get_turn_weights() == [0, 0, 1]
    assert dict(pair.chosen.metadata) == dict(pair.rejected.metadata) == {"n": 1, "source": "x"}


@pytest.mark.parametrize(
    ("row", "column", "parts"),
    [
        ({"prompt": "q", "chosen": "good"}, "rejected", ["the column 'rejected'"]),
        ({"prompt": "q", "chosen": "good", "rejected": None}, "rejected", ["given null", "a text, or a list"]),
        ({"prompt": "", "chosen": "good", "rejected": "bad"}, "prompt", ["not empty"]),
        ({"chosen": "good", "rejected": "bad"}, "chosen", ["without a prompt", "columns={prompt: question}"]),
        (TEXTS | {"rejected": "good"}, None, ["two equal conversations"]),
        (
            {"chosen": messages((U, "p"), (A, "x")), "rejected": messages((U, "q"), (A, "y"))},
            "chosen",
            ["user turn 0", "the same prompt in both"],
        ),
        (
            {"chosen": messages((U, "q"), (A, "x")), "rejected": messages((U, "q"), (U, "y"), (A, "z"))},
            "rejected",
            ["user turn 1", "the same prompt in both"],
        ),
        (
            {"chosen": messages((U, "q"), (A, "x")), "rejected": messages((U, "q"))},
            "rejected",
            ["ends with the user turn", "ends with an assistant turn"],
        ),
        (
            {"chosen": messages((U, "q"), (A, "x")), "rejected": messages((U, "q"), (A, "x"), (U, "w"), (A, "z"))},
            "chosen",
            ["the beginning of the other", "a different answer"],
        ),
        (
            {"prompt": "q", "chosen": messages((U, "other"), (A, "x")), "rejected": "y"},
            "chosen",
            ["begin with a user turn other than the prompt", "Leave the prompt's column out"],
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], column: str | None, parts: list[str]) -> None:
    path = jsonl(tmp_path, TEXTS, row, TEXTS)
    with pytest.raises(BadRow) as error:
        list(read_pairs(FileDataset(path=path)))
    assert (error.value.row, error.value.column) == (2, column)
    assert f"{path}, row 2" in str(error.value)
    for part in parts:
        assert part in str(error.value)
    skipped = SkippedRows()
    assert len(list(read_pairs(FileDataset(path=path, on_bad_row="skip"), skipped=skipped))) == 2
    assert skipped.reasons == [str(error.value)]


def test_a_parquet_file_without_one_of_the_two(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no column 'rejected'; the file has prompt, chosen"):
        list(read_pairs(FileDataset(path=parquet(tmp_path, {"prompt": "q", "chosen": "x"}))))


def test_two_layouts_at_once_are_refused() -> None:
    with pytest.raises(ValidationError, match="either messages, or"):
        FileDataset(path="x.jsonl", columns={"messages": "m", "chosen": "c"})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def load(store: ObjectStore, spec: Any, kind: Any = "preference") -> LoadedDataset:
    return load_dataset(store, spec, use=kind, provenance=PROVENANCE)


def test_a_loaded_dataset_is_named_by_its_content(store: ObjectStore, tmp_path: Path) -> None:
    spec = FileDataset(path=jsonl(tmp_path, TEXTS, TEXTS | {"chosen": "better"}, TEXTS))
    loaded = load(store, spec)
    assert (loaded.rows, loaded.new, loaded.ref.kind) == (3, True, "pairs")
    assert load(store, spec).ref == loaded.ref and not load(store, spec).new
    swapped = FileDataset(path=jsonl(tmp_path, {"prompt": "q", "chosen": "bad", "rejected": "good"}))
    assert load(store, swapped).ref.key != loaded.ref.key
    table = read_table(store, loaded.ref)
    assert table["index"].to_pylist() == [0, 1, 2]
    first, second, third = table["id"].to_pylist()
    assert third == f"{first}#1" and second != first
    assert turns(StringThread.from_json(table["rejected"][1].as_py())) == [(U, "q"), (A, "bad")]
    assert read_manifest(store, loaded.ref.key).extra["use"] == "preference"


def test_pairs_in_process(store: ObjectStore) -> None:
    prompt = StringThread().user("q")
    loaded = load(store, InlinePairs.of([(prompt.assistant("good"), prompt.assistant("bad"))]))
    row = read_table(store, loaded.ref).to_pylist()[0]
    assert StringThread.from_json(row["chosen"]).get_turn_weights() == [0.0, 1.0]
    weighted = StringThread([(U, "q"), (A, "a"), (U, "r"), (A, "b")], weights=[0, 0.5, 0, 1])
    other = StringThread([(U, "q"), (A, "a"), (U, "r"), (A, "c")], weights=[0, 0.5, 0, 1])
    stored = read_table(store, load(store, InlinePairs.of([(weighted, other)])).ref).to_pylist()[0]
    assert StringThread.from_json(stored["chosen"]).get_turn_weights() == [0, 0.5, 0, 1]  # as the caller said
    mute = StringThread([(U, "q"), (A, "d")], weights=[0, 0])
    with pytest.raises(BadRow, match="pairs, row 1, column 'rejected': given an answer of weight 0"):
        load(store, InlinePairs.of([(prompt.assistant("good"), mute)]))
    with pytest.raises(BadRow, match="pairs, row 2.*two equal"):
        load(store, InlinePairs.of([(prompt.assistant("x"), prompt.assistant("y")), (prompt.assistant("x"),) * 2]))


def test_what_has_no_preferences_is_refused(store: ObjectStore) -> None:
    gym = ReasoningGymDataset(name="chain_sum", size=2)
    prompt = StringThread().user("q")
    with pytest.raises(DatasetError, match="'reasoning_gym-chain_sum', which has none, for a dataset of preferences"):
        load(store, gym)
    with pytest.raises(DatasetError, match="expected preferences"):
        load(store, InlineDataset.of([prompt.assistant("a")]))
    with pytest.raises(DatasetError, match="given pairs, for a dataset of completions"):
        load(store, InlinePairs.of([(prompt.assistant("good"), prompt.assistant("bad"))]), "completion")
    with pytest.raises(DatasetError, match="no rating"):
        load(store, gym, "rating")


def test_ratings(store: ObjectStore, tmp_path: Path) -> None:
    spec = FileDataset(path=jsonl(tmp_path, {"prompt": "q", "completion": "a", "res": 0.5}), metadata_columns=("res",))
    (thread,) = read_threads(spec, use="rating")
    assert (turns(thread), thread.metadata["res"]) == ([(U, "q"), (A, "a")], 0.5)
    for given in (None, "high", True, 1e308, 10**400):
        bad = jsonl(tmp_path, {"prompt": "q", "completion": "a", "metadata": {"res": given}})
        with pytest.raises(BadRow, match=r"row 1, column 'metadata.res': .*expected a rating .* from -1e.15"):
            list(read_threads(FileDataset(path=bad), use="rating"))
    rated = StringThread().user("q").assistant("a").with_metadata({"res": 1})
    assert load(store, InlineDataset.of([rated]), "rating").rows == 1
    with pytest.raises(BadRow, match=r"threads, row 1, column 'metadata.res'"):
        load(store, InlineDataset.of([rated.with_metadata({})]), "rating")
