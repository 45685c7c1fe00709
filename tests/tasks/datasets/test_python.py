"""Rows from a user's own function or class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tasks.datasets.errors import BadRow, DatasetError, EmptyDataset
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import FileDataset, PythonDataset

HERE = "tests.tasks.datasets.given_rows"
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def dataset(name: str, **options: Any) -> PythonDataset:
    return PythonDataset(path=f"{HERE}:{name}", **options)


def test_a_function_gives_the_rows_that_a_file_would(store: ObjectStore, tmp_path: Path) -> None:
    columns = {"prompt": "question"}
    loaded = load_dataset(store, dataset("sums", arguments={"highest": 3}, columns=columns), provenance=PROVENANCE)
    lines = [f'{{"question": "{n} + {n}", "metadata": {{"answer": {2 * n}}}}}\n' for n in (1, 2, 3)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    read = load_dataset(store, FileDataset(path=str(tmp_path / "sums.jsonl"), columns=columns), provenance=PROVENANCE)
    assert loaded.rows == 3
    assert read_table(store, loaded.ref).to_pylist() == read_table(store, read.ref).to_pylist()


def test_a_class_with_items_and_a_length(store: ObjectStore) -> None:
    loaded = load_dataset(store, dataset("Pairs", limit=2), use="preference", provenance=PROVENANCE)
    assert loaded.rows == 2
    assert '"0?"' in read_table(store, loaded.ref)["chosen"][0].as_py()


def test_arguments_decide_and_are_no_part_of_the_version(store: ObjectStore) -> None:
    """Equal rows are equal data, whatever made them."""
    two, three = (
        load_dataset(
            store,
            dataset("sums", arguments={"highest": highest}, columns={"prompt": "question"}, limit=2),
            provenance=PROVENANCE,
        )
        for highest in (2, 3)
    )
    assert two.ref == three.ref and not three.new


def test_rows_that_are_none(store: ObjectStore) -> None:
    with pytest.raises(BadRow, match=r"given_rows:mixed, row 2: given a str; expected a dict of columns"):
        load_dataset(store, dataset("mixed"), provenance=PROVENANCE)
    loaded = load_dataset(store, dataset("mixed", on_bad_row="skip"), provenance=PROVENANCE)
    assert (loaded.rows, loaded.skipped) == (2, 2)
    assert "row 2" in loaded.skipped_reasons[0] and "row 3" in loaded.skipped_reasons[1]


def test_rows_that_are_nested_too_deeply(store: ObjectStore) -> None:
    with pytest.raises(BadRow, match=r"given_rows:nested, row 1, column 'metadata': given a dict that is nested too"):
        load_dataset(store, dataset("nested"), provenance=PROVENANCE)
    with pytest.raises(EmptyDataset, match="all 2 rows were skipped"):
        load_dataset(store, dataset("nested", on_bad_row="skip"), provenance=PROVENANCE)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("broken", {}, "raised RuntimeError.*the database is away"),
        ("sums", {"lowest": 1}, "raised TypeError.*lowest"),
        ("nothing", {}, "given a int; expected a function or a class"),
        ("missing", {}, "has no 'missing'"),
    ],
)
def test_code_that_fails_is_named(store: ObjectStore, name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=f"(?s)given_rows:{name}.*{message}"):
        load_dataset(store, dataset(name, arguments=arguments), provenance=PROVENANCE)
    assert not list(store.list("datasets/"))
