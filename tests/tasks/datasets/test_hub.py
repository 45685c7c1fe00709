"""Tests of datasets of the hub and of folders that datasets saved, with the real library and a hub on loopback."""

from __future__ import annotations

import io
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.registry.hub import HubError
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import read_table
from tasks.datasets.errors import DatasetError, DatasetNotFound
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetUse, FileDataset, HubDataset
from tests.fixtures.servers.hub import Hub

datasets = pytest.importorskip("datasets", reason="needs the package datasets, which the extra hub has")
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
ROWS = [{"prompt": f"{n}+1", "metadata": {"answer": str(n + 1)}} for n in range(5)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data)
    return data.getvalue()


def load(store: ObjectStore, use: DatasetUse = "prompt", **fields: Any) -> LoadedDataset:
    return load_dataset(store, HubDataset(path="ada/sums", **fields), use=use, provenance=PROVENANCE)


def threads(store: ObjectStore, data: LoadedDataset) -> list[dict[str, Any]]:
    return [json.loads(text) for text in read_table(store, data.ref).column("thread").to_pylist()]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


def test_rows_are_those_of_a_file_and_the_hub_is_needed_once(hub: Hub, store: ObjectStore, tmp_path: Path) -> None:
    files = {"data/train-00000-of-00001.parquet": parquet(ROWS), "data/test-00000-of-00001.parquet": parquet(ROWS[:2])}
    first = hub.commit("dataset", "ada/sums", files)
    data = load(store)
    assert data.new and data.rows == 5
    file = tmp_path / "sums.jsonl"
    file.write_bytes(jsonl(ROWS))
    from_file = load_dataset(store, FileDataset(path=str(file)), provenance=PROVENANCE)
    assert threads(store, data) == threads(store, from_file)
    manifest = read_manifest(store, data.ref.key)
    assert manifest.key.startswith("datasets/ada--sums/")
    assert manifest.extra["source"] == "hf://datasets/ada/sums (train)"
    # splits, and parts of them
    assert [load(store, split=split).rows for split in ("test", "train[:3]", "train[80%:]")] == [2, 3, 1]
    # the branch moves; a resumed run has the commit of its start, and needs no hub
    hub.commit("dataset", "ada/sums", {"train.jsonl": jsonl(ROWS[:1])})
    assert load(store).rows == 1
    hub.stop()
    spec = HubDataset(path="ada/sums").resolved(store, "prompt", commits={"hf://datasets/ada/sums": first})
    assert spec == HubDataset(path="hf://datasets/ada/sums", revision=first)
    again = load_dataset(store, spec, provenance=PROVENANCE)
    assert again.ref == data.ref and not again.new
    # a commit that neither the store nor the cache has is not replaced by another one
    with pytest.raises(HubError, match="cannot be reached"):
        load(open_store(tmp_path / "other"), revision="f" * 40)


def test_configurations(hub: Hub, store: ObjectStore) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard"))
    card = f"---\nconfigs:\n{configs}---\n"
    files = {"easy.jsonl": jsonl(ROWS[:1]), "hard.jsonl": jsonl(ROWS[:2]), "README.md": card.encode()}
    hub.commit("dataset", "ada/sums", files)
    assert [load(store, name=name).rows for name in ("easy", "hard")] == [1, 2]
    with pytest.raises(DatasetError, match=r"dataset 'ada/sums' .*cannot be loaded: .*easy.*hard"):
        load(store)
    with pytest.raises(DatasetError, match=r"cannot be loaded: .*'odd'.*easy.*hard"):
        load(store, name="odd")
    with pytest.raises(DatasetError, match=r"cannot be loaded: Unknown split \"test\""):
        load(store, name="easy", split="test")


def test_what_the_hub_does_not_give(hub: Hub, store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="has no dataset 'ada/sums', or it is private"):
        load(store)
    hub.commit("dataset", "ada/sums", {"train.jsonl": jsonl(ROWS)}, access="gated")
    with pytest.raises(
        HubError, match=r"the dataset 'ada/sums' .* is gated: .*Ask for access on http.*/datasets/ada/sums"
    ):
        load(store)
    with pytest.raises(HubError, match="has no revision 'v2'"):
        load(store, revision="v2")
    # code in a repository is not run
    hub.commit("dataset", "ada/sums", {"sums.py": b"raise SystemExit(1)"})
    with pytest.raises(DatasetError, match="cannot be loaded: Dataset scripts are no longer supported"):
        load(store)
    hub.stop()
    with pytest.raises(HubError, match="cannot be reached; connect"):
        load(store, revision="v3")
    with pytest.raises(DatasetNotFound, match="given path='sums.jsonl'; expected owner/name of a dataset of the hub"):
        load_dataset(store, HubDataset(path="sums.jsonl"), provenance=PROVENANCE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="is a folder here without state.json or dataset_dict.json"):
        load_dataset(store, HubDataset(path=str(tmp_path / "empty")), provenance=PROVENANCE)


SIZES = """---
dataset_info:
  splits:
  - name: train
    num_examples: 7
---
"""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.jsonl": jsonl([{"prompt": "1"}]), "b.jsonl": jsonl([{"text": "1", "n": 2}])},
            "column names don't match|must have the same columns",
        ),
        ({"train.jsonl": b'{"prompt": "1"'}, "An error occurred while generating the dataset: .*JSON"),
        ({"train.jsonl": jsonl(ROWS), "README.md": SIZES.encode()}, "num_examples=7"),
        ({"README.md": b"# Sums"}, "contain any data files|No .*data files"),
    ],
    ids=["columns", "not-json", "sizes", "no-data"],
)
def test_errors_of_the_library_name_the_dataset(
    hub: Hub, store: ObjectStore, files: dict[str, bytes], message: str
) -> None:
    hub.commit("dataset", "ada/sums", files)
    with pytest.raises(DatasetError, match=rf"the dataset 'ada/sums' at '\w+' cannot be loaded: .*(?:{message})"):
        load(store)


def test_a_download_that_breaks_off_is_resumed(hub: Hub, store: ObjectStore) -> None:
    long = [{"prompt": f"{n} {'x' * 500}"} for n in range(20)]
    hub.commit("dataset", "ada/sums", {"train.jsonl": jsonl(long)})
    hub.break_offs["train.jsonl"] = [3000]
    assert load(store).rows == 20
    assert hub.downloads("train.jsonl") == ["", "bytes=2048-"]


def test_folders_that_datasets_saved(store: ObjectStore, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:2])
    train.save_to_disk(one)
    datasets.DatasetDict(train=train, test=test).save_to_disk(two)
    data = [
        load_dataset(store, HubDataset(path=str(path), split=split), provenance=PROVENANCE)
        for path, split in ((one, "train"), (two, "train"), (two, "test"))
    ]
    assert [dataset.rows for dataset in data] == [5, 5, 2]
    # parts, by the library's rules
    parts = {"train[:3]": ROWS[:3], "train[80%:]": ROWS[4:], "train[3:]+train[:2]": ROWS[3:] + ROWS[:2]}
    for path, (split, rows) in product((one, two), parts.items()):
        part = load_dataset(store, HubDataset(path=str(path), split=split), provenance=PROVENANCE)
        prompts = [thread["turns"][0]["content"] for thread in threads(store, part)]
        assert prompts == [row["prompt"] for row in rows]
    assert threads(store, data[0]) == threads(store, data[1])
    for path, split, names in ((two, "dev", "train, test"), (two, "dev[:1]", "train, test"), (one, "test", "train")):
        with pytest.raises(DatasetError, match=rf"has no split '{re.escape(split)}'; it has {names}. Give one"):
            load_dataset(store, HubDataset(path=str(path), split=split), provenance=PROVENANCE)


def question(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"What is {row['a']}+{row['b']}?", "metadata": {"answer": row["a"] + row["b"]}}


def test_columns_are_mapped_by_name_or_by_a_function(hub: Hub, store: ObjectStore) -> None:
    hub.commit("dataset", "ada/sums", {"train.jsonl": jsonl([{"a": 1, "b": 2, "text": "1 and 2?"}])})
    (by_name,) = threads(store, load(store, columns={"prompt": "text"}, metadata_columns=("a",)))
    assert by_name["turns"] == [{"content": "1 and 2?", "role": "user"}] and by_name["metadata"] == {"a": 1}
    (by_function,) = threads(store, load(store, row_function=f"{__name__}:question"))
    assert by_function["turns"] == [{"content": "What is 1+2?", "role": "user"}]
    assert by_function["metadata"] == {"answer": 3}
    with pytest.raises(
        DatasetError,
        match=r"no column 'conversations' or 'messages' or 'prompt'; the dataset has a, b, text. Map the names",
    ):
        load(store)
    with pytest.raises(DatasetError, match=r"row_function 'nowhere:f': no module"):
        load(store, row_function="nowhere:f")
