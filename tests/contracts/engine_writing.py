"""The contract of `engine.protocol.Engine`: steps, what is refused, checkpoints and exports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.backends.torch.attention import IMPLEMENTATION
from engine.errors import Fenced, StepConflict, UnknownPolicy
from engine.protocol import Engine, GenerateRequest, LogprobsRequest, PolicySpec
from storage.chain.deletion import delete_runs
from storage.chain.leases import acquire_lease
from storage.chain.records import Chain, PolicyRef, Root
from storage.errors import CorruptArtifact
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore
from tests.contracts.engine_fixtures import (
    OTHER_ROWS,
    SCORED,
    SHORT,
    Connect,
    EngineFixtures,
    close,
    draw,
    plain_folder,
    same_draws,
    score,
)
from tests.fixtures.engines import PROVENANCE, commit_batch, hugging_face_logprobs, new_policy, request_after


class WritingContract(EngineFixtures):
    # -- the step ----------------------------------------------------------------------------------------------

    async def test_a_step_moves_the_policy(self, engine: Engine, store: ObjectStore, start: PolicyRef) -> None:
        before = await score(engine, start)
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        assert record.policy.step == 1
        assert record.policy.state != start.state
        assert record.updates == 1
        assert sum(await score(engine, record.policy)) > sum(before)  # SCORED begins as a trained row does
        assert await score(engine, start) == before

    async def test_the_same_request_twice_is_one_step(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        request = request_after(start, commit_batch(store, start))
        first = await engine.take_gradient_step(request)
        after = await score(engine, first.policy)
        assert await engine.take_gradient_step(request) == first
        assert await score(engine, first.policy) == after
        assert list(Chain.of(store, start).steps()) == [1]

    async def test_repeated_and_concurrent_requests_end_at_the_weights_of_plain_ones(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path
    ) -> None:
        plain_start = await new_policy(engine, tiny_folder, run="plain")
        plain = await engine.take_gradient_step(request_after(plain_start, commit_batch(store, plain_start)))
        plain = await engine.take_gradient_step(request_after(plain.policy, commit_batch(store, plain.policy)))

        request = request_after(start, commit_batch(store, start))
        first, *others = await asyncio.gather(*(engine.take_gradient_step(request) for _ in range(3)))
        assert others == [first, first]
        assert await engine.take_gradient_step(request) == first
        request = request_after(first.policy, commit_batch(store, first.policy))
        last, *others = await asyncio.gather(*(engine.take_gradient_step(request) for _ in range(2)))
        assert others == [last]

        assert list(Chain.of(store, start).steps()) == [1, 2]
        assert last.weights_digest == plain.weights_digest is not None
        assert last.state == plain.state  # the state names data and requests, not the run

    async def test_two_engines_racing_commit_one_record(
        self, connect: Connect, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        rival = await connect()
        request = request_after(start, commit_batch(store, start))
        mine, theirs = await asyncio.gather(engine.take_gradient_step(request), rival.take_gradient_step(request))
        assert mine == theirs == Chain.of(store, start).record(1)
        assert list(Chain.of(store, start).steps()) == [1]
        assert await score(engine, mine.policy) == await score(rival, mine.policy)

    async def test_the_loser_of_a_race_goes_on_from_the_winners_step(
        self, connect: Connect, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        rival = await connect()
        first = await rival.take_gradient_step(request_after(start, commit_batch(store, start)))
        second = request_after(first.policy, commit_batch(store, first.policy))
        assert (await engine.take_gradient_step(second)) == (await rival.take_gradient_step(second))

    async def test_another_batch_for_a_taken_step_is_a_conflict_that_names_both(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        taken = request_after(start, commit_batch(store, start))
        other = request_after(start, commit_batch(store, start, OTHER_ROWS, shard=1))
        record = await engine.take_gradient_step(taken)
        after = await score(engine, record.policy)
        with pytest.raises(StepConflict) as refused:
            await engine.take_gradient_step(other)
        assert taken.batch.sha256[:12] in str(refused.value)
        assert other.batch.sha256[:12] in str(refused.value)
        assert await engine.take_gradient_step(taken) == record
        assert await score(engine, record.policy) == after

    async def test_another_learning_rate_for_a_taken_step_is_a_conflict(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        batch = commit_batch(store, start)
        await engine.take_gradient_step(request_after(start, batch, lr=1e-3))
        with pytest.raises(StepConflict, match="differing: optimizer"):
            await engine.take_gradient_step(request_after(start, batch, lr=2e-3))

    async def test_two_engines_racing_different_requests_leave_one_step_and_one_conflict(
        self, connect: Connect, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        rival = await connect()
        requests = [
            request_after(start, commit_batch(store, start)),
            request_after(start, commit_batch(store, start, OTHER_ROWS, shard=1)),
        ]
        results = await asyncio.gather(
            engine.take_gradient_step(requests[0]), rival.take_gradient_step(requests[1]), return_exceptions=True
        )
        record = Chain.of(store, start).record(1)
        assert record is not None
        winner = [r.digest() for r in requests].index(record.request.digest())
        assert results[winner] == record
        assert isinstance(results[1 - winner], StepConflict)
        assert await score(engine, record.policy) == await score(rival, record.policy)

    # -- what is refused ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "change", [{"run": "unknown"}, {"stage": "9-no"}, {"model": "other"}, {"step": 5}, {"state": "f" * 64}]
    )
    async def test_a_policy_that_was_never_committed_is_unknown(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, change: dict[str, object]
    ) -> None:
        unknown = start.model_copy(update=change)
        batch = commit_batch(store, start)
        with pytest.raises(UnknownPolicy):
            await draw(engine, unknown)
        with pytest.raises(UnknownPolicy):
            await score(engine, unknown)
        with pytest.raises(UnknownPolicy):
            await engine.take_gradient_step(request_after(unknown, batch))
        with pytest.raises(UnknownPolicy):
            await engine.save_checkpoint(unknown, provenance=PROVENANCE)
        with pytest.raises(UnknownPolicy):
            await engine.export_model(unknown, "m", provenance=PROVENANCE)
        with pytest.raises(UnknownPolicy):
            await engine.stage_policy(unknown)
        assert Chain.of(store, unknown).record(unknown.step + 1) is None

    async def test_a_staged_policy_is_sampled_as_before_after_the_next_step(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        await engine.stage_policy(start)
        before = await draw(engine, start)
        for _ in range(2):
            await engine.stage_policy(start)
        after = (await engine.take_gradient_step(request_after(start, commit_batch(store, start), lr=0.05))).policy
        assert same_draws(await draw(engine, start), before, exact=self.exact)
        assert not same_draws(await draw(engine, after), before, exact=self.exact)

    async def test_a_checkpoint_answers_only_for_its_own_history(self, engine: Engine, start: PolicyRef) -> None:
        await engine.save_checkpoint(start, provenance=PROVENANCE)
        with pytest.raises(UnknownPolicy):
            await engine.save_checkpoint(start.model_copy(update={"state": "f" * 64}), provenance=PROVENANCE)

    async def test_a_lease_taken_elsewhere_fences_the_next_step(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        request = request_after(start, commit_batch(store, start))
        mine, theirs = acquire_lease(store, start.run, {}), acquire_lease(store, start.run, {"who": "a successor"})
        with pytest.raises(Fenced, match="another process is driving the run"):
            await engine.take_gradient_step(request, epoch=mine)
        assert Chain.of(store, start).record(1) is None
        assert (await engine.take_gradient_step(request, epoch=theirs)).policy.step == 1

    async def test_a_lower_epoch_is_fenced_and_changes_nothing(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path
    ) -> None:
        other_run = await new_policy(engine, tiny_folder, run="other")
        request = request_after(start, commit_batch(store, start))
        generation = GenerateRequest(start, [[10]], [1], SHORT)
        for _ in range(2):
            acquire_lease(store, start.run, {})
        await engine.generate(generation, epoch=2)
        with pytest.raises(Fenced, match=r"epoch 1.*epoch 2"):
            await engine.take_gradient_step(request, epoch=1)
        with pytest.raises(Fenced):
            await engine.generate(generation, epoch=1)
        with pytest.raises(Fenced):
            await engine.logprobs(LogprobsRequest(start, [SCORED]), epoch=1)
        with pytest.raises(Fenced):
            await engine.values(LogprobsRequest(start, [SCORED]), epoch=1)
        with pytest.raises(Fenced):
            await engine.stage_policy(start, epoch=1)
        with pytest.raises(Fenced):
            await engine.save_checkpoint(start, provenance=PROVENANCE, epoch=1)
        with pytest.raises(Fenced):
            await engine.export_model(start, "m", provenance=PROVENANCE, epoch=1)
        assert list(Chain.of(store, start).steps()) == []
        await engine.generate(GenerateRequest(other_run, [[10]], [1], SHORT), epoch=1)
        assert (await engine.take_gradient_step(request, epoch=2)).policy.step == 1

    async def test_an_epoch_that_no_run_holds_fences_no_run(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        epoch = acquire_lease(store, start.run, {})
        generation = GenerateRequest(start, [[10]], [1], SHORT)
        await engine.generate(generation, epoch=epoch + 1000)
        await engine.release(start.run, epoch=epoch + 1000)
        assert len(await engine.generate(generation, epoch=epoch)) == 1
        request = request_after(start, commit_batch(store, start))
        assert (await engine.take_gradient_step(request, epoch=epoch)).policy.step == 1

    @pytest.mark.parametrize("damage", ["gone", "short"])
    async def test_a_step_without_its_batch_in_the_store_is_not_committed(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, damage: str
    ) -> None:
        batch = commit_batch(store, start)
        (entry,) = read_manifest(store, batch.key).files
        store.delete(entry.key)
        if damage == "short":
            store.put(entry.key, b"10 bytes..")
        with pytest.raises(CorruptArtifact):
            await engine.take_gradient_step(request_after(start, batch))
        assert Chain.of(store, start).record(1) is None

    async def test_the_key_of_a_deleted_run_can_be_used_again(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path
    ) -> None:
        for _ in range(2):
            acquire_lease(store, start.run, {})
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)), epoch=2)
        delete_runs(store, start.run, no_active_runs=True)
        assert acquire_lease(store, start.run, {}) == 1
        again = await new_policy(engine, tiny_folder, run=start.run)
        request = request_after(again, commit_batch(store, again))
        repeated = await engine.take_gradient_step(request, epoch=1)
        assert repeated.policy.state == record.policy.state

    # -- writing -----------------------------------------------------------------------------------------------

    async def test_a_checkpoint_saved_twice_is_one_artifact(
        self, connect: Connect, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        rival = await connect()
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        mine, theirs = await asyncio.gather(
            engine.save_checkpoint(record.policy, provenance=PROVENANCE),
            rival.save_checkpoint(record.policy, provenance=PROVENANCE),
        )
        assert mine == theirs == await engine.save_checkpoint(record.policy, provenance=PROVENANCE)
        assert mine.kind == "checkpoint"
        assert record.policy.uri in mine.parents
        under = [info.key for info in store.list(f"{mine.key}/")]
        assert len(under) == len(read_manifest(store, mine.key).files) + 1  # its manifest: a loser leaves nothing

    async def test_an_exported_model_is_a_plain_hugging_face_model(
        self, connect: Connect, engine: Engine, store: ObjectStore, start: PolicyRef, tmp_path: Path, tiny_folder: Path
    ) -> None:
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        exported = await engine.export_model(record.policy, "trained", provenance=PROVENANCE)
        assert await engine.export_model(record.policy, "trained", provenance=PROVENANCE) == exported
        assert await (await connect()).export_model(record.policy, "trained", provenance=PROVENANCE) == exported
        assert exported.key.startswith("models/trained/")

        folder = plain_folder(store, exported, tmp_path / "exported")
        assert IMPLEMENTATION not in (folder / "config.json").read_text()
        logprobs = await score(engine, record.policy)
        assert close(logprobs, hugging_face_logprobs(folder, SCORED.token_ids)[2:])
        assert not close(logprobs, hugging_face_logprobs(tiny_folder, SCORED.token_ids)[2:])
        tokenizer, base = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_folder)
        assert tokenizer.encode("Größe 5 ≥ 3") == base.encode("Größe 5 ≥ 3")
        assert (tokenizer.eos_token_id, tokenizer.chat_template) == (base.eos_token_id, base.chat_template)

    async def test_an_exported_model_is_the_start_of_another_run(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        await engine.export_model(record.policy, "trained", provenance=PROVENANCE)
        base = await engine.import_model("trained", provenance=PROVENANCE)
        root = Root(base=base, base_digest=base.sha256)
        again = await engine.create_policy(PolicySpec(run="next", stage="0-s", model="policy", root=root))
        assert await score(engine, again) == await score(engine, record.policy)

    async def test_info_says_what_the_bits_depend_on(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        info = await engine.info()
        assert record.numerics.model_copy(update={"micro_batches": 0}) == info.numerics
        assert record.numerics.micro_batches >= 1
