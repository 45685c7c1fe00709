"""Tests of a split: which rows are held out, from the definition, for every use and kind of dataset."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.catalogue import RewardModelConfig, SFTToGSPOConfig
from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.overrides import parse_config
from storage.store import keys
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import RowReader
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import DatasetUse, DeclaredDataset, KeptRows, LoadedDataset, load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor
from tasks.datasets.spec import FileDataset, HeldoutSplit, MixtureDataset, RegisteredDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def is_held_out(prompt: str, split: float) -> bool:
    """By the definition: the first 8 bytes of the digest of the prompt's turns, as a fraction, are below the split."""
    digest = hashlib.sha256(f'[["user","{prompt}"]]'.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < split


def load(store: ObjectStore, spec: DeclaredDataset, use: DatasetUse, seed: int = 0) -> LoadedDataset:
    return load_dataset(store, spec, use=use, provenance=PROVENANCE.model_copy(update={"seed": seed}))


def prompts(store: ObjectStore, data: LoadedDataset) -> list[str]:
    column = "chosen" if data.ref.kind == "pairs" else "thread"
    rows = RowReader(store, data.ref).rows(range(data.rows))
    assert [row["index"] for row in rows] == list(range(data.rows))
    return [json.loads(row[column])["turns"][0]["content"] for row in rows]


def test_keep_leaves_rows_out_of_training_and_not_of_the_held_out_ones(store: ObjectStore, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "metadata": {"pass_rate": n % 10 / 10}} for n in range(100)]
    keep = KeptRows(column="pass_rate", min=0.2, max=0.7)
    source, split = FileDataset(path=write(tmp_path / "rows.jsonl", rows), keep=keep), HeldoutSplit(split=0.3)
    train, heldout = (load(store, split.part(source, part), "prompt") for part in ("train", "heldout"))
    texts = [row["prompt"] for row in rows]
    assert prompts(store, heldout) == [text for text in texts if is_held_out(text, 0.3)]
    assert (heldout.keep, train.keep) == (None, keep)
    # one pass of the training reads the kept rows among the others, each once
    order, trained = load_order(store, train, seed=0), prompts(store, train)
    taken, cursor = order.take(DataCursor(), order.rows)
    kept = [text for n, text in enumerate(texts) if 2 <= n % 10 <= 7 and not is_held_out(text, 0.3)]
    assert sorted(trained[row] for row in taken) == sorted(kept)
    assert cursor.epoch == 1 and len(trained) > len(kept) > 20


ANSWERS: dict[DatasetUse, dict[str, Any]] = {
    "prompt": {},
    "completion": {"completion": "an answer"},
    "rating": {"completion": "an answer", "metadata": {"res": 1}},
    "preference": {"chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("use", ANSWERS)
def test_a_digest_of_the_prompt_chooses_the_rows(store: ObjectStore, tmp_path: Path, use: DatasetUse) -> None:
    texts = [f"question {n % 150}" for n in range(200)]
    rows = []
    for number, text in enumerate(texts):
        answers = {name: f"{value} {number}" if name != "metadata" else value for name, value in ANSWERS[use].items()}
        rows.append({"prompt": text} | answers)
    source = FileDataset(path=write(tmp_path / "rows.jsonl", rows))
    split = HeldoutSplit(split=0.2)
    train, heldout = (load(store, split.part(source, part), use) for part in ("train", "heldout"))
    assert prompts(store, heldout) == [text for text in texts if is_held_out(text, 0.2)]
    assert prompts(store, train) == [text for text in texts if not is_held_out(text, 0.2)]
    assert 20 < heldout.rows < 60 and train.rows + heldout.rows == 200
    # the record says of which dataset, and how it was split
    assert keys.dataset_of(heldout.ref.key)[0] == "rows-heldout" and keys.dataset_of(train.ref.key)[0] == "rows-train"
    manifest = read_manifest(store, heldout.ref.key)
    whole = load(store, source, use)
    assert manifest.parents == (whole.ref.uri,) and manifest.extra["split"] == 0.2
    # the seed of the run changes nothing, and a second load finds the table
    again = load(store, split.part(source, "heldout"), use, seed=7)
    assert again.ref == heldout.ref and heldout.new and not again.new


def test_few_rows_hold_out_one_prompt_and_equal_prompts_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    source = FileDataset(path=write(tmp_path / "few.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    split = HeldoutSplit(split=1e-6)
    held = prompts(store, load(store, split.part(source, "heldout"), "prompt"))
    trained = prompts(store, load(store, split.part(source, "train"), "prompt"))
    assert len(held) == 1 and sorted(held + trained) == ["a", "b"]
    same = FileDataset(path=write(tmp_path / "same.jsonl", [{"prompt": "a"}, {"prompt": "a"}]))
    with pytest.raises(DatasetError, match=r"given 2 rows, and a split of 1e-06 would hold all of them out"):
        load(store, split.part(same, "train"), "prompt")


def test_order_registered_datasets_and_mixtures(store: ObjectStore, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "metadata": {"level": -n}} for n in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)
    split = HeldoutSplit(split=0.3)
    # the order of the source is that of the rows to train on
    source = FileDataset(path=path, order="curriculum", curriculum_column="level")
    train = load(store, split.part(source, "train"), "prompt")
    taken, _ = load_order(store, train, seed=0).take(DataCursor(), train.rows)
    expected = [f"p{n}" for n in reversed(range(40)) if not is_held_out(f"p{n}", 0.3)]
    texts = prompts(store, train)
    assert [texts[row] for row in taken] == expected
    heldout = load(store, split.part(source, "heldout"), "prompt")
    assert heldout.order == "shuffled" and heldout.curriculum_column is None
    # a registered dataset is split into the same tables, and the run keeps its version
    registered = split.part(RegisteredDataset(key="rows"), "train")
    assert load(store, registered, "prompt").ref == train.ref
    registered.record_version(store, "r", "prompt", train)
    newer = FileDataset(path=write(tmp_path / "rows.jsonl", rows[:20]))
    load(store, newer, "prompt")
    pinned = registered.resolved(store, "prompt", run="r")
    assert load(store, pinned, "prompt").ref == train.ref
    assert load(store, registered.resolved(store, "prompt"), "prompt").rows < train.rows
    # each part of a mixture is split
    other = write(tmp_path / "other.jsonl", [{"prompt": f"q{n}"} for n in range(40)])
    parts = [{"dataset": {"kind": "file", "path": name}} for name in (path, other)]
    mixture = MixtureDataset.model_validate({"parts": parts})
    both = load(store, split.part(mixture, "train"), "prompt")
    held = load(store, split.part(mixture, "heldout"), "prompt")
    names = [[f"p{n}" for n in range(20)], [f"q{n}" for n in range(40)]]
    kept = [[text for text in texts if not is_held_out(text, 0.3)] for texts in names]
    assert [part.rows for part in both.parts] == [len(texts) for texts in kept] and held.parts == ()
    assert prompts(store, both) == kept[0] + kept[1]
    taken, _ = load_order(store, both, seed=0).take(DataCursor(), 2)
    assert sorted(text[0] for text in (prompts(store, both)[row] for row in taken)) == ["p", "q"]
    assert all(is_held_out(text, 0.3) for text in prompts(store, held)) and held.rows + both.rows == 60


BODY: dict[str, Any] = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "a.jsonl"}}}
RL: dict[str, Any] = {"grader": {"path": "a:b"}, "algorithm": {"steps": 1}}


def test_a_config_names_a_split_of_its_rows() -> None:
    sets = ["model.key=m", "data.train={kind: file, path: a}", "data.heldout.split=0.1"]
    config = parse_config(SFTConfig, None, sets)
    assert config.data.heldout == HeldoutSplit(split=0.1)
    (train, use), heldout = config.data.inputs["dataset"], config.data.heldout_rows
    assert (train.part, heldout.part, use) == ("train", "heldout", "completion")  # type: ignore[union-attr,attr-defined]
    # what the config holds is read again as it is, and the split is recorded among what may change
    assert SFTConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.other()["data"] == {"heldout": {"kind": "split", "split": 0.1}}
    ratings = BODY | {"data": BODY["data"] | {"use": "rating", "heldout": {"split": 0.5}}}
    assert RewardModelConfig.model_validate(ratings).data.heldout_use == "rating"
    # two stages: prompts that are held out are in neither of the two datasets
    prompts = {"kind": "file", "path": "b.jsonl"}
    stages = {"data": BODY["data"] | {"prompts": prompts, "heldout": {"split": 0.1}}, "grader": {"path": "a:b"}}
    two = SFTToGSPOConfig.model_validate(BODY | stages | {"gspo": {"algorithm": {"steps": 1}}})
    assert [source.part for source, _ in two.data.inputs.values()] == ["train", "train"]  # type: ignore[attr-defined]
    assert two.data.heldout_rows.dataset.path == "b.jsonl"  # type: ignore[union-attr]
    assert two.second.data.heldout_rows == two.data.heldout_rows


@pytest.mark.parametrize("split", [0, 1, -0.1, "most"])
def test_a_split_is_a_fraction(split: Any) -> None:
    with pytest.raises(ValidationError, match=r"split"):
        GRPOConfig.model_validate(BODY | RL | {"data": BODY["data"] | {"heldout": {"split": split}}})
