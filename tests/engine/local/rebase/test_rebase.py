"""Tests of an engine that takes a chain over under other numerics: the rebase that it commits, and when it may not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.errors import ReplayDiverged
from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import rebase_at, rebases_in_effect
from storage.chain.records import Chain
from storage.inspect.audit import audit_store
from storage.inspect.run_details import describe_run
from storage.store import keys
from storage.store.artifacts import find_artifact, read_manifest
from tests.engine.local.rebase.rebasing import (
    DOUBLE,
    SINGLE,
    STEPS,
    OtherVersions,
    has_no_problems,
    loaded_digest,
    only_rebase,
    read,
    record_of,
    step,
)
from tests.fixtures.worklog import events

# -- exact -----------------------------------------------------------------------------------------------------


async def test_from_its_checkpoint_a_chain_is_rebased_exactly_and_once(
    saved: Chain, url: str, caplog: pytest.LogCaptureFixture, worklog: Path
) -> None:
    engine, head = OtherVersions(url), saved.head()
    await read(engine, head)
    assert rebases_in_effect(saved) == []  # without a step there is no rebase
    with caplog.at_level(logging.WARNING, "engine.local.rebase"):
        first = await step(engine, head)
        second = await step(engine, first.policy)
    rebase = only_rebase(saved)
    assert (rebase.exact, rebase.redone, rebase.policy) == (True, (), head)
    assert rebase.checkpoint.key == keys.checkpoint("r", "0-s", "policy", STEPS)
    assert rebase.weights_digest == rebase.committed_digest == record_of(saved, STEPS).weights_digest
    assert rebase.before == record_of(saved, STEPS).numerics
    assert rebase.after.versions["torch"] == "99.0"
    assert first.rebase == second.rebase == rebase.mark
    assert record_of(saved, STEPS).rebase is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "r/0-s/policy is rebased: step 3: exact, torch: " in message
    assert len(events(worklog, "rebase")) == 1 and not events(worklog, "redo")
    assert has_no_problems(saved.store)
    await engine.close(checkpoint=False)


async def test_the_audit_finds_a_record_that_has_lost_its_rebase(saved: Chain, url: str) -> None:
    engine = OtherVersions(url)
    second = await step(engine, (await step(engine, saved.head())).policy)
    await engine.close(checkpoint=False)
    key = keys.chain_record("r", "0-s", "policy", second.policy.step)
    saved.store.delete(key)
    saved.commit(second.model_copy(update={"rebase": None}))
    (problem,) = audit_store(saved.store).problems
    assert (problem.key, problem.what) == (key, "descends from no rebase, the step before it from another")


async def test_the_same_numerics_rebase_nothing(saved: Chain, url: str) -> None:
    # The number of threads is not part of the numerics.
    engine = LocalEngine(url, SINGLE.model_copy(update={"threads": 2}))
    record = await step(engine, saved.head())
    assert (record.rebase, rebases_in_effect(saved)) == (None, [])
    await engine.close(checkpoint=False)


async def test_a_redo_that_the_digests_confirm_is_exact(chain: Chain, url: str) -> None:
    engine = OtherVersions(url)
    record = await step(engine, chain.head())
    rebase = only_rebase(chain)
    assert (rebase.exact, rebase.redone, record.rebase) == (True, (), rebase.mark)
    assert find_artifact(chain.store, rebase.checkpoint.key) == rebase.checkpoint
    assert has_no_problems(chain.store)
    (report,) = verify_run(chain.store, "r").chains
    assert (report.problems, report.redone, report.checkpoints) == ((), 4, 1)
    await engine.close(checkpoint=False)


# -- with a redo -----------------------------------------------------------------------------------------------


async def test_a_redo_that_differs_goes_on_from_what_it_reached(chain: Chain, url: str, worklog: Path) -> None:
    engine = LocalEngine(url, DOUBLE)
    record = await step(engine, chain.head())
    rebase = only_rebase(chain)
    assert not rebase.exact
    assert [step.step for step in rebase.redone] == [1, 2, 3]
    assert rebase.proven, rebase.redone
    assert rebase.committed_digest == record_of(chain, STEPS).weights_digest != rebase.weights_digest
    assert (rebase.before.compute_dtype, rebase.after.compute_dtype) == ("float32", "float64")
    # The rebase does not write the step's own checkpoint.
    assert find_artifact(chain.store, keys.checkpoint("r", "0-s", "policy", STEPS)) is None
    assert read_manifest(chain.store, rebase.checkpoint.key).extra["weights_digest"] == rebase.weights_digest
    assert (record.rebase, record.numerics.compute_dtype) == (rebase.mark, "float64")
    assert len(events(worklog, "redo")) == 2 * STEPS  # once more with rounding noise
    await engine.close(checkpoint=False)
    worklog.unlink()
    again = LocalEngine(url, DOUBLE)  # redoes the step after the rebase, to the byte
    await step(again, record.policy)
    assert [event["step"] for event in events(worklog, "redo")] == [STEPS + 1]
    assert rebases_in_effect(chain) == [rebase]
    assert has_no_problems(chain.store)
    (line,) = describe_run(chain.store, "r").chains[0].rebases
    assert line.startswith("step 3: steps 1 to 3 redone, weights ") and "compute dtype: float32 -> float64" in line
    assert "rounding alone: step 3 differs by" in line
    await again.close(checkpoint=False)


async def test_a_head_that_is_only_read_is_rebased_too(chain: Chain, url: str) -> None:
    """Samples must come from weights that can be rebuilt."""
    engine = LocalEngine(url, DOUBLE)
    await read(engine, chain.head())
    rebase = only_rebase(chain)
    assert loaded_digest(engine, chain.head()) == rebase.weights_digest
    await engine.close(checkpoint=False)
    other = LocalEngine(url, SINGLE)  # under the old numerics, the chain still continues from the rebase
    record = await step(other, chain.head())
    assert record.rebase == rebase.mark
    assert rebases_in_effect(chain) == [rebase]
    await other.close(checkpoint=False)


async def test_a_past_policy_whose_redo_differs_by_rounding_is_read(
    saved: Chain, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LocalEngine(url, DOUBLE)
    with caplog.at_level(logging.WARNING, "engine.local.rebase"):
        await read(engine, saved.policy(2))
    assert "was redone with rounding differences: step 2 differs by" in caplog.text
    assert list(saved.store.list(keys.rebases_prefix("r", "0-s", "policy"))) == []
    await engine.close(checkpoint=False)


async def test_policies_before_a_rebase_are_redone_under_their_own_numerics(chain: Chain, url: str) -> None:
    double = LocalEngine(url, DOUBLE)
    await step(double, chain.head())
    await double.close(checkpoint=False)
    single = LocalEngine(url, SINGLE)
    await read(single, chain.policy(2))
    slot = single.loaded_policies.find_by_state(chain.policy(2).state)
    assert slot is not None and slot.trainer.weights_digest()[0] == record_of(chain, 2).weights_digest
    await read(single, chain.policy(3))  # at the rebase: its checkpoint, not a redo
    slot = single.loaded_policies.find_by_state(chain.policy(3).state)
    assert slot is not None and slot.rebase == only_rebase(chain).mark
    await single.close(checkpoint=False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DOUBLE.model_copy(update={"deterministic": True}), "deterministic=true promises the bytes of a run without"),
        (DOUBLE.model_copy(update={"rebase": "refuse"}), "engine.rebase='refuse' goes on from no other weights"),
    ],
    ids=["deterministic", "refuse"],
)
async def test_an_engine_that_may_not_rebase(chain: Chain, url: str, spec: LocalEngineSpec, message: str) -> None:
    engine = LocalEngine(url, spec)
    with pytest.raises(ReplayDiverged, match=message):
        await step(engine, chain.head())
    assert rebase_at(chain, STEPS) is None
    assert chain.head().step == STEPS
    await engine.close(checkpoint=False)


async def test_equal_numerics_and_other_weights_are_an_error(chain: Chain, url: str) -> None:
    record = record_of(chain, 2)
    key = keys.chain_record("r", "0-s", "policy", 2)
    chain.store.delete(key)
    chain.commit(record.model_copy(update={"weights_digest": "0" * 64}))
    engine = LocalEngine(url, SINGLE)
    with pytest.raises(ReplayDiverged, match="redoing step 2 gave weights .* the chain has 000000000000"):
        await step(engine, chain.head())
    assert rebases_in_effect(chain) == []
    await engine.close(checkpoint=False)


