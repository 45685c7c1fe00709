"""Tests of chains whose records, batches or checkpoints were altered: an engine refuses or passes over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ReplayDiverged
from engine.local.engine import LocalEngine
from storage.chain.records import Chain, CommitRecord
from storage.errors import CorruptArtifact
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore
from tests.engine.local.rebuilding import (
    STEPS,
    committed_digest,
    new_materialiser,
    rebuilt_digest,
    redone_steps,
    restored_steps,
)
from tests.fixtures.engines import (
    PROVENANCE,
)


def rewrite(chain: Chain, step: int, change: Callable[[dict[str, Any]], None]) -> CommitRecord:
    """Alters a committed record, and returns the original."""
    record = chain.record(step)
    assert record is not None
    body = record.model_dump(mode="json")
    change(body)
    chain.store.put(keys.chain_record(chain.run, chain.stage, chain.model, step), json.dumps(body).encode())
    return record


def put_back(chain: Chain, original: CommitRecord) -> None:
    """Writes the original record of step 2 again."""
    key = keys.chain_record(chain.run, chain.stage, chain.model, 2)
    chain.store.put(key, original.model_dump_json().encode())


async def test_another_committed_digest_is_a_divergence_and_the_slot_is_dropped(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    original = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    materialiser = new_materialiser(store)
    with pytest.raises(ReplayDiverged, match=r"step 2 gave weights .*000000000000"):
        materialiser.for_training(chain.head())
    assert redone_steps(worklog) == [1, 2]

    put_back(chain, original)
    worklog.unlink()
    assert rebuilt_digest(materialiser, chain.head()) == committed_digest(chain, STEPS)
    assert (restored_steps(worklog), redone_steps(worklog)) == ([0], [1, 2, 3])  # the diverged copy was dropped


async def test_a_divergence_on_the_way_forward_drops_the_slot_that_was_there(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    materialiser = new_materialiser(store)
    materialiser.for_training(chain.policy(1))
    original = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    with pytest.raises(ReplayDiverged):
        materialiser.for_training(chain.head())
    put_back(chain, original)
    worklog.unlink()
    assert materialiser.for_training(chain.policy(1)).trainer.weights_digest()[0] == committed_digest(chain, 1)
    assert restored_steps(worklog) == [0]


async def test_a_divergence_on_the_way_back_drops_the_slot_that_was_there(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    """The restored weights overwrite the memory of the slot, which must then not count as the head."""
    await engine.save_checkpoint(chain.policy(1), provenance=PROVENANCE)
    materialiser = new_materialiser(store)
    materialiser.for_training(chain.head())
    original = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    with pytest.raises(ReplayDiverged):
        materialiser.for_training(chain.policy(2))
    put_back(chain, original)
    assert rebuilt_digest(materialiser, chain.head()) == committed_digest(chain, STEPS)


async def test_an_altered_request_breaks_the_chain(chain: Chain, store: ObjectStore) -> None:
    rewrite(chain, 2, lambda body: body["request"]["optimizer"].update(lr=0.5))
    with pytest.raises(CorruptArtifact, match="broken at step 2"):
        new_materialiser(store).for_training(chain.head())


async def test_a_missing_record_breaks_the_chain(chain: Chain, store: ObjectStore) -> None:
    store.delete(keys.chain_record(chain.run, chain.stage, chain.model, 2))
    with pytest.raises(CorruptArtifact, match=r"broken at step 2.*missing"):
        new_materialiser(store).for_training(chain.head())


async def test_an_altered_batch_is_corrupt(chain: Chain, store: ObjectStore) -> None:
    record = chain.record(2)
    assert record is not None
    (data,) = [info.key for info in store.list(record.request.batch.key) if info.key.endswith(".parquet")]
    store.put(data, store.get(data)[:-1] + b"\0")
    materialiser = new_materialiser(store)
    with pytest.raises(CorruptArtifact, match=data.rsplit("/", 1)[1]):
        materialiser.for_training(chain.head())
    assert rebuilt_digest(materialiser, chain.policy(1)) == committed_digest(chain, 1)


@pytest.mark.parametrize("damage", ["a flipped byte", "no data", "a manifest that is no manifest"])
async def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path, damage: str
) -> None:
    for step in (1, 2):
        await engine.save_checkpoint(chain.policy(step), provenance=PROVENANCE)
    manifest = read_manifest(store, keys.checkpoint(chain.run, chain.stage, chain.model, 2))
    if damage == "a flipped byte":
        store.put(manifest.files[0].key, store.get(manifest.files[0].key)[:-1] + b"\7")
    elif damage == "no data":
        store.delete(manifest.files[0].key)
    else:
        store.put(keys.manifest_of_files(manifest.key), b"{")
    worklog.unlink()
    assert rebuilt_digest(new_materialiser(store), chain.head()) == committed_digest(chain, STEPS)
    assert (restored_steps(worklog), redone_steps(worklog)) == ([1], [2, 3])
