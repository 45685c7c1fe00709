"""The contract of `engine.protocol.Engine`: models, policies, generation and logprobs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import BadModelFolder, BadSpec, SampleTooLong, StepConflict, UnsupportedSchema
from engine.protocol import (
    Engine,
    GenerateRequest,
    LogprobsRequest,
    PolicySpec,
    RowsRequest,
    SamplingParams,
    TableRows,
    TokenSequence,
    TopRowsRequest,
)
from engine.text.tokenizers import load_tokenizer
from storage.chain.records import PolicyRef, Root
from storage.errors import ObjectNotFound
from storage.store.objects import ObjectStore
from tests.contracts.engine_fixtures import (
    PROMPTS,
    SCORED,
    SEEDS,
    SHORT,
    Connect,
    EngineFixtures,
    close,
    draw,
    same_draws,
)
from tests.fixtures.engines import PROVENANCE, ROWS, commit_batch, hugging_face_logprobs, new_policy, row


class ReadingContract(EngineFixtures):
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

    async def test_completions_fit_a_json_schema(self, engine: Engine, start: PolicyRef, tiny_folder: Path) -> None:
        schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
        text = json.dumps({**schema, "additionalProperties": False})
        sampling = SamplingParams(max_new_tokens=32, json_schema=text)
        completions = await engine.generate(GenerateRequest(start, PROMPTS, SEEDS, sampling))
        tokenizer = load_tokenizer(tiny_folder)
        for completion in completions:
            assert json.loads(tokenizer.decode(completion.token_ids))["n"] in (1, 22, 333)
            assert completion.stop_reason == "eos"
        unsupported = SamplingParams(json_schema='{"type": "object", "not": {}}')
        with pytest.raises(UnsupportedSchema, match="simplify it"):
            await engine.generate(GenerateRequest(start, PROMPTS, SEEDS, unsupported))

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
        assert same_draws(first[:1], first[1:2], exact=self.exact)
        assert first[0].token_ids != first[2].token_ids  # 259 nearly equal odds for each of twelve tokens
        assert same_draws(await engine.generate(request), first, exact=self.exact)

    async def test_an_interrupted_completion_is_continued_from_its_tokens(
        self, engine: Engine, start: PolicyRef, tiny_folder: Path
    ) -> None:
        """In calls that end after a millisecond, as many as it takes. The logprobs are those of the whole text."""
        sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
        tokens: list[int] = []
        logprobs: list[float] = []
        calls = 0
        while len(tokens) < 24:
            request = GenerateRequest(
                start, [[10, 11, 12]], [calls], sampling,
                sampled=[tokens], interruptible=True, interrupt_after=1e-3,
            )  # fmt: skip
            (completion,) = await engine.generate(request)
            tokens, logprobs, calls = tokens + completion.token_ids, logprobs + completion.logprobs, calls + 1
            assert completion.stop_reason == ("length" if len(tokens) == 24 else "interrupted")
        assert calls > 1
        assert close(logprobs, hugging_face_logprobs(tiny_folder, [10, 11, 12, *tokens])[2:])

    async def test_a_request_that_cannot_be_interrupted_so_is_refused(self, start: PolicyRef) -> None:
        with pytest.raises(BadSpec, match="interruptible=True, or leave it out"):
            GenerateRequest(start, [[1]], [0], interrupt_after=1.0)
        with pytest.raises(BadSpec, match="steps_ahead=-1 was given"):
            GenerateRequest(start, [[1]], [0], steps_ahead=-1)
        with pytest.raises(BadSpec, match="2 prompts were given with the sampled tokens of 1"):
            GenerateRequest(start, [[1], [2]], [0, 1], sampled=[[3]])

    async def test_a_fresh_engine_draws_the_same(self, engine: Engine, connect: Connect, start: PolicyRef) -> None:
        assert same_draws(await draw(await connect(), start), await draw(engine, start), exact=self.exact)

    async def test_greedy_takes_the_most_probable_token_at_temperature_one(
        self, engine: Engine, start: PolicyRef, tiny_folder: Path
    ) -> None:
        greedy = SamplingParams(temperature=0, max_new_tokens=3)
        first, second = await engine.generate(GenerateRequest(start, [[10, 11, 12]] * 2, [1, 2], greedy))
        assert same_draws([first], [second], exact=self.exact)
        module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
        ids = [10, 11, 12]
        for token, logprob in zip(first.token_ids, first.logprobs, strict=True):
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
        (logprobs,) = await engine.logprobs(request)
        assert close(logprobs, expected[2:])

    async def test_only_tokens_of_positive_weight_are_scored(self, engine: Engine, start: PolicyRef) -> None:
        every = TokenSequence(SCORED.token_ids, [0.0] + [1.0] * 5)
        some = TokenSequence(SCORED.token_ids, [0.0, 1.0, 0.0, 0.5, 0.0, 1.0])
        none = TokenSequence(SCORED.token_ids, [0.0] * 6)
        all_five, three, nothing = await engine.logprobs(LogprobsRequest(start, [every, some, none]))
        assert close(three, [all_five[0], all_five[2], all_five[4]])
        assert nothing == []

    async def test_committed_rows_are_scored_as_the_sequences_that_they_hold(
        self, engine: Engine, start: PolicyRef, store: ObjectStore
    ) -> None:
        gap = row([10, 11], [20, 21, 22], group="g") | {"loss_mask": [False, False, True, False, True]}
        batches = [commit_batch(store, start, rows, shard=n) for n, rows in enumerate((ROWS, [gap]))]
        sequences = [TokenSequence(ROWS[n]["token_ids"], ROWS[n]["loss_mask"], ROWS[n]["group"]) for n in (0, 2)]
        sequences.append(TokenSequence(gap["token_ids"], gap["loss_mask"], gap["group"]))
        expected = await engine.logprobs(LogprobsRequest(start, sequences, temperature=0.5))
        tables = [TableRows(batches[0], np.array([True, False, True])), TableRows(batches[1], np.array([True]))]
        scored = await engine.logprobs_of_rows(RowsRequest(start, tables, temperature=0.5))
        assert scored.tolist() == [*expected[0], *expected[1], *expected[2]]
        assert len(scored) == 4 + 3 + 2

    async def test_the_most_probable_tokens_of_committed_rows_are_those_of_the_hugging_face_model(
        self, engine: Engine, start: PolicyRef, store: ObjectStore, tiny_folder: Path
    ) -> None:
        gap = row([10, 11], [20, 21, 22], group="g") | {"loss_mask": [False, False, True, False, True]}
        batches = [commit_batch(store, start, rows, shard=n) for n, rows in enumerate((ROWS, [gap]))]
        tables = [TableRows(batches[0], np.array([True, False, True])), TableRows(batches[1], np.array([True]))]
        top = await engine.top_logprobs_of_rows(TopRowsRequest(start, tables, temperature=0.5, top=3))
        assert top.token_ids_TK.shape == top.logprobs_TK.shape == (4 + 3 + 2, 3)
        assert top.token_ids_TK.dtype == np.int32

        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        expected = []
        for rows in (ROWS[0], ROWS[2], gap):
            with torch.no_grad():
                logits_TV = model(torch.tensor([rows["token_ids"]])).logits[0] / 0.5
            trained = np.flatnonzero(rows["loss_mask"])
            expected.append(logits_TV.log_softmax(-1)[trained - 1])
        expected_TV = torch.cat(expected)
        values_TK, _ = expected_TV.sort(dim=1, descending=True)
        assert np.abs(top.logprobs_TK - values_TK[:, :3].numpy()).max() < 1e-4
        of_ids_TK = expected_TV.gather(1, torch.from_numpy(top.token_ids_TK.astype(np.int64)))
        assert np.abs(top.logprobs_TK - of_ids_TK.numpy()).max() < 1e-4

    async def test_the_most_probable_tokens_of_the_whole_vocabulary_have_all_of_the_probability(
        self, engine: Engine, start: PolicyRef, store: ObjectStore, tiny_folder: Path
    ) -> None:
        tables = [TableRows(commit_batch(store, start), np.array([True] * 3))]
        vocabulary = AutoModelForCausalLM.from_pretrained(tiny_folder).config.vocab_size
        top = await engine.top_logprobs_of_rows(TopRowsRequest(start, tables, top=vocabulary))
        assert (np.sort(top.token_ids_TK, axis=1) == np.arange(vocabulary)).all()
        assert np.abs(np.exp(top.logprobs_TK).sum(axis=1) - 1).max() < 1e-4
        with pytest.raises(BadSpec, match=f"the {vocabulary + 1} most probable tokens .* the model has {vocabulary}"):
            await engine.top_logprobs_of_rows(TopRowsRequest(start, tables, top=vocabulary + 1))
        nothing = await engine.top_logprobs_of_rows(TopRowsRequest(start, [], top=2))
        assert nothing.token_ids_TK.shape == (0, 2)

    async def test_rows_that_no_table_has_are_refused(
        self, engine: Engine, start: PolicyRef, store: ObjectStore
    ) -> None:
        batch = commit_batch(store, start)
        with pytest.raises(BadSpec, match="has 3 rows, and 2 were given"):
            await engine.logprobs_of_rows(RowsRequest(start, [TableRows(batch, np.array([True, True]))]))
        missing = batch.model_copy(update={"key": f"{batch.key}-other"})
        with pytest.raises(ObjectNotFound):
            await engine.logprobs_of_rows(RowsRequest(start, [TableRows(missing, np.array([True] * 3))]))
        with pytest.raises(BadSpec, match="'graded'; give rollouts or batch"):
            TableRows(batch.model_copy(update={"kind": "graded"}), np.array([True] * 3))
