"""Recovery checkpoints beyond the last few are removed; named ones stay, whenever they got their name."""

from __future__ import annotations

from pathlib import Path

from storage import keys
from storage.artifacts import Provenance, commit_files, find_artifact
from storage.chain import PolicyRef
from storage.objects import ObjectStore, open_store
from storage.retention import prune_checkpoints

POLICY = PolicyRef(run="r", stage="0-s", model="policy", step=9, state="s")


def write(store: ObjectStore, folder: Path, step: int, name: str | None = None) -> str:
    file = folder / "weights.safetensors"
    file.write_bytes(b"weights")
    key = keys.checkpoint("r", "0-s", "policy", step)
    provenance = Provenance(code_version="test", config_digest="0" * 64, seed=0)
    commit_files(store, key, {file.name: file}, kind="checkpoint", provenance=provenance, extra={"name": name})
    return key


def test_named_checkpoints_neither_go_nor_count(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    written = {step: write(store, tmp_path, step, "kept" if step in (2, 6, 7, 8) else None) for step in range(1, 9)}
    store.put_if_absent(keys.checkpoint_name(written[3]), b'{"name":"named later"}')
    # unnamed: 1, 4, 5; the last two of them stay
    assert prune_checkpoints(store, POLICY, keep_last=2) == [1]
    assert [step for step, key in written.items() if find_artifact(store, key) is None] == [1]
    assert not list(store.list(written[1] + "/"))
    assert prune_checkpoints(store, POLICY, keep_last=2) == []
