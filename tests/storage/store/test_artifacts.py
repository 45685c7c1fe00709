"""The commit protocol: manifest last, first writer wins, digests checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from storage.errors import (
    AttemptTooOld,
    CorruptArtifact,
    InvalidKey,
    ObjectNotFound,
    SchemaMismatch,
    StorageUnavailable,
)
from storage.registry.models import find_model, publish_model, resolve_alias
from storage.serialization import FileDigest, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import (
    ArtifactRef,
    FileEntry,
    Provenance,
    commit_bytes,
    commit_file,
    commit_files,
    find_artifact,
    read_bytes,
    read_manifest,
)
from storage.store.backends.memory import MemoryBackend
from storage.store.backends.protocol import PutResult
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def memory() -> ObjectStore:
    return open_store(f"memory://artifacts-{uuid4().hex}")


def write_files(folder: Path, **files: str) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in files}


def commit_text(store: ObjectStore, text: str = "hello", **options: object) -> ArtifactRef:
    return commit_bytes(
        store, "runs/r/x", text.encode(), kind="thing", suffix=".txt", provenance=PROVENANCE, **options  # type: ignore[arg-type]
    )


def test_a_manifest_says_what_made_the_artifact(store: ObjectStore) -> None:
    base = commit_bytes(store, "runs/r/base", b"b", kind="base", suffix=".bin", provenance=PROVENANCE)
    ref = commit_text(store, rows=3, parents=(base, "policy:r/0-sft/m@1#ff"), extra={"note": [1, None]})
    # sha256 of b"hello", from the sha256sum tool
    sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    parents = (f"runs/r/base#{base.sha256}", "policy:r/0-sft/m@1#ff")
    assert ref == ArtifactRef(kind="thing", key="runs/r/x", sha256=sha256, bytes=5, rows=3, parents=parents)
    assert ref.uri == f"runs/r/x#{sha256}"
    manifest = read_manifest(store, "runs/r/x")
    (entry,) = manifest.files
    assert entry == FileEntry(name=Path(entry.key).name, key=f"runs/r/x.{manifest.attempt}.txt", sha256=sha256, bytes=5)
    assert (manifest.provenance, manifest.extra, manifest.schema_version) == (PROVENANCE, {"note": [1, None]}, 1)
    assert manifest.created.endswith("+00:00")
    assert read_bytes(store, ref) == b"hello"
    assert ArtifactRef.model_validate_json(ref.model_dump_json()) == ref


def test_the_digest_of_a_folder_is_that_of_its_names_and_contents(store: ObjectStore, tmp_path: Path) -> None:
    ref = commit_files(
        store, "c/1", write_files(tmp_path / "a", b="2", a="1"), kind="checkpoint", provenance=PROVENANCE
    )
    pairs = [["a", digest(b"1")], ["b", digest(b"2")]]
    assert ref.sha256 == digest(canonical_json(pairs))
    assert ref.bytes == 2
    one_file = write_files(tmp_path / "b", a="1")
    ref_of_one_file = commit_files(store, "c/2", one_file, kind="checkpoint", provenance=PROVENANCE)
    assert ref_of_one_file.sha256 == digest(b"1")


def test_other_processes_upload_some_of_the_files(memory: ObjectStore, tmp_path: Path) -> None:
    files = write_files(tmp_path, a="1", b="22", c="333")

    def upload(places: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        """A process with the file `a` alone. It takes `b` to another store by mistake."""
        key, path = places["a"]
        memory.put(key, path.read_bytes())
        path.unlink()
        return {"a": FileDigest(digest(b"1"), 1), "b": FileDigest(digest(b"22"), 2)}

    ref = commit_files(memory, "c", files, kind="checkpoint", provenance=PROVENANCE, upload=upload)
    entries = read_manifest(memory, "c").files
    assert [(entry.name, entry.sha256, entry.bytes) for entry in entries] == [
        ("a", digest(b"1"), 1), ("b", digest(b"22"), 2), ("c", digest(b"333"), 3),
    ]  # fmt: skip
    assert [memory.get(entry.key) for entry in entries] == [b"1", b"22", b"333"]
    assert ref.bytes == 6

    # A file that nobody has: nothing is committed.
    with pytest.raises(FileNotFoundError):
        commit_files(memory, "d", files, kind="checkpoint", provenance=PROVENANCE, upload=lambda places: {})
    assert find_artifact(memory, "d") is None


def test_a_file_too_large_for_memory_is_committed_like_bytes(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"hello")
    ref = commit_file(store, "d/x", path, kind="thing", suffix=".txt", provenance=PROVENANCE)
    assert ref.sha256 == commit_text(store).sha256
    assert read_bytes(store, ref) == b"hello"


def test_the_second_committer_gets_the_firsts_artifact_and_leaves_nothing(memory: ObjectStore, tmp_path: Path) -> None:
    first = commit_text(memory, "first")
    assert commit_text(memory, "second, longer", rows=9) == first
    assert len(list(memory.list())) == 2
    ref = commit_files(memory, "c", write_files(tmp_path / "1", a="1", b="2"), kind="k", provenance=PROVENANCE)
    assert commit_files(memory, "c", write_files(tmp_path / "2", a="x"), kind="k", provenance=PROVENANCE) == ref
    assert len(list(memory.list("c/"))) == 3


def test_a_loser_whose_data_cannot_be_removed_returns_all_the_same(
    memory: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit_text(memory, "first")

    def refuse(_: str) -> None:
        raise StorageUnavailable("injected")

    monkeypatch.setattr(memory, "delete", refuse)
    assert commit_text(memory, "second") == first


def test_what_is_not_committed_is_not_found(store: ObjectStore, tmp_path: Path) -> None:
    store.put("runs/r/x.0123.txt", b"data without a manifest")
    assert find_artifact(store, "runs/r/x") is None
    with pytest.raises(ObjectNotFound, match="no artifact 'runs/r/x' is committed"):
        read_manifest(store, "runs/r/x")
    with pytest.raises(ObjectNotFound):
        materialise_files(store, "runs/r/x", tmp_path)


@pytest.mark.parametrize("damage", [b"", b"hell", b"hellp", b"hello!"])
def test_data_that_is_not_what_the_manifest_says_is_corrupt(store: ObjectStore, damage: bytes) -> None:
    ref = commit_text(store)
    store.put(read_manifest(store, ref.key).files[0].key, damage)
    with pytest.raises(CorruptArtifact, match="its manifest says 5 with 2cf24dba5fb0"):
        read_bytes(store, ref)


def test_data_that_is_gone_is_corrupt(store: ObjectStore, tmp_path: Path) -> None:
    ref = commit_text(store)
    store.delete(read_manifest(store, ref.key).files[0].key)
    with pytest.raises(CorruptArtifact, match=r"its data .* is gone"):
        read_bytes(store, ref)
    with pytest.raises(CorruptArtifact, match="is gone"):
        materialise_files(store, ref.key, tmp_path)


ONE_FILE = [
    keys.step_artifact("r/2026", "0-grpo", 12, "rollouts", 3), keys.evaluation("r", "1-dpo", "maths"),
    keys.dataset("gsm8k", "1f" * 20), keys.model_note("m", "decisions", "first"),
    keys.model_note("m", "cards", "first"),
]  # fmt: skip
FOLDERS = [
    keys.checkpoint("r/2026", "0-grpo", "policy", 12), keys.rebase_checkpoint("r", "0-s", "policy", 12, "0f" * 16),
    keys.model_version("m", "1"), keys.upload("m", "0f" * 32),
]  # fmt: skip


@pytest.mark.parametrize("key", [*ONE_FILE, *FOLDERS])
def test_an_artifact_is_found_with_one_request(memory: ObjectStore, tmp_path: Path, key: str) -> None:
    """Also one that does not exist: a step looks for each of its artifacts before it makes it."""
    requests: list[str] = []
    get = memory.backend.get

    def counted(asked: str) -> bytes:
        requests.append(asked)
        return get(asked)

    memory.backend.get = counted  # type: ignore[method-assign]
    assert find_artifact(memory, key) is None
    assert len(requests) == 1
    files = write_files(tmp_path / "a", a="1")
    if key in FOLDERS:
        ref = commit_files(memory, key, files, kind="k", provenance=PROVENANCE)
    else:
        ref = commit_file(memory, key, files["a"], kind="k", suffix=".x", provenance=PROVENANCE)
    requests.clear()
    assert find_artifact(memory, key) == ref
    assert len(requests) == 1


def test_a_torn_file_of_a_folder_is_corrupt(memory: ObjectStore, store: ObjectStore, tmp_path: Path) -> None:
    for where in (memory, store):
        commit_files(where, "c", write_files(tmp_path / "a", a="11", b="22"), kind="k", provenance=PROVENANCE)
        entry = next(e for e in read_manifest(where, "c").files if e.name == "b")
        where.put(entry.key, b"2")
        assert materialise_files(where, "c", tmp_path / "to", names=["a"])["a"].read_text() == "11"
        with pytest.raises(CorruptArtifact, match="has 1 bytes"):
            materialise_files(where, "c", tmp_path / "to")


def test_a_reference_to_another_artifact_of_that_key_is_refused(store: ObjectStore) -> None:
    ref = commit_text(store)
    with pytest.raises(CorruptArtifact, match="the reference says ffff"):
        read_bytes(store, ref.model_copy(update={"sha256": "ffff"}))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"new_field_of_a_later_version": 1},
        {"sha256": None},
        {"files": []},
        {"files": [{"name": "../../etc/x", "key": "a", "sha256": "0", "bytes": 1}]},
        {"files": [{"name": "a", "key": "/etc/passwd", "sha256": "0", "bytes": 1}]},
        {"key": "runs/r/another"},
    ],
)
def test_an_unreadable_manifest_is_corrupt(store: ObjectStore, change: dict[str, object]) -> None:
    commit_text(store)
    key = keys.manifest("runs/r/x")
    body = json.loads(store.get(key))
    store.put(key, json.dumps(body | change).encode())
    with pytest.raises(CorruptArtifact, match=r"runs/r/x\.json"):
        find_artifact(store, "runs/r/x")
    store.put(key, json.dumps(body).encode()[:-20])
    with pytest.raises(CorruptArtifact, match=r"runs/r/x\.json"):
        read_manifest(store, "runs/r/x")


def test_stored_files_are_used_where_they_are(store: ObjectStore, memory: ObjectStore, tmp_path: Path) -> None:
    for where in (store, memory):
        commit_files(where, "c", write_files(tmp_path / "a", x="1", y="2"), kind="k", provenance=PROVENANCE)
    local = materialise_files(store, "c", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert len({path.parent for path in local.values()}) == 1
    downloads = materialise_files(memory, "c", tmp_path / "to")
    assert downloads == {"x": tmp_path / "to/x", "y": tmp_path / "to/y"}
    (tmp_path / "to/x").write_text("spoilt")
    assert materialise_files(memory, "c", tmp_path / "to")["x"].read_text() == "1"


def test_odd_files_are_refused_before_anything_is_stored(store: ObjectStore, tmp_path: Path) -> None:
    files = write_files(tmp_path / "a", x="1")
    for name in ("../x", "/x", "a b", "manifest.json"):
        with pytest.raises(InvalidKey):
            commit_files(store, "c", {name: files["x"]}, kind="k", provenance=PROVENANCE)
    with pytest.raises(ValueError, match="at least one file"):
        commit_files(store, "c", {}, kind="k", provenance=PROVENANCE)
    with pytest.raises(FileNotFoundError):
        commit_files(store, "c", {"y": tmp_path / "absent"}, kind="k", provenance=PROVENANCE)
    with pytest.raises(SchemaMismatch, match="of 2 files, and one file was expected"):
        ref = commit_files(store, "d", {"a": files["x"], "b": files["x"]}, kind="k", provenance=PROVENANCE, move=False)
        read_bytes(store, ref)
    assert list(store.list("c")) == []


def test_the_manifest_is_written_last(memory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever an artifact is committed, each of its files is readable and complete."""
    commits = []
    put_if_absent = memory.put_if_absent

    def watching(key: str, data: bytes) -> PutResult:
        body = json.loads(data)
        if "files" in body:
            commits.append(key)
            for entry in body["files"]:
                assert digest(memory.get(entry["key"])) == entry["sha256"]
        return put_if_absent(key, data)

    monkeypatch.setattr(memory, "put_if_absent", watching)
    commit_text(memory)
    (tmp_path / "data").write_bytes(b"1")
    commit_file(memory, "f", tmp_path / "data", kind="k", suffix=".x", provenance=PROVENANCE)
    commit_files(memory, "c", write_files(tmp_path / "a", x="1", y="2"), kind="checkpoint", provenance=PROVENANCE)
    publish_model(memory, "m", "1", write_files(tmp_path / "b", x="1", y="2"), provenance=PROVENANCE)
    assert commits == ["runs/r/x.json", "f.json", "c/manifest.json", "models/m/1/manifest.json"]


CHILD = """
import sys
from pathlib import Path
from storage.store.artifacts import Provenance, commit_bytes, commit_file, commit_files
from storage.store.objects import open_store
from storage.registry.models import publish_model

how, root = sys.argv[1], Path(sys.argv[2])
store = open_store(str(root / "store"))
provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
for name in ("x", "y"):
    (root / name).write_text(name * 1000)
files = {"x": root / "x", "y": root / "y"}
if how == "bytes":
    commit_bytes(store, "a/rollouts", b"x" * 1000, kind="rollouts", suffix=".bin", provenance=provenance)
elif how == "file":
    commit_file(store, "a/rollouts", files["x"], kind="rollouts", suffix=".bin", provenance=provenance)
elif how == "files":
    commit_files(store, "a/checkpoint", files, kind="checkpoint", provenance=provenance)
else:
    publish_model(store, "m", "1", files, provenance=provenance)
"""
ARTIFACTS = {"bytes": "a/rollouts", "file": "a/rollouts", "files": "a/checkpoint", "model": "models/m/1"}


def run_child(how: str, folder: Path, failpoint: str | None) -> int:
    environment = {k: v for k, v in os.environ.items() if k != "OSTINATO_FAILPOINT"}
    if failpoint:
        environment["OSTINATO_FAILPOINT"] = failpoint
    root = Path(__file__).parents[3]
    return subprocess.run([sys.executable, "-c", CHILD, how, str(folder)], cwd=root, env=environment).returncode


@pytest.mark.parametrize(
    ("how", "failpoint", "files_stored"),
    [
        ("bytes", "rollout.before_data", 0),
        ("bytes", "rollout.after_data", 1),
        ("bytes", "artifact.after_data", 1),
        ("file", "rollout.after_data", 1),
        ("files", "checkpoint.mid_upload", 1),
        ("files", "checkpoint.before_manifest", 2),
        ("model", "model.mid_upload", 1),
        ("model", "model.before_manifest", 2),
    ],
)
def test_a_reader_never_sees_data_without_its_manifest(
    tmp_path: Path, how: str, failpoint: str, files_stored: int
) -> None:
    """A process that is killed between data and manifest leaves no artifact; a repetition commits it whole."""
    store, key = open_store(str(tmp_path / "store")), ARTIFACTS[how]
    assert run_child(how, tmp_path, failpoint) == -signal.SIGKILL
    stored = [info for info in store.list() if "claims" not in info.key]
    assert [info.size for info in stored] == [1000] * files_stored  # the data is complete, but has no manifest
    assert find_artifact(store, key) is None
    assert find_model(store, "m") is None and resolve_alias(store, "m") is None

    assert run_child(how, tmp_path, None) == 0
    assert find_artifact(store, key) is not None
    for path in materialise_files(store, key, tmp_path / "to").values():
        assert path.stat().st_size == 1000
    assert how != "model" or resolve_alias(store, "m") == "1"


@pytest.mark.parametrize("how", ["bytes", "files"])
def test_killed_after_its_manifest_an_artifact_stands(tmp_path: Path, how: str) -> None:
    store, key = open_store(str(tmp_path / "store")), ARTIFACTS[how]
    assert run_child(how, tmp_path, "artifact.after_manifest") == -signal.SIGKILL
    before = find_artifact(store, key)
    assert before is not None
    objects = list(store.list())
    assert run_child(how, tmp_path, None) == 0
    assert find_artifact(store, key) == before
    assert list(store.list()) == objects


class Hours:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.hours = 0.0

    def __call__(self) -> float:
        return self.hours * 3600


def slow_store(clock: Hours, hours_at: str, hours: float) -> ObjectStore:
    """A store one of whose calls takes `hours`."""
    store = ObjectStore(MemoryBackend(f"slow-{uuid4().hex}", clock), clocks=(lambda: 0.0, clock))
    real = getattr(store, hours_at)

    def slow(*arguments: object, **named: object) -> object:
        clock.hours += hours
        return real(*arguments, **named)

    setattr(store, hours_at, slow)
    return store


@pytest.mark.parametrize("how", ["bytes", "file", "files", "model"])
def test_an_attempt_older_than_half_a_day_is_not_committed(tmp_path: Path, how: str) -> None:
    for hours, committed in ((11.9, True), (12.1, False)):
        upload = "put" if how == "bytes" else "put_file"
        store = slow_store(Hours(), upload, hours)
        files = write_files(tmp_path / "f", a="1")

        def commit(store: ObjectStore = store, files: dict[str, Path] = files) -> ArtifactRef:
            if how == "bytes":
                return commit_bytes(store, "k", b"1", kind="k", suffix=".x", provenance=PROVENANCE)
            if how == "file":
                return commit_file(store, "k", files["a"], kind="k", suffix=".x", provenance=PROVENANCE)
            if how == "files":
                return commit_files(store, "k", files, kind="k", provenance=PROVENANCE)
            return publish_model(store, "m", "1", files, provenance=PROVENANCE)

        key = "models/m/1" if how == "model" else "k"
        if committed:
            assert commit() == find_artifact(store, key)
        else:
            with pytest.raises(AttemptTooOld, match=r"began 12\.1 h ago.*make it again") as caught:
                commit()
            assert caught.value.transient
            assert find_artifact(store, key) is None


def test_a_writer_frozen_at_its_commit_takes_it_back_if_the_data_is_gone() -> None:
    clock = Hours()
    store = slow_store(clock, "put_if_absent", 25)
    real = store.put_if_absent

    def collected_meanwhile(key: str, data: bytes) -> PutResult:
        for info in list(store.list()):
            store.delete(info.key)
        return real(key, data)

    store.put_if_absent = collected_meanwhile  # type: ignore[method-assign]
    with pytest.raises(AttemptTooOld):
        commit_bytes(store, "k", b"1", kind="k", suffix=".x", provenance=PROVENANCE)
    assert list(store.list()) == []
    store.put_if_absent = real  # type: ignore[method-assign]
    ref = commit_bytes(store, "k", b"1", kind="k", suffix=".x", provenance=PROVENANCE)
    assert read_bytes(store, ref) == b"1"  # the commit was late, but nothing was collected
