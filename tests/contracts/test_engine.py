"""The contract of `engine.protocol.Engine`, whoever answers. A new way to reach one inherits `EngineContract`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.backends.attention import IMPLEMENTATION
from engine.errors import BadModelFolder, BadSpec, Fenced, SampleTooLong, StepConflict, UnknownPolicy
from engine.local.engine import LocalEngine
from engine.protocol import (
    Completion,
    Engine,
    GenerateRequest,
    LogprobsRequest,
    PolicySpec,
    SamplingParams,
    TokenSequence,
)
from storage.artifacts import ArtifactRef, materialise_files
from storage.chain import Chain, PolicyRef, Root
from storage.leases import acquire
from storage.objects import ObjectStore, open_store
from tests.fixtures.engines import (
    DETERMINISTIC,
    PROVENANCE,
    commit_batch,
    hugging_face_logprobs,
    new_policy,
    request_after,
    row,
)

Connect = Callable[[], Awaitable[Engine]]

PROMPTS = [[10, 11, 12, 13], [20, 21], [10, 11, 12, 13], [30], [10, 11], [40, 41, 42, 43, 44, 45]]
SEEDS = [1, 2, 3, 4, 5, 6]
SHORT = SamplingParams(max_new_tokens=6)
SCORED = TokenSequence([10, 11, 12, 20, 21, 22], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
OTHER_ROWS = [row([10, 11], [60, 61])]


def close(left: list[float], right: list[float], *, tolerance: float = 1e-4) -> bool:
    return len(left) == len(right) and max(abs(a - b) for a, b in zip(left, right, strict=True)) <= tolerance


async def score(engine: Engine, policy: PolicyRef, sequence: TokenSequence = SCORED) -> list[float]:
    return (await engine.logprobs(LogprobsRequest(policy, [sequence])))[0]


async def draw(engine: Engine, policy: PolicyRef, sampling: SamplingParams = SHORT) -> list[Completion]:
    return await engine.generate(GenerateRequest(policy, PROMPTS, SEEDS, sampling))


class EngineContract:
    """Subclasses give `connect`: each call is another engine (or another client) over the store at `store_url`."""

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store"

    @pytest.fixture
    def store(self, store_url: str) -> ObjectStore:
        return open_store(store_url)

    @pytest.fixture
    def connect(self, store_url: str) -> Connect:
        raise NotImplementedError

    @pytest.fixture
    async def engine(self, connect: Connect) -> Engine:
        return await connect()

    @pytest.fixture
    async def start(self, engine: Engine, tiny_folder: Path) -> PolicyRef:
        return await new_policy(engine, tiny_folder)

    # -- models and policies -----------------------------------------------------------------------------------

    async def test_importing_a_folder_twice_is_one_model(
        self, engine: Engine, connect: Connect, store: ObjectStore, tiny_folder: Path
    ) -> None:
        first = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
        before = [info.key for info in store.list()]
        assert await engine.import_model(str(tiny_folder), provenance=PROVENANCE) == first
        assert await (await connect()).import_model(str(tiny_folder), provenance=PROVENANCE) == first
        assert [info.key for info in store.list()] == before

    async def test_an_imported_model_is_found_by_name_and_by_version(self, engine: Engine, tiny_folder: Path) -> None:
        imported = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
        _, name, version = imported.key.split("/")
        assert await engine.import_model(name, provenance=PROVENANCE) == imported
        assert await engine.import_model(f"{name}@{version}", provenance=PROVENANCE) == imported
        with pytest.raises(BadModelFolder, match="no-such-model"):
            await engine.import_model("no-such-model", provenance=PROVENANCE)

    async def test_creating_a_policy_twice_is_one_chain(
        self, connect: Connect, start: PolicyRef, tiny_folder: Path
    ) -> None:
        assert start.step == 0
        assert await new_policy(await connect(), tiny_folder) == start

    async def test_another_root_for_the_same_chain_is_a_conflict(
        self, engine: Engine, start: PolicyRef, tiny_folder: Path
    ) -> None:
        base = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
        root = Root(base=base, base_digest=base.sha256, init_seed=1)
        with pytest.raises(StepConflict, match="r/0-s/policy"):
            await engine.create_policy(PolicySpec(run="r", stage="0-s", model="policy", root=root))

    # -- generate ----------------------------------------------------------------------------------------------

    async def test_completions_come_in_the_order_of_the_prompts(self, engine: Engine, start: PolicyRef) -> None:
        together = await draw(engine, start)
        for prompt, seed, completion in zip(PROMPTS, SEEDS, together, strict=True):
            (alone,) = await engine.generate(GenerateRequest(start, [prompt], [seed], SHORT))
            assert completion.token_ids == alone.token_ids
            assert completion.stop_reason == alone.stop_reason
            assert close(completion.logprobs, alone.logprobs)

    async def test_equal_seeds_draw_equal_completions_and_others_do_not(
        self, engine: Engine, start: PolicyRef
    ) -> None:
        request = GenerateRequest(start, [[10, 11]] * 3, [7, 7, 8], SamplingParams(max_new_tokens=12))
        first = await engine.generate(request)
        assert first[0] == first[1]
        assert first[0].token_ids != first[2].token_ids  # 259 nearly equal odds for each of twelve tokens
        assert await engine.generate(request) == first

    async def test_a_fresh_engine_draws_the_same(self, engine: Engine, connect: Connect, start: PolicyRef) -> None:
        assert await draw(await connect(), start) == await draw(engine, start)

    async def test_greedy_takes_the_most_probable_token_at_temperature_one(
        self, engine: Engine, start: PolicyRef, tiny_folder: Path
    ) -> None:
        greedy = SamplingParams(temperature=0, max_new_tokens=3)
        one, two = await engine.generate(GenerateRequest(start, [[10, 11, 12]] * 2, [1, 2], greedy))
        assert one == two
        module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
        ids = [10, 11, 12]
        for token, logprob in zip(one.token_ids, one.logprobs, strict=True):
            with torch.no_grad():
                expected_V = module(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert token == int(expected_V.argmax())
            assert logprob == pytest.approx(float(expected_V.max()), abs=1e-4)
            ids.append(token)

    async def test_generation_stops_where_it_should(self, engine: Engine, start: PolicyRef) -> None:
        greedy = SamplingParams(temperature=0, max_new_tokens=4)
        request = GenerateRequest(start, [[10, 11]], [0], greedy)
        (free,) = await engine.generate(request)
        assert (len(free.token_ids), free.stop_reason) == (4, "length")
        stop = free.token_ids[0]
        (stopped,) = await engine.generate(
            GenerateRequest(start, [[10, 11]], [0], greedy.model_copy(update={"stop_token_ids": (stop,)}))
        )
        assert (stopped.token_ids, stopped.stop_reason) == ([stop], "stop")

    async def test_no_prompts_no_completions(self, engine: Engine, start: PolicyRef) -> None:
        assert await engine.generate(GenerateRequest(start, [], [], SHORT)) == []

    @pytest.mark.parametrize(
        ("prompts", "seeds", "message"),
        [
            ([[10], []], [1, 2], "prompt 1 has no tokens"),
            ([[10], [1_000_000]], [1, 2], "prompt 1 has token ids outside"),
            ([[-1]], [1], "prompt 0 has token ids outside"),
            ([[10]], [1, 2], "1 prompts.*2 seeds"),
        ],
    )
    async def test_malformed_prompts_are_refused(
        self, engine: Engine, start: PolicyRef, prompts: list[list[int]], seeds: list[int], message: str
    ) -> None:
        with pytest.raises(BadSpec, match=message):
            await engine.generate(GenerateRequest(start, prompts, seeds, SHORT))

    async def test_a_prompt_beyond_the_context_is_refused(self, engine: Engine, start: PolicyRef) -> None:
        with pytest.raises(SampleTooLong, match="4096"):
            await engine.generate(GenerateRequest(start, [[10] * 4095], [1], SamplingParams(max_new_tokens=2)))

    # -- logprobs ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    async def test_the_trainer_scores_tokens_as_the_sampler_drew_them(
        self, engine: Engine, start: PolicyRef, temperature: float
    ) -> None:
        drawn = await draw(engine, start, SamplingParams(max_new_tokens=8, temperature=temperature))
        sequences = [
            TokenSequence(prompt + c.token_ids, [0.0] * len(prompt) + [1.0] * len(c.token_ids))
            for prompt, c in zip(PROMPTS, drawn, strict=True)
        ]
        scored = await engine.logprobs(LogprobsRequest(start, sequences, temperature=temperature))
        for completion, values in zip(drawn, scored, strict=True):
            assert close(completion.logprobs, values)

    async def test_logprobs_are_those_of_the_hugging_face_model(
        self, engine: Engine, start: PolicyRef, tiny_folder: Path
    ) -> None:
        expected = hugging_face_logprobs(tiny_folder, SCORED.token_ids, temperature=0.5)
        request = LogprobsRequest(start, [SCORED], temperature=0.5)
        (found,) = await engine.logprobs(request)
        assert close(found, expected[2:])

    async def test_only_tokens_of_positive_weight_are_scored(self, engine: Engine, start: PolicyRef) -> None:
        every = TokenSequence(SCORED.token_ids, [0.0] + [1.0] * 5)
        some = TokenSequence(SCORED.token_ids, [0.0, 1.0, 0.0, 0.5, 0.0, 1.0])
        none = TokenSequence(SCORED.token_ids, [0.0] * 6)
        all_five, three, nothing = await engine.logprobs(LogprobsRequest(start, [every, some, none]))
        assert close(three, [all_five[0], all_five[2], all_five[4]])
        assert nothing == []

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
        "change", [{"run": "nobody"}, {"stage": "9-no"}, {"model": "other"}, {"step": 5}, {"state": "f" * 64}]
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
        assert Chain.of(store, unknown).record(unknown.step + 1) is None

    async def test_a_checkpoint_answers_only_for_its_own_history(self, engine: Engine, start: PolicyRef) -> None:
        await engine.save_checkpoint(start, provenance=PROVENANCE)
        with pytest.raises(UnknownPolicy):
            await engine.save_checkpoint(start.model_copy(update={"state": "f" * 64}), provenance=PROVENANCE)

    async def test_a_lease_taken_elsewhere_fences_the_next_step(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        request = request_after(start, commit_batch(store, start))
        mine, theirs = acquire(store, start.run, {}), acquire(store, start.run, {"who": "a successor"})
        with pytest.raises(Fenced, match="another process is driving the run"):
            await engine.take_gradient_step(request, epoch=mine)
        assert Chain.of(store, start).record(1) is None
        assert (await engine.take_gradient_step(request, epoch=theirs)).policy.step == 1

    async def test_a_lower_epoch_is_fenced_and_changes_nothing(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path
    ) -> None:
        other_run = await new_policy(engine, tiny_folder, run="other")
        request = request_after(start, commit_batch(store, start))
        one = GenerateRequest(start, [[10]], [1], SHORT)
        for _ in range(2):
            acquire(store, start.run, {})
        await engine.generate(one, epoch=2)
        with pytest.raises(Fenced, match=r"epoch 1.*epoch 2"):
            await engine.take_gradient_step(request, epoch=1)
        with pytest.raises(Fenced):
            await engine.generate(one, epoch=1)
        with pytest.raises(Fenced):
            await engine.logprobs(LogprobsRequest(start, [SCORED]), epoch=1)
        with pytest.raises(Fenced):
            await engine.save_checkpoint(start, provenance=PROVENANCE, epoch=1)
        with pytest.raises(Fenced):
            await engine.export_model(start, "m", provenance=PROVENANCE, epoch=1)
        assert list(Chain.of(store, start).steps()) == []
        await engine.generate(GenerateRequest(other_run, [[10]], [1], SHORT), epoch=1)
        assert (await engine.take_gradient_step(request, epoch=2)).policy.step == 1

    async def test_an_epoch_that_nobody_holds_fences_nobody(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        epoch = acquire(store, start.run, {})
        one = GenerateRequest(start, [[10]], [1], SHORT)
        await engine.generate(one, epoch=epoch + 1000)
        await engine.release(start.run, epoch=epoch + 1000)
        assert len(await engine.generate(one, epoch=epoch)) == 1
        request = request_after(start, commit_batch(store, start))
        assert (await engine.take_gradient_step(request, epoch=epoch)).policy.step == 1

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
        assert len(under) == 3  # weights, optimizer, manifest: a loser leaves nothing

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
        found = await score(engine, record.policy)
        assert close(found, hugging_face_logprobs(folder, SCORED.token_ids)[2:])
        assert not close(found, hugging_face_logprobs(tiny_folder, SCORED.token_ids)[2:])
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
        assert record.numerics.micro_batches == 1


def plain_folder(store: ObjectStore, ref: ArtifactRef, folder: Path) -> Path:
    """A copy of a registered model as files in one folder, as a person would download it."""
    folder.mkdir()
    for name, path in materialise_files(store, ref.key, folder).items():
        if path.parent != folder:
            (folder / name).write_bytes(path.read_bytes())
    return folder


class TestLocalEngine(EngineContract):
    @pytest.fixture
    async def connect(self, store_url: str) -> AsyncIterator[Connect]:  # type: ignore[override]
        opened: list[LocalEngine] = []

        async def connect() -> Engine:
            # fewer rows than PROMPTS: their order must survive being decoded in runs
            opened.append(LocalEngine(store_url, DETERMINISTIC.model_copy(update={"max_rows": 4})))
            return opened[-1]

        yield connect
        for engine in opened:
            await engine.close()


class TestLocalEngineInMemory(TestLocalEngine):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}"
