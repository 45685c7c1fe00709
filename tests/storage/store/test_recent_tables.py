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
from storage.store.tables import (
    SCHEMAS,
    RecentTables,
    TableWriter,
    commit_table,
    read_step_table,
    read_table,
    table_schema,
)

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
        assert read_step_table(store, committed, []).column_names == read_table(store, committed, []).column_names == []
        reads.clear()
    assert reads == []
    # A read of the store gives the same.
    assert read_table(store, ref).equals(table) and read_table(store, written).equals(table)
    with pytest.raises(SchemaMismatch, match="no column"):
        read_step_table(store, ref, ["text"])


IMAGE = {"start": 1, "tokens": 2, "data": b"\x89PNG"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "rollouts": [
        {"seed": 2**64 - 1, "token_ids": [1, 2, 4], "logprobs": [-0.5], "stop_reasons": ["eos"], "images": [IMAGE]},
        {"seed": 0, "token_ids": [1], "logprobs": [], "stop_reasons": [], "images": None},
        {"seed": 7, "token_ids": [5, 7, 8], "logprobs": [-1.5, -0.1], "images": [IMAGE] * 2},
    ],
    "episodes": [
        {"token_ids": [1, 2], "loss_mask": [False, True], "turn_tokens": [1], "graded_turns": [], "grades": []},
        {"token_ids": [3], "loss_mask": [False], "turn_tokens": [], "graded_turns": [0, 2], "grades": [0.1, 1e-300]},
        {"token_ids": [], "loss_mask": [], "turn_tokens": [], "graded_turns": [], "grades": [], "reason": "late"},
    ],
    "batch": [
        {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "advantages": [0.1, -1.0], "images": [IMAGE]},
        {"token_ids": [9], "loss_mask": [False], "advantages": [], "preferred": True, "images": None},
        {"token_ids": [4, 5], "loss_mask": [False, True], "advantages": None, "reward": 0.5, "images": [IMAGE]},
    ],
}
"""Ragged and empty lists, booleans, nulls, images, and numbers at the ends of their types."""


def kind_of(name: str) -> str:
    """The kind of table of these ROWS. Episodes are rollouts with the columns of an environment."""
    return "rollouts" if name == "episodes" else name


def table_of(kind: str) -> pa.Table:
    """The ROWS of this kind. Required columns that they leave out have the same value in each row."""
    values = {pa.string(): "é", pa.int32(): 3, pa.int64(): -1}
    schema, rows = table_schema(kind_of(kind), set().union(*ROWS[kind])), []
    for row in ROWS[kind]:
        others = {field.name: values.get(field.type, []) for field in schema if not field.nullable}
        rows.append(others | row)
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_kept_table_is_the_table_of_the_store(
    rows: str, in_parts: bool, recent: RecentTables, reads: list[str], tmp_path: Path
) -> None:
    """Also where it is a slice of a larger table, and where some rows lack an optional column."""
    store, table, kind = open_store(tmp_path), table_of(rows), kind_of(rows)
    if in_parts:
        with TableWriter(kind) as writer:
            writer.write(pa.concat_tables([table, table]).slice(1, 3).slice(2))  # the first row
            last = table.slice(1)
            writer.write(last.slice(0, 1).drop_columns(["images"] if "images" in table.column_names else []))
            writer.write(last.slice(1).to_pylist())
            ref = writer.commit(store, "a", provenance=PROVENANCE)
    else:
        ref = commit_table(store, "a", table, kind=kind, provenance=PROVENANCE)
    reads.clear()
    kept = read_step_table(store, ref)
    assert reads == []
    read = read_table(store, ref)
    assert any(key.endswith(".parquet") for key in reads)
    for other in (read, table):
        assert kept.schema.equals(other.schema) and kept.equals(other) and kept.to_pylist() == other.to_pylist()
    some = ["token_ids", "loss_mask", *(["images"] if kind == "rollouts" else [])]
    assert read_step_table(store, ref, some).equals(read_table(store, ref, some))
    # A table that is made of either has the same bytes, also of both: the shards of a step may be kept or read.
    shards = {"b": [kept, kept], "c": [read, read], "d": [kept, read]}
    made = [
        commit_table(store, key, pa.concat_tables(two), kind=kind, provenance=PROVENANCE) for key, two in shards.items()
    ]
    assert len({other.sha256 for other in made}) == 1


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
