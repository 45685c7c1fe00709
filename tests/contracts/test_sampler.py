"""The contract of samplers, checked against plain transformers. The torch sampler is always tested, vLLM where it is
installed (`make test-vllm`). Expected numbers come from a forward pass of Hugging Face, processed as the docstrings
describe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from engine.backends.protocol import Sampler, SamplerBackend, Trainer, sync
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.trainer_samplers import TorchSamplerBackend
from engine.errors import BadSpec, SampleTooLong, UnsupportedSchema
from engine.protocol import Completion, SamplingParams, TokenIds
from engine.specs.adapters import LoraSpec
from engine.specs.engine import LocalEngineSpec, TorchSamplerSpec, VllmSpec
from engine.text.tokenizers import load_tokenizer
from tests.contracts.completion_ends import check_stop_strings, with_other_end

SPEC = LocalEngineSpec(
    device="cpu",
    compute_dtype="float32",
    threads=1,
    sampler=VllmSpec(max_context=512, kv_cache_gib=0.25, max_lora_rank=8),
)
END = 2
"""The tiny model's end-of-sequence id."""
PROMPTS: list[TokenIds] = [[5, 6, 7], [40], [9, 9, 9, 9, 200, 3], [100, 101], [40], list(range(3, 60))]
TOLERANCE = 5e-4 if torch.cuda.is_available() else 1e-4
"""In nats. On a GPU, vLLM's attention multiplies float32 in TF32."""


class Verdict(BaseModel):
    """An answer with a field of each kind. Its longest JSON has less than 256 tokens of the tiny model."""

    model_config = ConfigDict(extra="forbid")

    why: str = Field(max_length=12)
    result: Literal["PASS", "FAIL"]
    score: int = Field(ge=0, le=10)
    sure: bool
    tags: list[Literal["a", "b"]] = Field(max_length=3)


def reference(trainer: Trainer, folder: Path) -> Any:
    """The trainer's weights as a plain transformers model."""
    from transformers import AutoModelForCausalLM

    trainer.export_merged(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def next_logits(model: Any, prompt: TokenIds, completion: TokenIds) -> Tensor:
    """(tokens of the completion, V): what each of them was drawn from."""
    ids = torch.tensor([prompt + completion])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def distribution(logits_V: Tensor, params: SamplingParams, *, forbidden: set[int] = frozenset()) -> dict[int, float]:
    """Token -> log p of the distribution that is sampled: temperature, then top-k, then top-p, by the definitions."""
    scaled = {i: v / (params.temperature or 1.0) for i, v in enumerate(logits_V.tolist()) if i not in forbidden}
    ranked = sorted(scaled, key=lambda i: -scaled[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    peak = scaled[ranked[0]]
    mass = sum(math.exp(scaled[i] - peak) for i in ranked)
    nucleus, reached = [], 0.0
    for i in ranked:
        nucleus.append(i)
        reached += math.exp(scaled[i] - peak) / mass
        if reached >= params.top_p:
            break
    total = sum(math.exp(scaled[i] - peak) for i in nucleus)
    return {i: scaled[i] - peak - math.log(total) for i in nucleus}


def assert_drawn_from(model: Any, prompt: TokenIds, drawn: Completion, params: SamplingParams) -> None:
    rows = next_logits(model, prompt, drawn.token_ids)
    for place, (token, logprob, row) in enumerate(zip(drawn.token_ids, drawn.logprobs, rows, strict=True)):
        early = place < params.min_new_tokens
        expected = distribution(row, params, forbidden={END, *params.stop_token_ids} if early else set())
        assert token in expected, f"token {place} is not one that may be drawn"
        assert logprob == pytest.approx(expected[token], abs=TOLERANCE)


def moved(trainer: Any, seed: int) -> None:
    """Other weights: every one of them moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainer.trained_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def untied_folder(folder: Path, tiny_folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_folder)
    config.tie_word_embeddings = False
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class SamplerContract:
    """Subclasses give `backend`."""

    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[SamplerBackend]:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def trainers(self) -> TorchBackend:
        return TorchBackend(SPEC)

    @pytest.fixture
    def trainer(self, trainers: TorchBackend, tiny_folder: Path) -> Any:
        return trainers.load(tiny_folder)

    @pytest.fixture
    def sampler(self, backend: SamplerBackend, trainer: Any, tiny_folder: Path) -> Iterator[Sampler]:
        sampler = backend.new_sampler(trainer, tokenizer=load_tokenizer(tiny_folder))
        sync(sampler, trainer, "state-0")
        yield sampler
        sampler.close()

    @pytest.fixture
    def model(self, trainer: Any, tmp_path: Path) -> Any:
        return reference(trainer, tmp_path / "reference")

    # -- distributions ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_new_tokens=8),
            SamplingParams(max_new_tokens=8, temperature=0.5),
            SamplingParams(max_new_tokens=8, temperature=1.7, top_k=5),
            SamplingParams(max_new_tokens=8, top_p=0.3),
            SamplingParams(max_new_tokens=8, temperature=0.7, top_k=20, top_p=0.5),
            SamplingParams(max_new_tokens=8, top_k=10_000),
            SamplingParams(max_new_tokens=8, min_new_tokens=8, stop_token_ids=(50, 60)),
            SamplingParams(max_new_tokens=8, temperature=0.0),
            SamplingParams(max_new_tokens=8, temperature=0.0, top_k=3),
            SamplingParams(max_new_tokens=8, temperature=0.0, top_p=0.2),
        ],
        ids=str,
    )
    def test_each_token_comes_with_the_logprob_of_the_distribution_it_was_drawn_from(
        self, sampler: Sampler, model: Any, params: SamplingParams
    ) -> None:
        drawn = sampler.sample(PROMPTS, [7 + n for n in range(len(PROMPTS))], params)
        assert len(drawn) == len(PROMPTS)
        for prompt, completion in zip(PROMPTS, drawn, strict=True):
            assert_drawn_from(model, prompt, completion, params)

    def test_greedy_is_the_argmax_of_plain_transformers(self, sampler: Sampler, model: Any) -> None:
        drawn = sampler.sample(PROMPTS, [0] * len(PROMPTS), SamplingParams(temperature=0, max_new_tokens=12))
        for prompt, completion in zip(PROMPTS, drawn, strict=True):
            assert completion.token_ids == next_logits(model, prompt, completion.token_ids).argmax(-1).tolist()
            assert len(completion.token_ids) == 12 or completion.token_ids[-1] == END

    # -- streams ----------------------------------------------------------------------------------------------

    def test_a_seed_gives_one_completion_whatever_it_is_batched_with(self, sampler: Sampler) -> None:
        params = SamplingParams(max_new_tokens=10, min_new_tokens=10)
        alone = [sampler.sample([[40]], [seed], params)[0].token_ids for seed in (1, 2)]
        assert alone[0] != alone[1]
        prompts = [[40], [8, 9], [40], [40]]
        together = [c.token_ids for c in sampler.sample(prompts, [2, 5, 1, 2], params)]
        assert [together[0], together[2], together[3]] == [alone[1], alone[0], alone[1]]

    def test_large_seeds_are_taken(self, sampler: Sampler) -> None:
        params = SamplingParams(max_new_tokens=6, min_new_tokens=6)
        first, second = sampler.sample([[40], [40]], [(1 << 62) + 1, (1 << 62) + 2], params)
        assert first.token_ids != second.token_ids

    def test_nothing_is_drawn_for_no_prompts(self, sampler: Sampler) -> None:
        assert sampler.sample([], [], SamplingParams()) == []

    # -- ends -------------------------------------------------------------------------------------------------

    def test_an_end_of_sequence_is_the_last_token_and_only_there(self, sampler: Sampler) -> None:
        drawn = sampler.sample([[40]] * 32, list(range(32)), SamplingParams(max_new_tokens=64))
        reasons = {completion.stop_reason for completion in drawn}
        assert reasons == {"eos", "length"}  # about one in 259 tokens ends a sequence of random weights
        for completion in drawn:
            assert END not in completion.token_ids[:-1]
            assert len(completion.token_ids) == len(completion.logprobs)
            if completion.stop_reason == "eos":
                assert completion.token_ids[-1] == END
            else:
                assert len(completion.token_ids) == 64 and completion.token_ids[-1] != END

    def test_a_stop_token_ends_and_is_part_of_the_completion(self, sampler: Sampler) -> None:
        greedy = SamplingParams(temperature=0, max_new_tokens=6)
        free = sampler.sample([[5, 6, 7]], [0], greedy)[0].token_ids
        stopped = sampler.sample([[5, 6, 7]], [0], greedy.model_copy(update={"stop_token_ids": (free[2],)}))[0]
        first = free.index(free[2])
        assert stopped.token_ids == free[: first + 1]
        assert stopped.stop_reason == "stop"

    def test_an_ignored_end_of_sequence_is_a_token_like_any_other(self, sampler: Sampler, model: Any) -> None:
        params = SamplingParams(max_new_tokens=64)
        prompts, seeds = [[40]] * 32, list(range(32))
        ended = sampler.sample(prompts, seeds, params)
        ignoring = params.model_copy(update={"ignore_eos": True})
        drawn = sampler.sample(prompts, seeds, ignoring)
        assert [(len(completion.token_ids), completion.stop_reason) for completion in drawn] == [(64, "length")] * 32
        passed = [
            index
            for index, completion in enumerate(ended)
            if completion.stop_reason == "eos" and len(completion.token_ids) < 64
        ]
        assert passed  # one of 32 at least, of about one end in 259 tokens
        for at in passed:
            before = ended[at].token_ids
            assert drawn[at].token_ids[: len(before)] == before and before[-1] == END
            assert_drawn_from(model, prompts[at], drawn[at], ignoring)
        stop = drawn[passed[0]].token_ids[len(ended[passed[0]].token_ids)]
        stopping = ignoring.model_copy(update={"stop_token_ids": (stop,)})
        (stopped,) = sampler.sample([[40]], [seeds[passed[0]]], stopping)
        assert stopped.stop_reason == "stop" and stopped.token_ids[-1] == stop
        assert stopped.token_ids == drawn[passed[0]].token_ids[: drawn[passed[0]].token_ids.index(stop) + 1]

    def test_before_min_new_tokens_nothing_ends(self, sampler: Sampler) -> None:
        greedy = SamplingParams(temperature=0, max_new_tokens=6)
        free = sampler.sample([[5, 6, 7]], [0], greedy)[0].token_ids
        held = greedy.model_copy(update={"stop_token_ids": (free[0],), "min_new_tokens": 3})
        completion = sampler.sample([[5, 6, 7]], [0], held)[0]
        assert free[0] not in completion.token_ids[:3]
        assert len(completion.token_ids) >= 3
        more = SamplingParams(max_new_tokens=4, min_new_tokens=9)
        assert [len(c.token_ids) for c in sampler.sample([[40]] * 4, [1, 2, 3, 4], more)] == [4] * 4

    def test_a_stop_string_ends_at_the_token_that_completes_it(self, sampler: Sampler, tiny_folder: Path) -> None:
        check_stop_strings(sampler, load_tokenizer(tiny_folder))

    def test_a_turn_ends_at_each_end_that_the_files_of_the_model_name(
        self, backend: SamplerBackend, trainers: TorchBackend, tiny_folder: Path, tmp_path: Path
    ) -> None:
        """The template ends turns with 2, and both configs of the model say 5."""
        folder = with_other_end(tiny_folder, tmp_path / "planted", end=5)
        trainer, prompts, seeds = trainers.load(folder), [[40]] * 64, list(range(64))
        sampler = backend.new_sampler(trainer, tokenizer=load_tokenizer(folder))
        sync(sampler, trainer, "planted")
        free = sampler.sample(prompts, seeds, SamplingParams(max_new_tokens=64, ignore_eos=True))
        drawn = sampler.sample(prompts, seeds, SamplingParams(max_new_tokens=64))
        for completion, whole in zip(drawn, free, strict=True):
            ends = [index for index, token in enumerate(whole.token_ids) if token in (END, 5)]
            length = ends[0] + 1 if ends else 64
            assert completion.token_ids == whole.token_ids[:length]
            assert completion.stop_reason == ("eos" if ends else "length")
        assert {completion.token_ids[-1] for completion in drawn if completion.stop_reason == "eos"} == {END, 5}
        sampler.close()

    # -- completions that are continued ---------------------------------------------------------------------------

    def test_a_continued_completion_is_drawn_after_its_tokens(self, sampler: Sampler, model: Any) -> None:
        """The lengths count from its first token: 9 tokens in all, of which the first 7 do not end it."""
        params = SamplingParams(max_new_tokens=9, min_new_tokens=7, stop_token_ids=(50, 60))
        sampled = [[], [11], [11, 12, 13, 14, 15, 16, 17, 18], [70, 71], [11], []]
        drawn = sampler.sample(PROMPTS, [3 + n for n in range(len(PROMPTS))], params, sampled=sampled)
        for prompt, tokens, completion in zip(PROMPTS, sampled, drawn, strict=True):
            whole = len(tokens) + len(completion.token_ids)
            assert whole == 9 if completion.stop_reason == "length" else 7 < whole <= 9
            rows = next_logits(model, [*prompt, *tokens], completion.token_ids)
            for place, (token, logprob, row) in enumerate(
                zip(completion.token_ids, completion.logprobs, rows, strict=True), len(tokens)
            ):
                expected = distribution(row, params, forbidden={END, 50, 60} if place < 7 else set())
                assert logprob == pytest.approx(expected[token], abs=TOLERANCE)

    def test_a_stop_string_may_begin_in_the_tokens_of_an_earlier_call(
        self, sampler: Sampler, tiny_folder: Path
    ) -> None:
        tokenizer, free = load_tokenizer(tiny_folder), SamplingParams(temperature=0, max_new_tokens=1, top_k=1)
        (letter,) = tokenizer.encode("q")
        (drawn,) = sampler.sample([[40]], [0], free.model_copy(update={"max_new_tokens": 2}), sampled=[[letter]])
        first = tokenizer.token_bytes[drawn.token_ids[0]]
        assert len(first) == 1
        text = f"q{first.decode('ascii')}"
        stopping = SamplingParams(temperature=0, max_new_tokens=8, stop=(text,))
        (stopped,) = sampler.sample([[40]], [0], stopping, sampled=[[letter]])
        assert (stopped.token_ids, stopped.stop_reason) == (drawn.token_ids, "stop")

    def test_a_completion_that_has_ended_is_not_continued(self, sampler: Sampler) -> None:
        for tokens, params in (
            ([END], SamplingParams()), ([5, 6], SamplingParams(max_new_tokens=2)),
            ([5, 9], SamplingParams(stop_token_ids=(9,))),
        ):  # fmt: skip
            with pytest.raises(BadSpec, match="ended at token"):
                sampler.sample([[40]], [0], params, sampled=[tokens])
        with pytest.raises(BadSpec, match="sampled token ids outside"):
            sampler.sample([[40]], [0], SamplingParams(), sampled=[[10_000]])

    def test_an_interrupted_call_returns_the_tokens_so_far(self, sampler: Sampler, model: Any) -> None:
        params = SamplingParams(max_new_tokens=400, ignore_eos=True)
        heard: list[int] = []
        drawn = sampler.sample(
            PROMPTS, [1] * 6, params, lambda index, token, logprob: heard.append(token),
            interrupted=lambda: len(heard) >= 30,
        )  # fmt: skip
        assert {completion.stop_reason for completion in drawn} == {"interrupted"}
        assert 30 <= sum(len(completion.token_ids) for completion in drawn) < 6 * 400
        for prompt, completion in zip(PROMPTS, drawn, strict=True):
            if completion.token_ids:
                assert_drawn_from(model, prompt, completion, params)

    # -- JSON ---------------------------------------------------------------------------------------------------

    def test_a_constrained_completion_fits_its_schema(self, sampler: Sampler, tiny_folder: Path) -> None:
        tokenizer, params = load_tokenizer(tiny_folder), SamplingParams(max_new_tokens=256)
        free = sampler.sample([[40]] * 4, [1, 2, 3, 4], params)
        constrained = params.model_copy(update={"json_schema": json.dumps(Verdict.model_json_schema())})
        for completion in sampler.sample([[40], [5, 6]] * 8, list(range(16)), constrained):
            assert completion.stop_reason == "eos"
            Verdict.model_validate_json(tokenizer.decode(completion.token_ids))
        again = sampler.sample([[40]] * 4, [1, 2, 3, 4], params)
        assert [completion.token_ids for completion in again] == [completion.token_ids for completion in free]

    @pytest.mark.parametrize(
        "params",
        [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1, "temperature": 2.0}],
        ids=str,
    )
    def test_its_logprobs_are_those_of_the_masked_distribution(
        self, sampler: Sampler, model: Any, params: dict[str, Any], tiny_folder: Path
    ) -> None:
        """Only two texts fit the schema. Each token is one byte, so the allowed ones are known."""
        tokenizer = load_tokenizer(tiny_folder)
        texts = [[*tokenizer.encode(json.dumps({"result": word})), END] for word in ("PASS", "FAIL")]
        word = {"type": "object", "properties": {"result": {"enum": ["PASS", "FAIL"]}}, "required": ["result"]}
        schema = json.dumps({**word, "additionalProperties": False})
        constrained = SamplingParams(max_new_tokens=64, json_schema=schema, **params)
        drawn = sampler.sample([[40]] * 16, list(range(16)), constrained)
        assert {tuple(completion.token_ids) for completion in drawn} <= {tuple(text) for text in texts}
        for completion in drawn:
            rows = next_logits(model, [40], completion.token_ids)
            for place, logits_V in enumerate(rows):
                prefix = completion.token_ids[:place]
                allowed = {text[place] for text in texts if text[:place] == prefix}
                expected = distribution(logits_V, constrained, forbidden=set(range(len(logits_V))) - allowed)
                logprob = completion.logprobs[place]
                assert logprob == pytest.approx(expected[completion.token_ids[place]], abs=TOLERANCE)

    def test_a_schema_without_a_grammar_is_refused(self, sampler: Sampler) -> None:
        unsupported = SamplingParams(json_schema='{"type": "object", "not": {"type": "string"}}')
        with pytest.raises(UnsupportedSchema, match="simplify it"):
            sampler.sample([[40]], [1], unsupported)
        assert len(sampler.sample([[40]], [1], SamplingParams(max_new_tokens=2))) == 1

    # -- refusals ---------------------------------------------------------------------------------------------

    def test_stop_strings_and_schemas_without_a_tokenizer_are_refused(
        self, backend: SamplerBackend, trainer: Any
    ) -> None:
        sampler = backend.new_sampler(trainer)
        sync(sampler, trainer, "state-0")
        with pytest.raises(UnsupportedSchema, match="no tokenizer"):
            sampler.sample([[40]], [1], SamplingParams(json_schema='{"type": "object"}'))
        with pytest.raises(BadSpec, match="make it with a tokenizer"):
            sampler.sample([[40]], [1], SamplingParams(stop=("a",)))
        sampler.close()

    def test_prompts_that_cannot_be_continued_are_refused(self, sampler: Sampler) -> None:
        params = SamplingParams(max_new_tokens=2)
        with pytest.raises(BadSpec, match="1 prompts were given with 2 seeds"):
            sampler.sample([[40]], [1, 2], params)
        with pytest.raises(BadSpec, match="prompt 1 has no tokens"):
            sampler.sample([[40], []], [1, 2], params)
        with pytest.raises(BadSpec, match="prompt 0 has token ids outside 0..258"):
            sampler.sample([[259]], [1], params)
        with pytest.raises(BadSpec, match="outside"):
            sampler.sample([[-1]], [1], params)
        with pytest.raises(SampleTooLong, match="truncate the prompt"):
            sampler.sample([[40] * 4090], [1], SamplingParams(max_new_tokens=7))
        assert len(sampler.sample([[40]], [1], params)) == 1

    # -- tokens as they come ----------------------------------------------------------------------------------

    def test_on_token_hears_of_every_token_in_order(self, sampler: Sampler) -> None:
        heard: dict[int, list[tuple[int, float]]] = {n: [] for n in range(len(PROMPTS))}
        drawn = sampler.sample(
            PROMPTS,
            list(range(len(PROMPTS))),
            SamplingParams(max_new_tokens=6),
            lambda place, token, logprob: heard[place].append((token, logprob)),
        )
        for place, completion in enumerate(drawn):
            assert [token for token, _ in heard[place]] == completion.token_ids
            assert [logprob for _, logprob in heard[place]] == completion.logprobs

    def test_what_on_token_raises_ends_the_call_and_the_next_one_is_as_ever(self, sampler: Sampler) -> None:
        params = SamplingParams(max_new_tokens=16, min_new_tokens=16)
        expected = sampler.sample([[40], [50]], [3, 4], params)
        heard = []

        def refuse(place: int, token: int, logprob: float) -> None:
            heard.append(token)
            if len(heard) == 5:
                raise ConnectionResetError("the reader left")

        with pytest.raises(ConnectionResetError, match="the reader left"):
            sampler.sample(PROMPTS, list(range(len(PROMPTS))), params, refuse)
        assert len(heard) == 5
        again = sampler.sample([[40], [50]], [3, 4], params)
        assert [c.token_ids for c in again] == [c.token_ids for c in expected]
        for one, other in zip(again, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)

    # -- weights ----------------------------------------------------------------------------------------------

    def test_after_every_sync_it_samples_from_the_trainers_weights(
        self, backend: SamplerBackend, trainer: Any, tmp_path: Path
    ) -> None:
        sampler = backend.new_sampler(trainer)
        assert sampler.loaded_state is None
        params = SamplingParams(max_new_tokens=5, min_new_tokens=5)
        seen = []
        for number in range(5):
            sync(sampler, trainer, f"state-{number}")
            assert sampler.loaded_state == f"state-{number}"
            model = reference(trainer, tmp_path / str(number))
            drawn = sampler.sample(PROMPTS, list(range(len(PROMPTS))), params)
            for prompt, completion in zip(PROMPTS, drawn, strict=True):
                assert_drawn_from(model, prompt, completion, params)
            seen.append([c.logprobs for c in drawn])
            moved(trainer, number)
        assert len({str(one) for one in seen}) == 5  # so a sync that did nothing would have failed above
        sampler.close()

    def test_what_was_computed_with_older_weights_is_not_used(
        self, sampler: Sampler, trainer: Any, tmp_path: Path
    ) -> None:
        """A prompt of several cache blocks, seen before the sync."""
        prompt, params = [3 + n % 250 for n in range(400)], SamplingParams(max_new_tokens=4, min_new_tokens=4)
        sampler.sample([prompt], [1], params)
        moved(trainer, 11)
        sync(sampler, trainer, "state-1")
        assert_drawn_from(reference(trainer, tmp_path / "m"), prompt, sampler.sample([prompt], [1], params)[0], params)

    def test_policies_of_one_model_do_not_mix(
        self, backend: SamplerBackend, trainers: TorchBackend, tiny_folder: Path, tmp_path: Path
    ) -> None:
        params, models, pairs = SamplingParams(max_new_tokens=4, min_new_tokens=4), [], []
        for number in range(2):
            trainer = trainers.load(tiny_folder)
            moved(trainer, number)
            pairs.append((trainer, backend.new_sampler(trainer)))
            models.append(reference(trainer, tmp_path / str(number)))
        for number in (0, 1, 0, 1, 1):
            trainer, sampler = pairs[number]
            if sampler.loaded_state != f"policy-{number}":
                sync(sampler, trainer, f"policy-{number}")
            drawn = sampler.sample([[40]], [9], params)[0]
            assert_drawn_from(models[number], [40], drawn, params)
        for _, sampler in pairs:
            sampler.close()

    def test_bytes_are_whole_numbers_and_closing_twice_is_no_error(self, backend: SamplerBackend, trainer: Any) -> None:
        assert backend.added_bytes(trainer) >= 0
        sampler = backend.new_sampler(trainer)
        sync(sampler, trainer, "state-0")
        assert sampler.nbytes() >= 0
        backend.offload_for_training()
        sampler.close()
        sampler.close()

    # -- other models -----------------------------------------------------------------------------------------

    def test_adapters_on_one_base(
        self, backend: SamplerBackend, trainers: TorchBackend, tiny_folder: Path, tmp_path: Path
    ) -> None:
        if torch.cuda.is_available():
            pytest.skip("vLLM's LoRA kernels of a GPU take bfloat16 only")
        base = trainers.load_base(tiny_folder, key="base")
        params = SamplingParams(max_new_tokens=5, min_new_tokens=5)
        off = trainers.adapter_off(base)
        policies = [off] + [trainers.adapter(base, LoraSpec(rank=r, alpha=6.0), init_seed=r) for r in (2, 4)]
        for number, trainer in enumerate(policies[1:]):
            moved(trainer, number)
        samplers = [backend.new_sampler(trainer) for trainer in policies]
        for turn in range(2):
            for number, (trainer, sampler) in enumerate(zip(policies, samplers, strict=True)):
                sync(sampler, trainer, f"adapter-{number}-{turn}")
                model = reference(trainer, tmp_path / f"{number}-{turn}")
                for prompt, completion in zip(PROMPTS, sampler.sample(PROMPTS, [1] * 6, params), strict=True):
                    assert_drawn_from(model, prompt, completion, params)
            moved(policies[1], 40)
        for sampler in samplers:
            sampler.close()

    def test_a_model_whose_head_is_its_own(
        self, backend: SamplerBackend, trainers: TorchBackend, tiny_folder: Path, tmp_path: Path
    ) -> None:
        self.check_follows(backend, trainers.load(untied_folder(tmp_path / "untied", tiny_folder)), tmp_path)

    def test_an_adapter_with_dora(
        self, backend: SamplerBackend, trainers: TorchBackend, tiny_folder: Path, tmp_path: Path
    ) -> None:
        base = trainers.load_base(tiny_folder, key="base")
        self.check_follows(backend, trainers.adapter(base, LoraSpec(rank=2, use_dora=True), init_seed=1), tmp_path)

    @staticmethod
    def check_follows(backend: SamplerBackend, trainer: Any, tmp_path: Path) -> None:
        """A sampler of the trainer draws from its weights, before and after a step."""
        sampler = backend.new_sampler(trainer)
        params = SamplingParams(max_new_tokens=5, min_new_tokens=5)
        for number in range(2):
            sync(sampler, trainer, f"{tmp_path.name}-{number}")
            model = reference(trainer, tmp_path / str(number))
            for prompt, completion in zip(PROMPTS, sampler.sample(PROMPTS, [1] * 6, params), strict=True):
                assert_drawn_from(model, prompt, completion, params)
            moved(trainer, number)
        sampler.close()


class TestTorchSampler(SamplerContract):
    @pytest.fixture(scope="class")
    def backend(self) -> SamplerBackend:
        return TorchSamplerBackend(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"))

    def test_a_json_is_continued_by_its_schema(self, sampler: Sampler, tiny_folder: Path) -> None:
        tokenizer = load_tokenizer(tiny_folder)
        params = SamplingParams(max_new_tokens=256, json_schema=json.dumps(Verdict.model_json_schema()))
        begun = tokenizer.encode('{"why": "')
        for completion in sampler.sample([[40]] * 4, [1, 2, 3, 4], params, sampled=[begun] * 4):
            assert completion.stop_reason == "eos"
            Verdict.model_validate_json(tokenizer.decode([*begun, *completion.token_ids]))


@pytest.mark.slow
class TestTorchSamplerWithItsOwnLane(SamplerContract):
    @pytest.fixture(scope="class")
    def backend(self) -> SamplerBackend:
        spec = SPEC.model_copy(update={"sampler": TorchSamplerSpec(own_lane=True)})
        return TorchSamplerBackend(spec, compute_dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.vllm
class TestVllmSampler(SamplerContract):
    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[SamplerBackend]:
        pytest.importorskip("vllm")
        from engine.backends.vllm.backend import VllmSamplers

        backend = VllmSamplers(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"))
        yield backend
        backend.close()

    def test_a_json_is_not_continued(self, sampler: Sampler) -> None:
        params = SamplingParams(max_new_tokens=256, json_schema=json.dumps(Verdict.model_json_schema()))
        with pytest.raises(UnsupportedSchema, match="torch sampler"):
            sampler.sample([[40]], [1], params, sampled=[[5]])
