"""Tests of the pool of keys and values, and of continuous batching over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.decoding.kv_cache import DecodeLayout, PromptKeys, split_by_length
from engine.backends.torch.loading import load_model
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.trainer_samplers import WholeModelSampler
from engine.protocol import SamplingParams, TokenSequence
from tests.fixtures.adapters import backend

CPU = torch.device("cpu")
KEY_HEADS, QUERY_HEADS, SIZE = 2, 6, 16
SCALE = 0.3


class Rows:
    """Random keys and values per row, in the layout and as plain lists, so that both can be compared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.layout = DecodeLayout(rows=12, capacity=400, device=CPU)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def enter(self, length: int, *, shared_by: int = 0) -> None:
        """One row with a prompt of its own, or some rows with a shared prompt."""
        keys, values = self.random(KEY_HEADS, length, SIZE), self.random(KEY_HEADS, length, SIZE)
        prompt = PromptKeys(length, {0: (keys, values)})
        for _ in range(shared_by or 1):
            self.layout.enter(prompt, shared=shared_by > 0)
            self.keys.append(keys)
            self.values.append(values)

    def leave(self, row: int) -> None:
        self.layout.leave(row)
        for tensors in (self.keys, self.values):
            tensors[row] = tensors[-1]
            tensors.pop()

    def check_step(self, tolerance: float) -> None:
        """One more token for each row. The expected output is a softmax over all of the row's keys, in float64."""
        count = len(self.keys)
        assert self.layout.advance().tolist() == [keys.shape[1] for keys in self.keys]
        query = self.random(count, QUERY_HEADS, 1, SIZE)
        key, value = self.random(count, KEY_HEADS, 1, SIZE), self.random(count, KEY_HEADS, 1, SIZE)
        output = self.layout.attend(0, query, key, value, SCALE)
        assert output.shape == (count, 1, QUERY_HEADS, SIZE)
        for row in range(count):
            self.keys[row] = torch.cat([self.keys[row], key[row]], dim=1)
            self.values[row] = torch.cat([self.values[row], value[row]], dim=1)
            for head in range(QUERY_HEADS):
                key_head = head // (QUERY_HEADS // KEY_HEADS)
                scores_S = self.keys[row][key_head].double() @ query[row, head, 0].double() * SCALE
                expected_D = scores_S.softmax(0) @ self.values[row][key_head].double()
                assert torch.allclose(output[row, 0, head].double(), expected_D, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_rows_attend_to_their_own_tokens_while_others_enter_and_leave(dtype: torch.dtype, tolerance: float) -> None:
    rows = Rows(dtype)
    rows.enter(5)
    rows.check_step(tolerance)
    rows.enter(5, shared_by=3)
    rows.enter(200)
    rows.enter(70, shared_by=2)
    rows.enter(6)
    for _ in range(3):
        rows.check_step(tolerance)
    rows.leave(0)  # the row of the 6 tokens takes the first place
    rows.leave(2)  # a row of the second group comes between those of the first
    rows.check_step(tolerance)
    rows.enter(11, shared_by=4)
    rows.check_step(tolerance)
    while len(rows.layout) > 1:
        rows.leave(len(rows.layout) // 2)
        rows.check_step(tolerance)


def test_all_rows_of_one_shared_prompt() -> None:
    rows = Rows(torch.float32)
    rows.enter(40, shared_by=5)
    for _ in range(3):
        rows.check_step(1e-5)
    rows.leave(1)
    rows.check_step(1e-5)


def test_rows_of_similar_length_attend_in_one_call() -> None:
    assert split_by_length([7]) == [(0, 1)]
    assert split_by_length([7, 9, 8]) == [(0, 3)]
    assert split_by_length([10, 10, 500, 510]) == [(0, 2), (2, 4)]
    assert split_by_length([500, 10, 10]) == [(0, 1), (1, 3)]
    # three rows would each compute 30 positions more than they have
    assert split_by_length([10, 10, 10, 40]) == [(0, 3), (3, 4)]


# -- continuous batching ---------------------------------------------------------------------------------------


PROMPTS = [[10, 11, 12]] * 5 + [list(range(3, 150)), [40, 41]] + [list(range(5, 80))] * 6 + [[7, 6], [7, 6], [8, 9]]
SEEDS = list(range(len(PROMPTS)))
ENDINGS = SamplingParams(max_new_tokens=24, temperature=2.0, stop_token_ids=tuple(range(100, 130)))
"""Many rows end early, each at its own token."""


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> CausalLM:
    return load_model(tiny_folder, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("min_new_tokens", [0, 10])
def test_completions_are_those_of_each_prompt_alone(model: CausalLM, min_new_tokens: int) -> None:
    params = ENDINGS.model_copy(update={"min_new_tokens": min_new_tokens})
    alone = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        alone += TorchSampler(model).sample([prompt], [seed], params)
    assert len({len(completion.token_ids) for completion in alone}) > 3
    for max_rows in (1, 4, 9, 64):
        together = TorchSampler(model, max_rows=max_rows, max_prefill_tokens=100).sample(PROMPTS, SEEDS, params)
        for completion, expected in zip(together, alone, strict=True):
            assert (completion.token_ids, completion.stop_reason) == (expected.token_ids, expected.stop_reason)
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_waiting_rows_enter_where_others_have_finished(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(completion.token_ids) for completion in TorchSampler(model).sample(PROMPTS, SEEDS, ENDINGS)]
    rows_of_passes: list[int] = []
    original = model.hidden

    def count(ids_BT: torch.Tensor, *rest: object) -> torch.Tensor:
        if ids_BT.shape[1] == 1:  # not a prefill
            rows_of_passes.append(ids_BT.shape[0])
        return original(ids_BT, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "hidden", count)
    TorchSampler(model, max_rows=4).sample(PROMPTS, SEEDS, ENDINGS)
    assert max(rows_of_passes) == 4
    assert sum(rows_of_passes) == sum(lengths) - len(lengths)  # the first tokens come from the prefill
    # chunks of four rows that wait for their slowest row need more passes
    chunks = [lengths[start : start + 4] for start in range(0, len(lengths), 4)]
    assert len(rows_of_passes) < sum(max(chunk) - 1 for chunk in chunks)


def test_a_prompt_is_computed_once_also_where_its_rows_enter_later(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(5, 80))
    tokens = 0
    original = model.hidden

    def count(ids_BT: torch.Tensor, *rest: object) -> torch.Tensor:
        nonlocal tokens
        if ids_BT.shape[1] > 1:  # a prefill
            tokens += ids_BT.shape[1]
        return original(ids_BT, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "hidden", count)
    TorchSampler(model, max_rows=2).sample([prompt] * 7, list(range(7)), ENDINGS)
    assert tokens == len(prompt)


def test_a_sampler_works_after_an_exception_of_on_token(model: CausalLM) -> None:
    sampler = TorchSampler(model, max_rows=3)
    expected = sampler.sample(PROMPTS, SEEDS, ENDINGS)
    heard = 0

    def stop_in_the_middle(*_: object) -> None:
        nonlocal heard
        heard += 1
        if heard == 20:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        sampler.sample(PROMPTS, SEEDS, ENDINGS, on_token=stop_in_the_middle)
    assert sampler.sample(PROMPTS, SEEDS, ENDINGS) == expected


def test_bfloat16_logprobs_are_the_trainers(tiny_folder: Path) -> None:
    trainer = backend("bfloat16").load(tiny_folder)
    sampler = WholeModelSampler(trainer, torch.bfloat16, max_rows=4, max_prefill_tokens=100)
    sync(sampler, trainer, "state")
    drawn = sampler.sample(PROMPTS, SEEDS, ENDINGS)
    sequences = []
    for prompt, completion in zip(PROMPTS, drawn, strict=True):
        loss_mask = [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
        sequences.append(TokenSequence(prompt + completion.token_ids, loss_mask))
    scored = trainer.logprobs(sequences, temperature=2.0, max_tokens=4096)
    for completion, values in zip(drawn, scored, strict=True):
        assert completion.logprobs == pytest.approx(values, abs=0.05)
