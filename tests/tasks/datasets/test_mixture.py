"""Tests of loading mixtures: one table of all parts, whose version follows from theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.common import GRPOConfig, SFTConfig
from storage.store import keys
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import RowReader
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.naming import row_name
from tasks.datasets.order import DataCursor
from tasks.datasets.spec import DatasetUse, FileDataset, MixtureDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def write(path: Path, prompts: list[str], levels: list[Any] | None = None) -> str:
    rows = [{"prompt": prompt, "metadata": {"level": n}} for n, prompt in enumerate(prompts)]
    for row, level in zip(rows, levels or [], strict=False):
        row["metadata"] = {"level": level}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture(*parts: dict[str, Any]) -> MixtureDataset:
    return MixtureDataset.model_validate({"parts": parts})


def part(path: str, weight: float = 1, **settings: Any) -> dict[str, Any]:
    return {"dataset": {"kind": "file", "path": path} | settings, "weight": weight}


def load(store: ObjectStore, spec: MixtureDataset, use: DatasetUse = "prompt") -> LoadedDataset:
    return load_dataset(store, spec, use=use, provenance=PROVENANCE)


def test_the_table_has_the_rows_of_each_part_and_own_ids(store: ObjectStore, tmp_path: Path) -> None:
    spec = mixture(
        part(write(tmp_path / "a.jsonl", ["x", "y"]), 3, order="file"), part(write(tmp_path / "b.jsonl", ["x", "z"]))
    )
    data = load(store, spec)
    rows = RowReader(store, data.ref).rows(range(4))
    assert [json.loads(row["thread"])["turns"][0]["content"] for row in rows] == ["x", "y", "x", "z"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    # the two equal rows get different random numbers
    assert rows[2]["id"] == f"{rows[0]['id']}#1" and len({row["id"] for row in rows}) == 4
    assert data.rows == 4 and [(p.name, p.rows, p.weight, p.order) for p in data.parts] == [
        ("a", 2, 3, "file"), ("b", 2, 1, "shuffled"),
    ]  # fmt: skip
    assert row_name(store, data.ref, 3) == f"row 2 of {tmp_path / 'b.jsonl'}"
    assert read_manifest(store, data.ref.key).parents == tuple(p.ref.uri for p in data.parts)
    # weights and orders are no part of the table
    again = load(store, mixture(part(str(tmp_path / "a.jsonl")), part(str(tmp_path / "b.jsonl"), 9)))
    assert again.ref == data.ref and not again.new
    assert load(store, mixture(part(str(tmp_path / "b.jsonl")), part(str(tmp_path / "a.jsonl")))).ref != data.ref


def test_each_part_has_its_own_order(store: ObjectStore, tmp_path: Path) -> None:
    curriculum = {"order": "curriculum", "curriculum_column": "level"}
    spec = mixture(
        part(write(tmp_path / "a.jsonl", ["a0", "a1"]), order="file"),
        part(write(tmp_path / "b.jsonl", ["b0", "b1", "b2"], [2, 0, 1]), **curriculum),
    )
    data = load(store, spec)
    rows, _ = load_order(store, data, seed=0).take(DataCursor(), 8)
    assert rows == [0, 2 + 1, 1, 2 + 2, 0, 2 + 0, 1, 2 + 1]
    # a row without a number is counted within its file
    write(tmp_path / "b.jsonl", ["b0", "b1", "b2"], [2, None, 1])
    with pytest.raises(DatasetError, match=r"row 2 of .*b\.jsonl: given None; expected a number"):
        load_order(store, load(store, spec), seed=0)


def test_parts_of_one_name_are_told_apart(store: ObjectStore, tmp_path: Path) -> None:
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder / "train.jsonl", [folder]))
    assert [p.name for p in load(store, mixture(*map(part, paths))).parts] == ["train", "train-2"]


def test_registered_parts_get_their_full_version(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", ["x", "y"])
    ref = load_dataset(store, FileDataset(path=path), provenance=PROVENANCE).ref
    spec = mixture({"dataset": {"kind": "registered", "key": "sums"}}, part(write(tmp_path / "b.jsonl", ["z"])))
    resolved = spec.resolved(store, "prompt")
    assert resolved.parts[0].dataset.key == "@".join(keys.dataset_of(ref.key))
    assert load(store, resolved).parts[0].ref == ref


def test_a_part_of_another_kind_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    spec = mixture(
        {"dataset": {"kind": "reasoning_gym", "name": "gcd", "size": 2}}, part(write(tmp_path / "b.jsonl", ["z"]))
    )
    with pytest.raises(DatasetError, match=r"'reasoning_gym-gcd', which has none, for a dataset of preferences"):
        load(store, spec, "preference")
    with pytest.raises(DatasetError, match="completion"):
        load(store, mixture(part(str(tmp_path / "b.jsonl")), part(str(tmp_path / "b.jsonl"))), "completion")


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_is_positive(weight: float) -> None:
    with pytest.raises(ValidationError, match="weight"):
        mixture(part("a.jsonl", weight), part("b.jsonl"))


def test_a_mixture_has_two_parts_and_none_is_a_mixture() -> None:
    with pytest.raises(ValidationError, match="parts"):
        mixture(part("a.jsonl"))
    with pytest.raises(ValidationError, match="kind"):
        mixture({"dataset": {"kind": "mixture", "parts": []}}, part("a.jsonl"))


def test_a_batch_smaller_than_the_number_of_parts_is_refused() -> None:
    train = {"kind": "mixture", "parts": [part("a.jsonl"), part("b.jsonl"), part("c.jsonl")]}
    body: dict[str, Any] = {"model": {"key": "m"}, "data": {"train": train}}
    with pytest.raises(ValidationError, match="a batch has 2 rows, fewer than the 3 datasets"):
        SFTConfig.model_validate(body | {"algorithm": {"samples_per_batch": 2}})
    SFTConfig.model_validate(body | {"algorithm": {"samples_per_batch": 3}})
    algorithm = {"steps": 1, "samples_per_batch": 8, "completions_per_sample": 4}
    with pytest.raises(ValidationError, match="a batch has 2 rows"):
        GRPOConfig.model_validate(body | {"grader": {"path": "a:b"}, "algorithm": algorithm})
