"""Tests of the sampler's callback for each sampled token."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.sampler import TorchSampler
from engine.protocol import SamplingParams
from tests.fixtures.engines import DETERMINISTIC

PROMPTS = [[10, 11], [20, 21, 22], [10, 11], [30]]
SEEDS = [1, 2, 3, 4]
SIX = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def sampler(tiny_folder: Path) -> TorchSampler:
    backend = TorchBackend(DETERMINISTIC)
    return TorchSampler(backend.load(tiny_folder).model, max_rows=3)  # four prompts: a chunk of three and one of one


def test_each_completion_is_told_token_by_token_under_its_index_in_the_call(sampler: TorchSampler) -> None:
    heard: dict[int, list[tuple[int, float]]] = {}
    done = sampler.sample(
        PROMPTS, SEEDS, SIX, on_token=lambda at, token, logprob: heard.setdefault(at, []).append((token, logprob))
    )
    assert heard == {
        at: list(zip(completion.token_ids, completion.logprobs, strict=True)) for at, completion in enumerate(done)
    }


def test_hearing_changes_nothing(sampler: TorchSampler) -> None:
    assert sampler.sample(PROMPTS, SEEDS, SIX, on_token=lambda *_: None) == sampler.sample(PROMPTS, SEEDS, SIX)


def test_what_the_listener_raises_ends_the_call_at_that_token(sampler: TorchSampler) -> None:
    heard = []

    def until_five(at: int, token: int, logprob: float) -> None:
        heard.append((at, token))
        if len(heard) == 5:
            raise InterruptedError("the client went away")

    with pytest.raises(InterruptedError, match="went away"):
        sampler.sample(PROMPTS, SEEDS, SamplingParams(max_new_tokens=400), on_token=until_five)
    assert len(heard) == 5
