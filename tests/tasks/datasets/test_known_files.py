"""Tests that a file which was loaded before is recognised, and that a changed file or a damaged record never is."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from storage.store import key_patterns
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets import known_files
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetUse, FileDataset, RowsDataset

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG
)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


class Counted:
    """Counts the loads that read rows, and the files whose bytes were hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.hashed = 0, 0
        read, hash_file = RowsDataset.items, known_files.digest_file

        def counted_read(*args: Any, **options: Any) -> Any:
            self.reads += 1
            return read(*args, **options)

        def counted_hash(path: Path) -> tuple[str, int]:
            self.hashed += 1
            return hash_file(path)

        monkeypatch.setattr(RowsDataset, "items", counted_read)
        monkeypatch.setattr(known_files, "digest_file", counted_hash)
        # small files are recognised, too; the clock is past the time in which a file is unsettled
        monkeypatch.setattr(known_files, "MIN_BYTES", 0)
        monkeypatch.setattr(known_files.time, "time", lambda now=time.time: now() + 10)

    def since(self) -> tuple[int, int]:
        """(loads that read rows, hashed files) since the last call."""
        counts = self.reads, self.hashed
        self.reads = self.hashed = 0
        return counts


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def write(file: Path, *prompts: str) -> Path:
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": "a"}) + "\n" for prompt in prompts))
    return file


def load(store: ObjectStore, *paths: Path, use: DatasetUse = "prompt", **fields: Any) -> LoadedDataset:
    spec = FileDataset(path=str(paths[0]), further_paths=tuple(map(str, paths[1:])), **fields)
    return load_dataset(store, spec, use=use, provenance=PROVENANCE)


def test_an_unchanged_file_is_not_read_again(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    file = write(tmp_path / "rows.jsonl", "one", "two", "")
    first = load(store, file, on_bad_row="skip")
    assert first.new and counted.since() == (1, 1)
    again = load(store, file, on_bad_row="skip")
    assert again == first.model_copy(update={"new": False}) and again.skipped == 1
    assert counted.since() == (0, 0)
    # of another time, it is recognised by its content
    os.utime(file, (1, 1))
    assert load(store, file, on_bad_row="skip") == again and counted.since() == (0, 1)
    # of another folder, too
    (tmp_path / "moved").mkdir()
    moved = shutil.move(file, tmp_path / "moved")
    assert load(store, moved, on_bad_row="skip") == again and counted.since() == (0, 1)
    for info in store.list("files/"):
        assert key_patterns.classify_key(info.key) == "standalone"


def test_what_selects_the_rows_counts(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    file = write(tmp_path / "rows.jsonl", "one", "two")
    loaded = [load(store, file), load(store, file, limit=1), load(store, file, use="completion")]
    assert counted.since() == (3, 1) and len({data.ref.key for data in loaded}) == 3
    again = [load(store, file), load(store, file, limit=1), load(store, file, use="completion")]
    assert [data.ref for data in again] == [data.ref for data in loaded] and counted.since() == (0, 0)


def test_a_changed_file_is_read_again(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    file = write(tmp_path / "rows.jsonl", "one")
    first = load(store, file)
    status = file.stat()
    # as many bytes, and the same modification time
    write(file, "two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    counted.since()
    assert load(store, file).ref.key != first.ref.key and counted.since() == (1, 1)


def test_a_file_that_was_just_changed_is_not_trusted_by_its_times(
    store: ObjectStore, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_files, "SETTLED_SECONDS", 60.0)
    file = write(tmp_path / "rows.jsonl", "one")
    load(store, file)
    assert counted.since() == (1, 2)
    assert not load(store, file).new
    assert counted.since() == (0, 1)


def test_a_file_that_changes_while_it_is_read_is_not_recorded(
    store: ObjectStore, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "rows.jsonl", "one")
    read = RowsDataset.items

    def changing(*args: Any, **options: Any) -> Any:
        yield from read(*args, **options)
        write(file, "two")

    monkeypatch.setattr(RowsDataset, "items", changing)
    load(store, file)
    assert not list(store.list("files/loaded/"))


def test_patterns_and_several_files(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    for part in ("a", "b"):
        write(tmp_path / f"{part}.jsonl", part)
    further = write(tmp_path / "further.ndjson", "c")
    pattern = tmp_path / "?.jsonl"
    first = load(store, pattern, further)
    assert (first.rows, counted.since()) == (3, (1, 3))
    assert load(store, pattern, further).ref == first.ref and counted.since() == (0, 0)
    # another file that matches makes another dataset
    write(tmp_path / "c.jsonl", "d")
    assert load(store, pattern, further).rows == 4 and counted.since() == (1, 1)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"ref": 1}', b"\xff"])
def test_a_damaged_record_means_another_read(
    damage: bytes, store: ObjectStore, tmp_path: Path, counted: Counted
) -> None:
    file = write(tmp_path / "rows.jsonl", "one")
    first = load(store, file)
    for area, counts in (("files/loaded/", (1, 0)), ("files/seen/", (0, 1))):
        for info in store.list(area):
            store.put(info.key, damage)
        counted.since()
        assert load(store, file).ref == first.ref and counted.since() == counts
        # the record is written again
        assert load(store, file).ref == first.ref and counted.since() == (0, 0)


def test_a_dataset_that_was_removed_is_made_again(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    file = write(tmp_path / "rows.jsonl", "one")
    load(store, file)
    for info in store.list("datasets/"):
        store.delete(info.key)
    counted.since()
    assert load(store, file).new and counted.since() == (1, 0)


def test_rows_with_images_are_always_read(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    parts = [{"type": "image", "url": f"data:image/png;base64,{PIXEL}"}, {"type": "text", "text": "what?"}]
    file = tmp_path / "images.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert load(store, file).new and not load(store, file).new
    assert counted.since()[0] == 2


def test_small_files_leave_no_record(store: ObjectStore, tmp_path: Path) -> None:
    load(store, write(tmp_path / "rows.jsonl", "one"))
    assert not list(store.list("files/"))


def test_a_file_whose_name_is_not_utf8_is_recognised(store: ObjectStore, tmp_path: Path, counted: Counted) -> None:
    (folder := tmp_path / "rows").mkdir()
    write(folder / os.fsdecode(b"\xff.jsonl"), "one", "two")
    assert load(store, folder / "*.jsonl").rows == 2
    assert counted.since() == (1, 1)
    load(store, folder / "*.jsonl")
    assert counted.since() == (0, 0)
