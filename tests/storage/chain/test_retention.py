"""Pruning removes unnamed checkpoints beyond the last ones, and named ones beyond keep_named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.local.engine import LocalEngine
from storage.chain.checkpoint_names import named_checkpoints
from storage.chain.fork import ForkInfo
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.retention import Retention, drop_final_checkpoint, prune_checkpoints
from storage.errors import ObjectNotFound
from storage.inspect.gc import collect_garbage
from storage.registry.decisions import commit_decision
from storage.registry.models import publish_model
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_files, find_artifact, read_manifest
from storage.store.download import materialise_files
from storage.store.index import record_uses
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, new_policy, request_after

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
    assert prune_checkpoints(store, POLICY, Retention(keep_last=2)) == [1]
    assert [step for step, key in written.items() if find_artifact(store, key) is None] == [1]
    assert not list(store.list(written[1] + "/"))
    assert prune_checkpoints(store, POLICY, Retention(keep_last=2)) == []


def record(store: ObjectStore, step: int, **metrics: float) -> None:
    """Commits a record of policy `step`. The chain has no root and is not valid."""
    parent = POLICY.model_copy(update={"step": step - 1, "state": f"s{step - 1}"})
    batch = ArtifactRef(kind="batch", key="b", sha256="0", bytes=1, rows=1, parents=())
    request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
    numerics = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
    Chain.of(store, POLICY).commit(
        CommitRecord(
            request=request, state=request.next_state(), metrics=metrics, updates=1, numerics=numerics,
            weights_digest="0",
        )
    )


def kept(store: ObjectStore, written: dict[int, str]) -> list[int]:
    return [step for step, key in written.items() if find_artifact(store, key) is not None]


def test_every_so_many_steps_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    written = {step: write(store, tmp_path, step) for step in range(0, 11)}
    assert prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_every=4)) == [1, 2, 3, 5, 6, 7, 9]
    assert kept(store, written) == [0, 4, 8, 10]


def named_and_unnamed(store: ObjectStore, folder: Path) -> dict[int, str]:
    """Checkpoints of steps 1 to 8; those of even steps are named, step 8 after it was written."""
    names = {step: f"policy-{step}" for step in (2, 4, 6)}
    written = {step: write(store, folder, step, names.get(step)) for step in range(1, 9)}
    store.put_if_absent(keys.checkpoint_name(written[8]), b'{"name":"policy-8"}')
    for step in written:
        record(store, step, reward=1.0 if step == 2 else 0.1)
    return written


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 4, 6, 7, 8]),
        ({"keep_named": 9}, [2, 4, 6, 7, 8]),
        ({"keep_named": 2}, [6, 7, 8]),
        ({"keep_named": 1, "keep_every": 4}, [4, 7, 8]),
        ({"keep_named": 1, "keep_best": 1, "metric": "reward"}, [2, 7, 8]),
    ],
)
def test_the_latest_named_ones_are_kept(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    store = open_store(tmp_path / "store")
    written = named_and_unnamed(store, tmp_path)
    removed = prune_checkpoints(store, POLICY, Retention(keep_last=1, **options))
    assert kept(store, written) == expected
    assert removed == [step for step in written if step not in expected]
    for step in removed:
        assert not list(store.list(f"{written[step]}/"))


def test_a_named_one_that_a_champion_was_made_from_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    written = named_and_unnamed(store, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    parent = Chain.of(store, POLICY).policy(4).uri
    publish_model(store, "m", "1", {file.name: file}, provenance=PROVENANCE, parents=[parent])
    commit_decision(store, "m", "1", "promote", over=None, reasons=["better"], who="ada", provenance=PROVENANCE)
    prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_named=1))
    assert kept(store, written) == [4, 7, 8]


def test_named_ones_stay_while_another_run_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path / "store")
    written = named_and_unnamed(store, tmp_path)
    damaged = keys.chain_root("another-run", "0-sft", "policy")
    record_uses(store, damaged, [keys.run_prefix("r")])
    store.put(damaged, b'{"base":')
    prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_named=1))
    assert kept(store, written) == [2, 4, 6, 7, 8]
    assert "the old named checkpoints of steps [2, 4, 6] stay" in caplog.text
    store.delete(damaged)
    prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_named=1))
    assert kept(store, written) == [7, 8]


@pytest.mark.parametrize(("best", "expected"), [("max", [2, 3, 6]), ("min", [1, 4, 6])])
def test_the_best_by_a_metric_are_kept(tmp_path: Path, best: Literal["min", "max"], expected: list[int]) -> None:
    store = open_store(tmp_path / "store")
    rewards = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2, 5: math.inf, 6: 0.3}
    written = {step: write(store, tmp_path, step) for step in range(0, 7)}  # step 0 has no record
    for step, reward in rewards.items():
        record(store, step, **({"reward": reward} if math.isfinite(reward) else {"loss": 1.0}))
    prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_best=2, metric="reward", best=best))
    assert kept(store, written) == expected
    with pytest.raises(ValueError, match="has the metric 'rewards'; they have reward"):
        prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_best=2, metric="rewards"))
    with pytest.raises(ValueError, match="without a metric"):
        prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_best=2))


def test_equal_values_keep_the_earlier(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    written = {step: write(store, tmp_path, step) for step in (1, 2, 3)}
    for step in written:
        record(store, step, reward=0.5)
    assert prune_checkpoints(store, POLICY, Retention(keep_last=1, keep_best=1, metric="reward")) == [2]


def test_a_reader_never_follows_a_manifest_to_data_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    key = write(store, tmp_path, 1)
    real = store.delete

    def dies_after_one(key: str) -> None:
        real(key)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "delete", dies_after_one)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(store, POLICY, Retention(keep_last=0))
    assert find_artifact(store, key) is None
    assert len(list(store.list(key))) == 1  # the data, for garbage collection
    with pytest.raises(ObjectNotFound):
        materialise_files(store, key, tmp_path / "to")


SHARES = {2: "policy-0.25", 4: "policy-0.5", 6: "policy-0.75", 8: "policy-1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8]),
        ({"keep_last": 3}, [8]),
        ({"keep_named": 2}, [6, 8]),
        ({"keep_every": 3}, [3, 6, 8]),
        ({"keep_best": 1, "metric": "reward"}, [2, 8]),
    ],
)
def test_a_finished_run_keeps_its_last_and_what_was_asked_for(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    store = open_store(tmp_path / "store")
    written = {step: write(store, tmp_path, step, SHARES.get(step)) for step in range(1, 9)}
    Chain.of(store, POLICY).create_root(Root(base_digest="b"))
    for step in written:
        record(store, step, reward=1.0 if step == 2 else 0.1)
    prune_checkpoints(store, POLICY, Retention(**{"keep_last": 2, **options, "finished": True}))
    assert kept(store, written) == expected
    # the names of shares stay, unless a number of named checkpoints is kept
    names = [named.name for named in named_checkpoints(store, "r")]
    assert names == (["policy-0.75", "policy-1"] if "keep_named" in options else list(SHARES.values()))
    # nothing else is left of a removed checkpoint
    for step in set(written) - set(expected):
        left = [info.key for info in store.list(f"{written[step]}/")]
        assert left in ([], [keys.checkpoint_name(written[step])])


def test_a_finished_run_keeps_what_a_person_named_or_a_fork_refers_to(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    names = SHARES | {1: "policy-1", 3: "good", 5: "policy-0.6"}
    written = {step: write(store, tmp_path, step, names.get(step)) for step in range(1, 9)}
    store.put_if_absent(keys.checkpoint_name(written[5]), b'{"name":"best"}')
    Chain.of(store, POLICY).create_root(Root(base_digest="b"))
    for step in written:
        record(store, step)
    shared = (Chain.of(store, POLICY).policy(4),)
    fork = ForkInfo(run="r", stage="0-s", step=4, shared=shared, code_version="test", attempt="0", created="now")
    record_uses(store, keys.fork_json("fork"), [keys.run_prefix("r")])
    store.put(keys.fork_json("fork"), canonical_json(fork))
    prune_checkpoints(store, POLICY, Retention(keep_last=2, finished=True))
    assert kept(store, written) == [1, 3, 4, 5, 8]


def test_the_last_checkpoint_of_a_finished_run_can_go(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    written = {step: write(store, tmp_path, step, name) for step, name in ((2, "mine"), (4, None), (6, "policy-0.75"))}
    Chain.of(store, POLICY).create_root(Root(base_digest="b"))
    for step in range(1, 7):
        record(store, step)
    # a rule keeps it
    assert not drop_final_checkpoint(store, POLICY, Retention(keep_every=3))
    # that of a share of the run leaves its name, and no other checkpoint goes with it
    assert drop_final_checkpoint(store, POLICY, Retention())
    assert kept(store, written) == [2, 4]
    assert [named.name for named in named_checkpoints(store, "r")] == ["mine", "policy-0.75"]
    assert drop_final_checkpoint(store, POLICY, Retention())
    # what a person named stays
    assert not drop_final_checkpoint(store, POLICY, Retention())
    assert kept(store, written) == [2]


async def test_after_pruning_everything_the_policy_is_rebuilt(tmp_path: Path, tiny_folder: Path) -> None:
    url = f"file://{tmp_path}/store"
    store, engine = open_store(url), LocalEngine(url, DETERMINISTIC)
    policy = await new_policy(engine, tiny_folder)
    for _ in range(2):
        policy = (await engine.take_gradient_step(request_after(policy, commit_batch(store, policy)))).policy
        await engine.save_checkpoint(policy, provenance=PROVENANCE)
    assert prune_checkpoints(store, policy, Retention(keep_last=0)) == [1, 2]
    collect_garbage(store, now=store.now() + 1e6)
    await engine.close()
    fresh = LocalEngine(url, DETERMINISTIC)
    await fresh.save_checkpoint(policy, provenance=PROVENANCE)  # rebuilds: a redo that differs is an error
    checkpoint = read_manifest(store, keys.checkpoint(policy.run, policy.stage, policy.model, 2))
    committed = Chain.of(store, policy).record(2)
    assert committed is not None and checkpoint.extra["state"] == committed.state
    await fresh.close()
