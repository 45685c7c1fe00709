"""Tests of several runs on one engine: its memory budget, which policy is evicted, and that a reloaded one is the same
to the byte."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.errors import EngineBusy, OutOfMemory
from engine.local.engine import LocalEngine
from engine.local.loaded_policies import NoRoomYet
from engine.protocol import GenerateRequest, LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.deletion import delete_runs
from storage.chain.records import Chain, PolicyRef, Root
from storage.errors import StorageUnavailable
from storage.store import keys
from storage.store.artifacts import find_artifact
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, ROWS, commit_batch, new_policy, request_after, row
from tests.fixtures.worklog import events

SCORED = TokenSequence([10, 11, 12, 20, 21], [0.0, 0.0, 0.0, 1.0, 1.0])
GIB = 1 << 30


def url_of(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(url_of(tmp_path))


@pytest.fixture
def worklog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_WORKLOG", str(tmp_path / "work.jsonl"))
    return tmp_path / "work.jsonl"


@pytest.fixture
async def roomy(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(url_of(tmp_path), DETERMINISTIC)
    yield engine
    await engine.close()


async def step(engine: LocalEngine, store: ObjectStore, policy: PolicyRef, token: int = 80) -> PolicyRef:
    request = request_after(policy, commit_batch(store, policy, [*ROWS, row([70, 71], [token])]))
    return (await engine.take_gradient_step(request)).policy


async def one_model_gib(engine: LocalEngine, store: ObjectStore, folder: Path) -> float:
    """What one run in training takes, found out by letting one train."""
    policy = await new_policy(engine, folder, run="measure")
    await step(engine, store, policy)
    return (await engine.info()).memory_used_bytes / GIB


def tight(spec: LocalEngineSpec, gib: float, **changes: object) -> LocalEngineSpec:
    return LocalEngineSpec.model_validate(spec.model_dump() | {"memory_gib": gib, "residency_seconds": 0} | changes)


async def test_runs_that_do_not_fit_together_take_turns_and_end_as_if_alone(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path, worklog: Path
) -> None:
    gib = await one_model_gib(roomy, store, tiny_folder)
    engine = LocalEngine(url_of(tmp_path), tight(DETERMINISTIC, 1.5 * gib))
    policies = {run: await new_policy(engine, tiny_folder, run=run) for run in ("a", "b")}
    worklog.unlink(missing_ok=True)
    for token in (80, 81, 82):
        for run in policies:
            policies[run] = await step(engine, store, policies[run], token + ord(run))
            assert (await engine.info()).memory_used_bytes <= 1.5 * gib * GIB
    await engine.close()
    assert events(worklog, "checkpoint")  # each left with a checkpoint …
    assert not events(worklog, "redo")  # … so that coming back cost no redo
    # the same steps by an engine with room for both, in other runs' names: the same weights to the byte
    for run in policies:
        policy = await new_policy(roomy, tiny_folder, run=f"alone-{run}")
        for token in (80, 81, 82):
            policy = await step(roomy, store, policy, token + ord(run))
        ends = [Chain.of(store, p).record(3) for p in (policy, policies[run])]
        assert ends[0] and ends[1] and ends[0].state == ends[1].state
        assert ends[0].weights_digest == ends[1].weights_digest != None  # noqa: E711 - a chain of three


async def test_what_can_never_fit_is_refused_with_the_sizes(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    gib = await one_model_gib(roomy, store, tiny_folder)
    engine = LocalEngine(url_of(tmp_path), tight(DETERMINISTIC, 0.5 * gib))
    policy = await new_policy(engine, tiny_folder)
    with pytest.raises(OutOfMemory, match="engine.memory_gib"):
        await step(engine, store, policy)
    assert Chain.of(store, policy).head().step == 0
    await engine.close()


async def test_a_run_that_just_came_stays_for_a_while(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    gib = await one_model_gib(roomy, store, tiny_folder)
    spec = tight(DETERMINISTIC, 1.5 * gib, residency_seconds=3600, room_seconds=0)
    engine = LocalEngine(url_of(tmp_path), spec)
    first, second = [await new_policy(engine, tiny_folder, run=run) for run in ("a", "b")]
    first = await step(engine, store, first)
    with pytest.raises(EngineBusy, match="memory_gib"):
        await step(engine, store, second)
    await engine.release("a")  # the first is done: it leaves at once
    assert (await step(engine, store, second)).step == 1
    await engine.close()


async def test_a_deleted_run_makes_room_and_leaves_no_checkpoint(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    gib = await one_model_gib(roomy, store, tiny_folder)
    engine = LocalEngine(url_of(tmp_path), tight(DETERMINISTIC, 1.5 * gib))
    killed, other = [await new_policy(engine, tiny_folder, run=run) for run in ("killed", "other")]
    await step(engine, store, killed)
    delete_runs(store, "killed")
    assert (await step(engine, store, other)).step == 1
    await engine.close()
    assert list(store.list(keys.run_prefix("killed"))) == []


async def test_a_closed_engine_leaves_nothing_to_redo(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path, worklog: Path
) -> None:
    engine = LocalEngine(url_of(tmp_path), DETERMINISTIC)
    policy = await new_policy(engine, tiny_folder)
    for _ in range(2):
        policy = await step(engine, store, policy)
    await engine.close()
    assert find_artifact(store, keys.checkpoint(policy.run, policy.stage, policy.model, 2)) is not None
    worklog.unlink()
    again = LocalEngine(url_of(tmp_path), DETERMINISTIC)
    assert (await step(again, store, policy)).step == 3
    await again.close(checkpoint=False)
    assert not events(worklog, "redo")


async def test_generations_of_two_runs_with_one_policy_are_one_batch(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path, worklog: Path
) -> None:
    engine = LocalEngine(url_of(tmp_path), LocalEngineSpec(compute_dtype="float32", threads=1))
    policies = [await new_policy(engine, tiny_folder, run=run) for run in ("a", "b", "c")]
    sampling = SamplingParams(max_new_tokens=5)
    alone = [
        await engine.generate(GenerateRequest(policy, [[10 + n], [20 + n, 21]], [n, n + 1], sampling))
        for n, policy in enumerate(policies)
    ]
    worklog.unlink()
    together = await asyncio.gather(
        *(
            engine.generate(GenerateRequest(policy, [[10 + n], [20 + n, 21]], [n, n + 1], sampling))
            for n, policy in enumerate(policies)
        )
    )
    # in float32 a completion does not depend on its batch: everyone got their own
    assert [[c.token_ids for c in answer] for answer in together] == [[c.token_ids for c in a] for a in alone]
    drawn = [event["completions"] for event in events(worklog, "generate")]
    assert sum(drawn) == 6
    assert len(drawn) < 3
    # each token is logged with the seed of its completion
    expected = []
    for n, completions in enumerate(together):
        for seed, completion in zip([n, n + 1], completions, strict=True):
            expected += [(seed, number) for number in range(len(completion.token_ids))]
    assert sorted((event["seed"], event["number"]) for event in events(worklog, "token")) == sorted(expected)
    await engine.close()


async def test_one_prompt_too_many_fails_its_own_call_only(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(url_of(tmp_path), LocalEngineSpec(compute_dtype="float32", threads=1))
    policy = await new_policy(engine, tiny_folder)
    good = GenerateRequest(policy, [[10, 11]], [1], SamplingParams(max_new_tokens=3))
    bad = GenerateRequest(policy, [[10**6]], [1], SamplingParams(max_new_tokens=3))
    answers = await asyncio.gather(*(engine.generate(r) for r in (good, bad, good)), return_exceptions=True)
    assert isinstance(answers[1], ValueError)
    assert answers[0] == answers[2] != []
    await engine.close()


async def test_equal_policies_of_two_runs_are_two_checkpoints(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    policies = [await step(roomy, store, await new_policy(roomy, tiny_folder, run=run)) for run in ("a", "b")]
    assert policies[0].state == policies[1].state
    for policy in policies:  # the second is asked for while the first may be on its way
        await roomy.begin_checkpoint(policy, provenance=PROVENANCE, name=f"named-{policy.run}")
    refs = [await roomy.save_checkpoint(policy, provenance=PROVENANCE) for policy in policies]
    for policy, ref in zip(policies, refs, strict=True):
        assert ref.key == keys.checkpoint(policy.run, policy.stage, policy.model, 1)
        assert find_artifact(store, ref.key) == ref


async def test_a_released_run_is_checkpointed_when_release_returns(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    policy = await step(roomy, store, await new_policy(roomy, tiny_folder))
    await roomy.release(policy.run)
    assert find_artifact(store, keys.checkpoint(policy.run, policy.stage, policy.model, 1)) is not None


async def test_a_failed_step_keeps_no_weights(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = await step(roomy, store, await new_policy(roomy, tiny_folder))
    held = weakref.ref(roomy.loaded_policies.training_policy_of(policy).trainer.model.module)

    def unavailable(*_: object) -> None:
        raise StorageUnavailable("the store is away")

    monkeypatch.setattr(Chain, "commit", unavailable)
    with pytest.raises(StorageUnavailable) as failed:
        await step(roomy, store, policy)
    assert held() is None, "the error, which is kept here, keeps the weights of the step"
    assert failed.value is not None


# -- adapters --------------------------------------------------------------------------------------------------


async def adapter_policy(engine: LocalEngine, folder: Path, run: str, **changes: object) -> PolicyRef:
    base = await engine.import_model(str(folder), provenance=PROVENANCE)
    spec = LoraSpec.model_validate({"rank": 4} | changes)
    root = Root(base=base, base_digest=base.sha256, trainable=spec.model_dump(mode="json"))
    return await engine.create_policy(PolicySpec(run=run, stage="0-s", model="policy", root=root))


async def test_a_base_with_three_adapters_takes_less_than_half_more_than_the_base(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(url_of(tmp_path), DETERMINISTIC)
    policies = [await adapter_policy(engine, tiny_folder, run, rank=1) for run in ("a", "b", "c")]
    await engine.logprobs(LogprobsRequest(policies[0], [SCORED]))
    base = engine.loaded_policies._bases.copy().popitem()[1].nbytes()
    for policy in policies:
        after = await step(engine, store, policy)
        await engine.generate(GenerateRequest(after, [[10, 11]], [1], SamplingParams(max_new_tokens=2)))
        await engine.logprobs(LogprobsRequest(policy, [SCORED]))  # the reference: the adapter off
    assert len(engine.loaded_policies._bases) == 1
    assert (await engine.info()).memory_used_bytes < 1.5 * base
    await engine.close()


async def test_adapters_interleaved_on_one_base_end_as_if_alone_and_come_back_to_the_byte(
    store: ObjectStore, tiny_folder: Path, tmp_path: Path, worklog: Path
) -> None:
    shared = LocalEngine(url_of(tmp_path), DETERMINISTIC)
    runs = {run: await adapter_policy(shared, tiny_folder, run) for run in ("a", "b", "c")}
    for _ in range(2):
        for n, run in enumerate(runs):
            runs[run] = await step(shared, store, runs[run], 80 + n)
    shown = {run: (await shared.logprobs(LogprobsRequest(p, [SCORED])))[0] for run, p in runs.items()}
    await shared.close()
    assert len({tuple(values) for values in shown.values()}) == 3  # each call computed with its own adapter
    for n, run in enumerate(runs):
        alone = LocalEngine(url_of(tmp_path), DETERMINISTIC)
        policy = await adapter_policy(alone, tiny_folder, f"alone-{run}")
        for _ in range(2):
            policy = await step(alone, store, policy, 80 + n)
        digests = [Chain.of(store, p).record(2) for p in (policy, runs[run])]
        assert digests[0] and digests[1] and digests[0].weights_digest == digests[1].weights_digest
        # and the shared one's policy, rebuilt here from its checkpoint, computes what it did there
        assert (await alone.logprobs(LogprobsRequest(runs[run], [SCORED])))[0] == shown[run]
        await alone.close(checkpoint=False)


async def test_the_base_of_an_adapter_does_not_leave_to_make_room_for_it(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    policy = await adapter_policy(roomy, tiny_folder, "measure", rank=1)
    await step(roomy, store, policy)
    base = next(iter(roomy.loaded_policies._bases.values())).nbytes()
    engine = LocalEngine(url_of(tmp_path), tight(DETERMINISTIC, 1.5 * base / GIB))
    for run in ("a", "b"):
        await step(engine, store, await adapter_policy(engine, tiny_folder, run, rank=1))
        assert len(engine.loaded_policies._bases) == 1
    await engine.close()
    small = LocalEngine(url_of(tmp_path), tight(DETERMINISTIC, 1.05 * base / GIB))
    with pytest.raises(OutOfMemory, match="an adapter on"):
        await step(small, store, await adapter_policy(small, tiny_folder, "c", rank=1))
    await small.close()


async def test_policy_zero_of_an_adapter_is_the_base(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    whole = await new_policy(roomy, tiny_folder, run="whole")
    adapter = await adapter_policy(roomy, tiny_folder, "adapter")
    assert await roomy.logprobs(LogprobsRequest(whole, [SCORED])) == await roomy.logprobs(
        LogprobsRequest(adapter, [SCORED])
    )
    await step(roomy, store, adapter)
    assert await roomy.logprobs(LogprobsRequest(whole, [SCORED])) == await roomy.logprobs(
        LogprobsRequest(adapter, [SCORED])
    )


async def test_an_exported_adapter_is_a_whole_model_and_a_peft_folder(
    roomy: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    policy = await step(roomy, store, await adapter_policy(roomy, tiny_folder, "adapter"))
    shown = (await roomy.logprobs(LogprobsRequest(policy, [SCORED])))[0]
    ref = await roomy.export_model(policy, "tuned", provenance=PROVENANCE)
    names = {info.key.removeprefix(f"{ref.key}/") for info in store.list(f"{ref.key}/")}
    assert {"model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= names
    start = await roomy.create_policy(
        PolicySpec(run="next", stage="0-s", model="policy", root=Root(base=ref, base_digest=ref.sha256))
    )
    assert (await roomy.logprobs(LogprobsRequest(start, [SCORED])))[0] == pytest.approx(shown, abs=1e-5)


def test_no_room_yet_says_how_long() -> None:
    assert NoRoomYet("later", 2.5).seconds == 2.5
