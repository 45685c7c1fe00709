"""Tests of the tables that a process keeps after its commits: what a read returns, when it reads, and the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import storage.store.tables
from storage.errors import SchemaMismatch
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import ObjectStore, open_store
from storage.store.recent_tables import RecentTables
from storage.store.tables import SCHEMAS, TableWriter, commit_table, read_step_table, read_table

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


def graded(rewards: list[float | None]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for number, reward in enumerate(rewards):
        status = "masked" if reward is None else "ok"
        rows.append({"prompt_index": 0, "prompt_id": "p", "completion": number, "reward": reward, "status": status})
    return pa.Table.from_pylist(rows, schema=SCHEMAS["graded"])


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> RecentTables:
    """The cache of this process, empty."""
    recent = RecentTables()
    monkeypatch.setattr(storage.store.tables, "RECENT", recent)
    return recent


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are read from stores."""
    keys: list[str] = []
    get = ObjectStore.get

    def counted(self: ObjectStore, key: str) -> bytes:
        keys.append(key)
        return get(self, key)

    monkeypatch.setattr(ObjectStore, "get", counted)
    return keys


def commit(store: ObjectStore, key: str, table: pa.Table) -> ArtifactRef:
    return commit_table(store, key, table, kind="graded", provenance=PROVENANCE)


def test_what_this_process_committed_is_not_read(recent: RecentTables, reads: list[str], tmp_path: Path) -> None:
    store, table = open_store(tmp_path), graded([1.0, None, 0.5])
    ref = commit(store, "a/graded", table)
    with TableWriter("graded") as writer:
        writer.write(table.slice(0, 1))
        writer.write(table.slice(1))
        written = writer.commit(store, "b/graded", provenance=PROVENANCE)
    reads.clear()
    for committed in (ref, written):
        assert read_step_table(store, committed).equals(table)
        assert read_step_table(store, committed, ["reward", "status"]).equals(table.select(["reward", "status"]))
    assert reads == []
    # A read of the store gives the same.
    assert read_table(store, ref).equals(table) and read_table(store, written).equals(table)
    with pytest.raises(SchemaMismatch, match="no column"):
        read_step_table(store, ref, ["text"])


def test_what_another_writer_committed_first_is_read(
    recent: RecentTables, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    commit(store, "a/graded", graded([1.0]))
    # as in another process
    monkeypatch.setattr(storage.store.tables, "RECENT", RecentTables())
    ref = commit(store, "a/graded", graded([0.0]))
    assert read_step_table(store, ref).equals(graded([1.0]))
    assert any(key.endswith(".parquet") for key in reads)


def test_the_least_recently_used_table_is_dropped(tmp_path: Path) -> None:
    store, tables = open_store(tmp_path), [graded([float(n)] * 10) for n in range(4)]
    refs = [commit(store, f"{n}/graded", table) for n, table in enumerate(tables)]
    recent = RecentTables(max_bytes=2 * tables[0].nbytes)
    recent.add(store, refs[0], tables[0])
    recent.add(store, refs[1], tables[1])
    assert recent.find(store, refs[0]) is tables[0]
    recent.add(store, refs[2], tables[2])
    assert recent.find(store, refs[1]) is None
    assert recent.find(store, refs[0]) is tables[0] and recent.find(store, refs[2]) is tables[2]
    # Adding one again takes no more room, and one that is larger than the cache is not kept.
    recent.add(store, refs[2], tables[2])
    assert recent.find(store, refs[0]) is not None
    recent.add(store, refs[3], pa.concat_tables([tables[3]] * 3))
    assert recent.find(store, refs[3]) is None and recent.find(store, refs[2]) is not None


def test_the_number_of_tables_is_bounded(tmp_path: Path) -> None:
    # Thousands of small tables take much more memory than the bytes of their content.
    store, recent = open_store(tmp_path), RecentTables(max_tables=3)
    refs = []
    for n in range(5):
        table = graded([float(n)])
        refs.append(commit(store, f"{n}/graded", table))
        recent.add(store, refs[-1], table)
    assert [recent.find(store, ref) is not None for ref in refs] == [False, False, True, True, True]
