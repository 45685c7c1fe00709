"""Tests of loading datasets: keys come from the content, loading twice is safe, and a bad row commits nothing."""

import json
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.text.threads import StringThread
from storage.store.artifacts import Provenance, read_manifest
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import RowReader, read_table
from tasks.datasets.errors import BadRow, EmptyDataset
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.naming import row_name
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.spec import FileDataset, InlineDataset, ReasoningGymDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def load(store: ObjectStore, spec: Any, **options: Any) -> LoadedDataset:
    return load_dataset(store, spec, provenance=PROVENANCE, **options)


def column(store: ObjectStore, loaded: LoadedDataset, name: str) -> list[Any]:
    return read_table(store, loaded.ref).column(name).to_pylist()


QUESTIONS = [{"prompt": f"q{i}", "metadata": {"answer": i}} for i in range(3)]


def test_what_is_stored(store: ObjectStore, tmp_path: Path) -> None:
    loaded = load(store, FileDataset(path=write(tmp_path / "sums.jsonl", QUESTIONS)))
    assert loaded.rows == 3 and loaded.ref.rows == 3 and loaded.ref.kind == "threads"
    assert loaded.ref.key.startswith("datasets/sums/")
    rows = RowReader(store, loaded.ref).rows([2, 0])
    assert [row["index"] for row in rows] == [2, 0]
    thread = StringThread.from_json(rows[0]["thread"])
    assert thread.last_content() == "q2" and thread.metadata["answer"] == 2
    assert json.loads(rows[0]["metadata"]) == {"answer": 2}
    assert read_manifest(store, loaded.ref.key).extra["use"] == "prompt"


def test_a_loaded_row_is_named_as_its_file_counts_it(store: ObjectStore, tmp_path: Path) -> None:
    """The first line of a file is row 1, in the errors of loading and in those of training."""
    path = write(tmp_path / "sums.jsonl", QUESTIONS)
    loaded = load(store, FileDataset(path=path))
    assert row_name(store, loaded.ref, 0) == f"row 1 of {path}"
    write(tmp_path / "sums.jsonl", [QUESTIONS[0], {"prompt": 7}])
    with pytest.raises(BadRow, match=re.escape(f"{path}, row 2,")):
        load(store, FileDataset(path=path))
    skipping = load(store, FileDataset(path=path, on_bad_row="skip"))
    assert row_name(store, skipping.ref, 0) == f"row 1 of {path}, where skipped rows are not counted"
    inline = load(store, InlineDataset.of([StringThread().user("q")]))
    assert row_name(store, inline.ref, 0) == "row 1 of inline"


def test_loading_again_anywhere_gives_the_same_artifact(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", QUESTIONS)
    first = load(store, FileDataset(path=path))
    before = [info.key for info in store.list()]
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "sums.jsonl", QUESTIONS)
    parquet = tmp_path / "elsewhere" / "sums.parquet"
    pq.write_table(pa.Table.from_pylist(QUESTIONS), parquet)
    for other in (path, moved, str(parquet)):
        assert first.new and load(store, FileDataset(path=other)) == first.model_copy(update={"new": False})
    assert [info.key for info in store.list()] == before


def test_parts_read_in_order_are_the_same_data_as_the_whole(store: ObjectStore, tmp_path: Path) -> None:
    whole = load(store, FileDataset(path=write(tmp_path / "sums.jsonl", QUESTIONS)))
    (tmp_path / "parts").mkdir()
    first = write(tmp_path / "parts" / "sums.jsonl", QUESTIONS[:1])
    rest = write(tmp_path / "parts" / "rest.jsonl", QUESTIONS[1:])
    assert load(store, FileDataset(path=first, further_paths=(rest,))).ref == whole.ref
    turned = load(store, FileDataset(path=rest, further_paths=(first,)))
    assert turned.ref.sha256 != whole.ref.sha256
    assert read_manifest(store, turned.ref.key).extra["source"] == f"{rest}, {first}"


def test_two_loads_at_once_agree(store: ObjectStore, tmp_path: Path) -> None:
    spec = FileDataset(path=write(tmp_path / "sums.jsonl", QUESTIONS))
    with ThreadPoolExecutor(4) as pool:
        loads = list(pool.map(lambda _: load(store, spec), range(4)))
    assert len({loaded.ref.sha256 for loaded in loads}) == 1 and len({loaded.ref.key for loaded in loads}) == 1


def test_another_content_or_meaning_is_another_version(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", QUESTIONS)
    other = write(tmp_path / "sums2.jsonl", [*QUESTIONS[:2], {"prompt": "else"}])
    turned = write(tmp_path / "sums3.jsonl", QUESTIONS[::-1])
    specs = [
        FileDataset(path=path),
        FileDataset(path=path, system_prompt="S"),
        FileDataset(path=path, limit=2),
        FileDataset(path=other),
        FileDataset(path=turned),
    ]
    assert len({load(store, spec).ref.key.split("/")[2] for spec in specs}) == len(specs)


def test_ids_do_not_depend_on_the_order_and_duplicates_stay_apart(store: ObjectStore, tmp_path: Path) -> None:
    rows = [QUESTIONS[0], QUESTIONS[1], QUESTIONS[0], QUESTIONS[0], {"prompt": "q0", "metadata": {"answer": 9}}]
    ids = column(store, load(store, FileDataset(path=write(tmp_path / "a.jsonl", rows))), "id")
    assert ids[2] == f"{ids[0]}#1" and ids[3] == f"{ids[0]}#2"
    assert len(set(ids)) == 5 and "#" not in ids[4]
    turned = column(store, load(store, FileDataset(path=write(tmp_path / "b.jsonl", rows[::-1]))), "id")
    assert set(turned) == set(ids) and turned[3] == ids[1]


def test_a_bad_row_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*[{"prompt": f"p{i}"} for i in range(1000)], {"prompt": 5}])
    with pytest.raises(BadRow, match="row 1001, column 'prompt'"):
        load(store, FileDataset(path=path))
    assert list(store.list()) == []


def test_skips_are_counted_and_reported(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}, {"wrong": 1}])
    loaded = load(store, FileDataset(path=path, on_bad_row="skip"))
    assert (loaded.rows, loaded.skipped) == (1, 2)
    assert "row 2" in loaded.skipped_reasons[0] and "row 3" in loaded.skipped_reasons[1]
    assert read_manifest(store, loaded.ref.key).extra["skipped"] == 2


def test_empty_datasets_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(EmptyDataset, match="given no rows"):
        load(store, FileDataset(path=write(tmp_path / "a.jsonl", [])))
    with pytest.raises(EmptyDataset, match=r"all 2 rows were skipped.*row 1"):
        load(store, FileDataset(path=write(tmp_path / "b.jsonl", [{"x": 1}] * 2), on_bad_row="skip"))
    with pytest.raises(EmptyDataset):
        load(store, InlineDataset(threads=()))
    assert list(store.list()) == []


def test_completions(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    pairs = load(store, FileDataset(path=path), use="completion")
    thread = StringThread.from_json(column(store, pairs, "thread")[0])
    assert thread.last_content() == "b" and list(thread.get_turn_weights())[-1] > 0
    assert pairs.ref.key != load(store, FileDataset(path=path)).ref.key


def test_threads_in_process(store: ObjectStore) -> None:
    thread = StringThread(turns=[("user", "a")], metadata={"answer": 1})
    spec = InlineDataset.of(iter([thread, thread]))
    assert InlineDataset.model_validate_json(spec.model_dump_json()) == spec
    loaded = load(store, spec)
    assert loaded.rows == 2 and StringThread.from_json(column(store, loaded, "thread")[1]) == thread
    with pytest.raises(BadRow, match="row 1: given a thread that ends with the user turn"):
        load(store, InlineDataset.of([thread]), use="completion")


def test_reasoning_gym(store: ObjectStore) -> None:
    spec = ReasoningGymDataset(name="gcd", size=8, split="train")
    train, held = load(store, spec), load(store, spec.held_out(4))
    assert train.ref.key.startswith("datasets/reasoning_gym-gcd/") and (train.rows, held.rows) == (8, 4)
    assert load(store, spec).ref == train.ref
    assert not set(column(store, train, "id")) & set(column(store, held, "id"))


def test_memory_is_bounded(store: ObjectStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i} " + "x" * 5_000} for i in range(4_000)])
    tracemalloc.start()
    try:
        loaded = load(store, FileDataset(path=path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert loaded.rows == 4_000 and peak < 12 * 2**20  # 20 MB of text went through


def test_seen_before() -> None:
    with RepetitionCounter() as counter:
        assert [counter.add(key) for key in ("a", "b", "a", "a")] == [0, 0, 1, 2]
