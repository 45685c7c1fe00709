"""Tests of the orders in which a run reads a dataset: as in the file, and by the numbers of a column."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor, permutation
from tasks.datasets.spec import DatasetSource, FileDataset, HeldoutSource, MixtureDataset, MixturePart

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def load(store: ObjectStore, folder: Path, values: list[Any], **settings: Any) -> LoadedDataset:
    """A dataset with one row per value, which stands in the column "level"."""
    rows = [{"prompt": f"q{number}", "level": value} for number, value in enumerate(values)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = FileDataset(path=str(path), metadata_columns=("level",), **settings)
    return load_dataset(store, spec, provenance=PROVENANCE)


def first(store: ObjectStore, data: LoadedDataset, n: int) -> list[int]:
    return load_order(store, data, seed=3).take(DataCursor(), n)[0]


CURRICULUM = {"order": "curriculum", "curriculum_column": "level"}


def test_the_order_of_the_file_in_each_epoch(store: ObjectStore, tmp_path: Path) -> None:
    data = load(store, tmp_path, [1, 2, 3], order="file")
    assert first(store, data, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_curriculum_ascends_and_keeps_equal_rows_in_their_order(store: ObjectStore, tmp_path: Path) -> None:
    data = load(store, tmp_path, [2, 0.5, 2, -1, 10, 0.5], **CURRICULUM)
    assert first(store, data, 7) == [3, 1, 5, 0, 2, 4, 3]


def test_the_default_is_shuffled(store: ObjectStore, tmp_path: Path) -> None:
    assert first(store, load(store, tmp_path, [0] * 8), 8) == permutation(8, seed=3, epoch=0).tolist()


def test_the_order_is_no_part_of_the_dataset(store: ObjectStore, tmp_path: Path) -> None:
    shuffled = load(store, tmp_path, [2, 1])
    in_order = load(store, tmp_path, [2, 1], order="file")
    assert in_order.ref == shuffled.ref and not in_order.new


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "None"), ("3", "'3'"), (True, "True"), ([1], r"\[1\]"), (10**400, "1000"), ("missing", "without 'level'")],
)
def test_a_row_without_a_number_is_named(store: ObjectStore, tmp_path: Path, value: Any, shown: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "metadata": {"level": 1}}, {"prompt": "b", "metadata": {}}]
    if value != "missing":
        rows[1]["metadata"] = {"level": value}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = FileDataset(path=str(tmp_path / "rows.jsonl"), **CURRICULUM)
    data = load_dataset(store, spec, provenance=PROVENANCE)
    with pytest.raises(DatasetError, match=rf"row 2 of {re.escape(spec.path)}: given .*{shown}.*metadata_columns"):
        load_order(store, data, seed=0)


@pytest.mark.parametrize("settings", [{"order": "curriculum"}, {"order": "file", "curriculum_column": "level"}])
def test_a_curriculum_needs_its_column(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="expected a curriculum_column with order='curriculum'"):
        FileDataset(path="rows.jsonl", **settings)


def test_a_config_with_the_default_order_is_written_as_before() -> None:
    for body in (
        {"kind": "file", "path": "rows.jsonl"},
        {"kind": "python", "path": "a.b:c"},
        {"kind": "reasoning_gym", "name": "gcd", "size": 3},
        {"kind": "registered", "key": "sums"},
    ):
        spec = TypeAdapter[Any](DatasetSource).validate_python(body)
        assert not {"order", "curriculum_column"} & spec.model_dump(mode="json").keys()


def test_held_out_rows_have_no_order() -> None:
    with pytest.raises(ValidationError, match="given order='file' for a dataset to evaluate on; leave it out"):
        TypeAdapter[Any](HeldoutSource).validate_python({"kind": "file", "path": "rows.jsonl", "order": "file"})


@pytest.mark.slow
def test_a_curriculum_in_a_mixture_of_a_million_rows_is_not_in_memory(tmp_path: Path) -> None:
    """The prompts are 300 MB. The numbers and their order are 16 MB, and the cache of ids is 64 MB."""
    rows = 1_000_000
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number in range(rows):
            row = {"prompt": f"{number} " * 40, "level": (number * 7919) % rows}
            file.write(json.dumps(row) + "\n")
    (tmp_path / "few.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    large = FileDataset(path=str(tmp_path / "rows.jsonl"), metadata_columns=("level",), **CURRICULUM)
    few = FileDataset(path=str(tmp_path / "few.jsonl"), order="file")
    spec = MixtureDataset(parts=(MixturePart(dataset=few), MixturePart(dataset=large, weight=3)))
    load_dataset(open_store(str(tmp_path / "store")), large, provenance=PROVENANCE)
    # Another process, so that the peak of its memory is not that of loading the file.
    program = f"""
import resource
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.load import load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor
from tasks.datasets.spec import MixtureDataset
spec = MixtureDataset.model_validate_json({spec.model_dump_json()!r})
store = open_store({str(tmp_path / "store")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
provenance = Provenance.model_validate_json({PROVENANCE.model_dump_json()!r})
data = load_dataset(store, spec, use="prompt", provenance=provenance)
rows, _ = load_order(store, data, seed=0).take(DataCursor(), 8)
large = [row - 2 for row in rows if row > 1]
assert len(large) == 6 and [row * 7919 % {rows} for row in large] == [0, 1, 2, 3, 4, 5], rows
assert [row for row in rows if row < 2] == [0, 1]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(output) < 250, f"the mixture took {output} MiB"
