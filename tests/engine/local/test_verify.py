"""Tests of verification and replay: a verification names the step and the first tensor that differ, and a replay
compares one step."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec, PermanentEngineError, UnknownPolicy
from engine.local import verify
from engine.local.engine import LocalEngine
from engine.local.replay import WhatIf, replay_step
from engine.local.verify import VerifyReport, verify_run
from engine.protocol import PolicySpec
from engine.specs.adapters import LoraSpec
from storage.chain.fork import fork_run
from storage.chain.records import Chain, CommitRecord, Root
from storage.inspect.audit import audit_store
from storage.registry.models import list_models, list_versions
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, request_after
from tests.fixtures.runs.toy_run import ToyRun

CHAIN = ("toy", "0-grpo", "policy")


@pytest.fixture
def broken(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def everything(folder: Path) -> dict[str, str]:
    """Digest of every file below."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def only(report: VerifyReport) -> str:
    assert len(report.problems) == 1, report.problems
    return f"{report.problems[0].key}: {report.problems[0].what}"


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(path.read_bytes())
    change(body)
    path.write_bytes(canonical_json(body))


def flip_in_tensor(path: Path, tensor: str) -> None:
    """One bit of the last byte of that tensor, by the layout of safetensors files: length, JSON header, data."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"][1]
    data[8 + length + end - 1] ^= 1
    path.write_bytes(data)


def checkpoint_file(run: ToyRun, step: int, name: str) -> Path:
    manifest = read_manifest(run.store, keys.checkpoint(*CHAIN, step))
    return run.folder / next(entry.key for entry in manifest.files if entry.name == name)


def tensors_of(path: Path) -> list[str]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return sorted(name for name in json.loads(data[8 : 8 + length]) if name != "__metadata__")


@pytest.mark.parametrize("from_checkpoints", [False, True])
def test_a_run_comes_out_as_it_was_committed(toy_run: ToyRun, from_checkpoints: bool) -> None:
    before, seen = everything(toy_run.folder), []
    report = verify_run(
        toy_run.store, "toy", from_checkpoints=from_checkpoints, on_step=lambda *step: seen.append(step)
    )
    (chain,) = report.chains
    assert (chain.steps, chain.redone, chain.digests, chain.checkpoints, chain.models) == (4, 4, 4, 2, 1)
    assert chain.notes == chain.problems == ()
    assert seen == [("toy/0-grpo/policy", n, 4) for n in (1, 2, 3, 4)]
    assert everything(toy_run.folder) == before  # nothing is written


def test_a_sample_redoes_some_segments(toy_run: ToyRun) -> None:
    (chain,) = verify_run(toy_run.store, "toy", sample=1).chains
    assert (chain.redone, chain.problems) == (2, ())  # checkpoints are at 2 and 4


def test_the_first_tensor_of_a_broken_checkpoint_is_named(broken: ToyRun) -> None:
    path = checkpoint_file(broken, 2, "weights.safetensors")
    names = tensors_of(path)
    for tensor in (names[3], names[1]):
        flip_in_tensor(path, tensor)
    problem = only(verify_run(broken.store, "toy"))
    assert problem.startswith(f"{keys.checkpoint(*CHAIN, 2)}: the checkpoint of step 2 differs")
    assert problem.endswith(f"the first tensor of weights.safetensors that differs is {names[1]}")


def test_the_first_tensor_of_a_broken_published_model_is_named(broken: ToyRun) -> None:
    (version,) = list_versions(broken.store, "toy")
    manifest = read_manifest(broken.store, keys.model_version("toy", version))
    path = broken.folder / next(entry.key for entry in manifest.files if entry.name == "model.safetensors")
    first = tensors_of(path)[0]
    flip_in_tensor(path, first)
    problem = only(verify_run(broken.store, "toy"))
    assert problem.startswith(manifest.key)
    assert f"the first tensor of model.safetensors that differs is {first}" in problem


def test_an_unreadable_manifest_of_a_model_is_reported_and_stops_nothing(broken: ToyRun) -> None:
    (version,) = list_versions(broken.store, "toy")
    key = keys.model_version("toy", version)
    (broken.folder / keys.manifest_of_files(key)).write_bytes(b"{")
    report = verify_run(broken.store, "toy")
    assert only(report).startswith(key)
    assert (report.chains[0].redone, report.chains[0].checkpoints, report.chains[0].models) == (4, 2, 0)


def test_moments_are_compared_too(broken: ToyRun) -> None:
    path = checkpoint_file(broken, 4, "optimizer.safetensors")
    tensor = next(name for name in tensors_of(path) if name.startswith("exp_avg_sq."))
    flip_in_tensor(path, tensor)
    assert only(verify_run(broken.store, "toy")).endswith(
        f"the first tensor of optimizer.safetensors that differs is {tensor}"
    )


def test_a_false_digest_names_the_step(broken: ToyRun) -> None:
    path = broken.folder / keys.chain_record(*CHAIN, 3)
    rewrite(path, lambda body: body.update(weights_digest="0" * 64, tensor_digests=[]))
    problem = only(verify_run(broken.store, "toy"))
    assert problem.startswith(f"{keys.chain_record(*CHAIN, 3)}: step 3 differs")
    assert problem.endswith("recorded 000000000000; the record names no tensors")


def test_a_record_with_tensor_digests_names_the_first_tensor(broken: ToyRun) -> None:
    names = tensors_of(checkpoint_file(broken, 2, "weights.safetensors"))
    report = replay_step(broken.chain, 3)
    assert report.weights_equal

    def tamper(body: dict[str, Any]) -> None:
        digests = list(body["tensor_digests"]) or ["f" * 8] * len(names)
        body["tensor_digests"] = [*digests[:2], "0" * 8, *digests[3:]]
        body["weights_digest"] = "0" * 64

    record = broken.chain.record(3)
    assert record is not None
    rewrite(broken.folder / keys.chain_record(*CHAIN, 3), tamper)
    expected = names[2] if record.tensor_digests else names[0]
    assert only(verify_run(broken.store, "toy")).endswith(f"the first tensor that differs is {expected}")


def test_a_chain_redone_under_other_numerics_says_so(broken: ToyRun) -> None:
    def tamper(body: dict[str, Any]) -> None:
        body["numerics"]["versions"]["torch"] = "1.0"
        body["weights_digest"] = "0" * 64
        body["update_sketch"] = ""

    rewrite(broken.folder / keys.chain_record(*CHAIN, 1), tamper)
    report = verify_run(broken.store, "toy")
    (note,) = report.chains[0].notes
    assert note.startswith("torch: committed under 1.0, redone under ")
    assert note in only(report)
    assert "with the versions that made it" in report.problems[0].what_to_do


def test_altered_batch_bytes_are_found_without_redoing_them(broken: ToyRun) -> None:
    batch = keys.step_artifact("toy", "0-grpo", 0, "batch", 0)
    path = broken.folder / read_manifest(broken.store, batch).files[0].key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    problems = verify_run(broken.store, "toy", stage="0-grpo", model="policy").problems
    assert keys.chain_record(*CHAIN, 1) in {problem.key for problem in problems}
    assert any(str(path.relative_to(broken.folder)) in problem.what for problem in problems)


def test_a_fork_verifies_by_itself(broken: ToyRun) -> None:
    fork_run(broken.store, "toy", "new", step=3, code_version="test")
    (chain,) = verify_run(broken.store, "new").chains
    assert (chain.steps, chain.digests, chain.checkpoints, chain.problems) == (3, 3, 1, ())


def test_a_chain_that_is_not_there(toy_run: ToyRun) -> None:
    with pytest.raises(PermanentEngineError, match="no chain \\*/value .* it has 0-grpo/policy"):
        verify_run(toy_run.store, "toy", model="value")


# -- stages ----------------------------------------------------------------------------------------------------


async def two_stages(url: str, folder: Path, trainable: dict[str, Any]) -> None:
    """Run `r`: two steps of stage 0, two of a stage that goes on from there, a checkpoint at the end of each."""
    engine = LocalEngine(url, DETERMINISTIC)
    base = await engine.import_model(str(folder), provenance=PROVENANCE)
    root = Root(base=base, base_digest=base.sha256, trainable=trainable, init_seed=3)
    for stage in ("0-a", "1-b"):
        policy = await engine.create_policy(PolicySpec(run="r", stage=stage, model="policy", root=root))
        for _ in range(2):
            batch = commit_batch(engine.store, policy)
            policy = (await engine.take_gradient_step(request_after(policy, batch, lr=0.01))).policy
        await engine.save_checkpoint(policy, provenance=PROVENANCE)
        root = Root(start=policy, base_digest=policy.state, trainable=trainable, init_seed=3)
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [{"kind": "full"}, LoraSpec(rank=2).model_dump(mode="json")])
async def test_a_stage_that_goes_on_from_another(
    trainable: dict[str, Any], tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    await two_stages(url, tiny_folder, trainable)
    store = open_store(url)
    # the models of the store are the same for both chains
    listed: list[ObjectStore] = []
    monkeypatch.setattr(verify, "list_models", lambda store: listed.append(store) or list_models(store))
    for from_checkpoints in (False, True):
        listed.clear()
        report = verify_run(store, "r", from_checkpoints=from_checkpoints)
        assert report.problems == []
        assert len(listed) == 1
        counts = [(c.chain, c.redone, c.digests, c.checkpoints) for c in report.chains]
        assert counts == [("r/0-a/policy", 2, 2, 1), ("r/1-b/policy", 2, 2, 1)]
    assert replay_step(Chain(store, "r", "1-b", "policy"), 1).weights_equal
    fork_run(store, "r", "new", step=1, code_version="test")
    assert [c.steps for c in verify_run(store, "new").chains] == [2, 1]
    assert verify_run(store, "new").problems == []
    root = Chain(store, "new", "1-b", "policy").root()
    assert root is not None
    assert root.start is not None
    assert root.start.run == "new"
    assert audit_store(store).problems == ()


# -- replay ----------------------------------------------------------------------------------------------------


def committed(run: ToyRun, step: int) -> CommitRecord:
    record = run.chain.record(step)
    assert record is not None
    return record


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_replay_is_the_step(toy_run: ToyRun, step: int) -> None:
    before = everything(toy_run.folder)
    report = replay_step(toy_run.chain, step)
    assert report.weights_equal
    assert report.metrics_equal
    assert report.committed == committed(toy_run, step).metrics
    assert everything(toy_run.folder) == before


def test_metrics_that_are_nan_on_both_sides_are_equal(toy_run: ToyRun) -> None:
    report = replay_step(toy_run.chain, 1)
    for old, new, equal in ((math.nan, math.nan, True), (math.nan, 0.0, False), (0.0, math.nan, False)):
        sides = {"committed": {"loss": old, "tokens": 8.0}, "replayed": {"loss": new, "tokens": 8.0}}
        assert report.model_copy(update=sides).metrics_equal is equal
    assert not report.model_copy(update={"committed": {"loss": 0.0}, "replayed": {}}).metrics_equal


def test_another_rate_gives_other_weights_by_the_same_gradient(toy_run: ToyRun) -> None:
    report = replay_step(toy_run.chain, 2, WhatIf(lr=0.5))
    assert not report.weights_equal
    assert report.replayed["grad_norm"] == report.committed["grad_norm"]


def test_another_loss_gives_another_gradient(toy_run: ToyRun) -> None:
    report = replay_step(toy_run.chain, 3, WhatIf(loss={"kl_beta": 5.0}))
    assert report.replayed["grad_norm"] != report.committed["grad_norm"]
    with pytest.raises(BadSpec):
        replay_step(toy_run.chain, 3, WhatIf(loss={"kl_bata": 5.0}))


def test_another_batch(toy_run: ToyRun) -> None:
    report = replay_step(toy_run.chain, 3, WhatIf(batch_of=1))
    assert report.replayed["grad_norm"] != report.committed["grad_norm"]


@pytest.mark.parametrize("step", [0, 5])
def test_a_step_that_was_not_taken(toy_run: ToyRun, step: int) -> None:
    with pytest.raises(UnknownPolicy, match=f"no step {step}; it has steps 1 to 4"):
        replay_step(toy_run.chain, step)
