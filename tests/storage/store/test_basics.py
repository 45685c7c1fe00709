"""Keys, canonical JSON, failpoints, the work log, and what storage may import."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage import errors
from storage.errors import InvalidKey, PermanentStorageError, StorageError, TransientStorageError
from storage.failpoints import FAILPOINTS, failpoint
from storage.serialization import Frozen, canonical_json, digest, digest_file
from storage.store import keys
from storage.worklog import log_work

ROOT = Path(__file__).parents[3]


def test_the_layout_of_the_store() -> None:
    assert keys.run_json("r") == "runs/r/run.json"
    assert keys.result_json("nightly/2026-11-21T05-00") == "runs/nightly/2026-11-21T05-00/result.json"
    assert keys.report("r") == "runs/r/report.html"
    assert keys.lease("r", 3) == "runs/r/leases/000003.json"
    assert keys.stage_json("r", "0-sft") == "runs/r/stages/0-sft/stage.json"
    assert keys.stage_name(0, "sft") == "0-sft"
    assert [keys.stage_kind(stage) for stage in ("0-sft", "0-env_ppo.critic")] == ["sft", "env_ppo"]
    assert keys.step_artifact("r", "0-sft", 42, "rollouts", 3) == "runs/r/stages/0-sft/steps/000042/rollouts/00003"
    assert keys.step_metrics("r", "0-sft", 42) == "runs/r/stages/0-sft/metrics/000042.json"
    assert keys.chain_root("r", "0-sft", "policy") == "runs/r/stages/0-sft/chains/policy/root.json"
    assert keys.chain_record("r", "0-sft", "policy", 42) == "runs/r/stages/0-sft/chains/policy/000042.json"
    assert keys.checkpoint("r", "0-sft", "policy", 40) == "runs/r/stages/0-sft/checkpoints/policy/000040"
    assert keys.evaluation("r", "0-sft", "before") == "runs/r/stages/0-sft/evaluations/before"
    assert keys.model_version("smol", "v1") == "models/smol/v1"
    assert keys.model_alias("smol", "champion", 7) == "models/smol/aliases/champion/000007.json"
    assert keys.dataset("gsm8k", "abc").startswith("datasets/gsm8k/abc/")


def test_numbers_are_read_back() -> None:
    for step in (0, 42, 999_999, 1_000_000):
        assert keys.record_step(keys.chain_record("r", "s", "p", step)) == step
        assert keys.checkpoint_step(keys.manifest_of_files(keys.checkpoint("r", "s", "p", step))) == step
    assert keys.record_step(keys.chain_root("r", "s", "p")) is None
    # a checkpoint without a manifest does not count
    assert keys.checkpoint_step(keys.checkpoint("r", "s", "p", 40) + "/0123/model.safetensors") is None
    assert keys.checkpoint_step(keys.checkpoint("r", "s", "p", 40) + "/0123/manifest.json") is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".a", "-a", "a b", "ä", "a\n", "x" * 129, None, 3])
def test_bad_names(name: str) -> None:
    for spell in (
        lambda: keys.stage_json("r", name), lambda: keys.chain_root("r", "s", name), lambda: keys.dataset(name, "1"),
        lambda: keys.evaluation("r", "s", name), lambda: keys.model_version("m", name),
    ):  # fmt: skip
        with pytest.raises(InvalidKey, match="is not a name; give 1 to 128"):
            spell()


@pytest.mark.parametrize("run", ["", "a/b/c", "/a", "a/", "../a", "a/..", "a/stages", "a/leases"])
def test_bad_runs(run: str) -> None:
    with pytest.raises(InvalidKey):
        keys.run_json(run)


def keys_of_a_run(run: str) -> list[str]:
    """Returns the result of every function of `keys` that takes a run."""
    values = {"int": 1, "str": "a"}
    spelled = []
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters.values())
        if function.__module__ == keys.__name__ and parameters and parameters[0].name == "run" and "_run" not in name:
            spelled.append(function(run, *(values[str(parameter.annotation)] for parameter in parameters[1:])))
    return [key for key in spelled if isinstance(key, str)]


def test_no_run_lies_where_another_run_keeps_its_own_objects() -> None:
    run_parts = {key.split("/")[2] for key in keys_of_a_run("x") if key.count("/") >= 2} - {""}
    assert {"run.json", "result.json", "fork.json", "report.html", "leases", "loops", "stages"} <= run_parts
    for part in run_parts:
        with pytest.raises(InvalidKey, match=f"run 'x' keeps its own {part} there; rename it"):
            keys.validate_run(f"x/{part}")
        assert not keys.is_run(f"x/{part}")
        assert keys.is_run(part) and keys.is_run(f"x/{part}s")
    for run in ("x", "x/y", "run.json", "run.json/y", "stages/y", "x/run.jsons"):
        assert {keys.run_of(key) for key in keys_of_a_run(run) if key.count("/") > run.count("/") + 1} - {None} == {run}


def test_no_version_of_a_model_lies_where_the_registry_keeps_its_own_objects() -> None:
    registry_keys = [
        keys.model_claim("m", "1"), keys.model_alias("m", "latest", 1), keys.model_note("m", "decisions", "d"),
        keys.model_note("m", "cards", "d"),
    ]  # fmt: skip
    for part in (key.split("/")[2] for key in registry_keys):
        with pytest.raises(InvalidKey, match="the registry keeps its own objects there"):
            keys.model_version("m", part)


def test_numbers_below_zero() -> None:
    for spell in (lambda: keys.lease("r", -1), lambda: keys.step_artifact("r", "s", 0, "rollouts", -1)):
        with pytest.raises(InvalidKey, match="-1"):
            spell()


def test_canonical_json() -> None:
    expected = '{"a":{"ü":"\\n"},"b":[1,2.5,null,true]}'
    assert canonical_json({"b": [1, 2.5, None, True], "a": {"ü": "\n"}}) == expected.encode()
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json([value])

    class Point(Frozen):
        y: int = 2
        x: tuple[int, ...] = (1,)

    assert canonical_json(Point()) == b'{"x":[1],"y":2}'
    assert digest(Point()) == digest(b'{"x":[1],"y":2}') == digest({"x": [1], "y": 2})


def test_digests(tmp_path: Path) -> None:
    # digests of the empty string and of "abc": FIPS 180-4
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path = tmp_path / "large"
    path.write_bytes(b"abc" * 3_000_000)
    assert digest_file(path) == (digest(b"abc" * 3_000_000), 9_000_000)


def test_every_error_says_whether_to_try_again() -> None:
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, StorageError)]
    for kind in set(kinds) - {StorageError, TransientStorageError, PermanentStorageError}:
        assert issubclass(kind, TransientStorageError) != issubclass(kind, PermanentStorageError)
        assert kind.transient is issubclass(kind, TransientStorageError)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


def test_a_failpoint_kills_at_the_hit_that_was_asked_for() -> None:
    code = (
        "from storage.failpoints import failpoint\n"
        "for i in range(5):\n"
        "    failpoint('batch.after_data'); failpoint('step.before_commit'); print(i, flush=True)"
    )
    killed = run_python(code, OSTINATO_FAILPOINT="step.before_commit:3")
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, ["0", "1"])
    assert run_python(code, OSTINATO_FAILPOINT="step.before_commit").stdout == ""
    assert run_python(code, OSTINATO_FAILPOINT="").stdout.split() == ["0", "1", "2", "3", "4"]
    assert run_python(code, OSTINATO_FAILPOINT="grade.after_data").returncode == 0


def test_unknown_failpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown failpoint 'rollout\.aftr_data'"):
        failpoint("rollout.aftr_data")
    monkeypatch.setenv("OSTINATO_FAILPOINT", "step.before_comit:1")
    with pytest.raises(ValueError, match="names no failpoint; known: artifact"):
        failpoint("step.before_commit")


def test_every_failpoint_is_somewhere() -> None:
    """A failpoint that no code reaches would make a crash test pass without a crash."""
    files: list[Path] = []
    for layer in ("storage", "engine", "tasks", "flows"):
        files += (ROOT / layer).rglob("*.py")
    text = "\n".join(path.read_text() for path in files)
    called = set(re.findall(r'failpoint\("([a-z_.]+)"\)', text))
    # artifacts._reach_failpoint makes the names of these
    moments = {"before_data", "after_data", "mid_upload", "before_manifest", "after_manifest"}
    assert {name for name in FAILPOINTS if name.partition(".")[2] not in moments} == called


def test_the_work_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_WORKLOG", raising=False)
    log_work("nothing")
    path = tmp_path / "work.jsonl"
    monkeypatch.setenv("OSTINATO_WORKLOG", str(path))
    log_work("step", step=3, path=tmp_path)
    log_work("done")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["event"], first["step"], first["pid"], first["path"]) == ("step", 3, os.getpid(), str(tmp_path))
    assert second["event"] == "done" and second["time"] >= first["time"] > 1_600_000_000


def test_storage_needs_neither_torch_nor_prefect() -> None:
    modules = [f"storage.{path.stem}" for path in (ROOT / "storage").glob("*.py") if path.stem != "__init__"]
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'prefect', 'transformers', 'engine', 'tasks', 'flows'): sys.modules[name] = None\n"
        f"for name in {[*modules, 'storage.store.backends.s3']!r}: importlib.import_module(name)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    without_s3 = run_python(
        "import storage.store.objects, storage.store.artifacts, storage.chain.records, storage.registry.models, sys\n"
        "print([name for name in ('s3fs', 'botocore', 'aiohttp') if name in sys.modules])"
    )
    assert without_s3.stdout.strip() == "[]", without_s3.stderr
