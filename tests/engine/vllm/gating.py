"""Helpers of the gate's tests: they change a trainer, plant a fault, and check the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import sync
from engine.backends.vllm.extension import Extension
from engine.errors import SamplerOutOfSync
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec, VllmSpec

PROMPT = [3 + n % 250 for n in range(300)]
"""Several blocks of the prefix cache."""
PARAMS = SamplingParams(max_new_tokens=4, min_new_tokens=4)
LAYER = "model.layers.1."

Tensors = Iterator[tuple[str, Tensor]]


def spec_of(**changes: Any) -> LocalEngineSpec:
    sampler = VllmSpec.model_validate({"max_context": 512, "kv_cache_gib": 0.25, "max_lora_rank": 8} | changes)
    return LocalEngineSpec(device="cpu", compute_dtype="float32", threads=1, sampler=sampler)


def move(trainer: Any, *, seed: int = 0, by: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainer.trained_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)


def draw(sampler: Any) -> Any:
    return sampler.sample([PROMPT], [1], PARAMS)[0]


def assert_drawn_from(trainer: Any, drawn: Any) -> None:
    """Up to rounding, at temperature 1 and without the ids that may not end a completion yet."""
    ids = PROMPT + drawn.token_ids
    sequence = TokenSequence(ids, [0.0] * len(PROMPT) + [1.0] * len(drawn.token_ids))
    ours = trainer.logprobs([sequence], temperature=1.0, max_tokens=1024)[0]
    assert drawn.logprobs == pytest.approx(ours, abs=0.05)  # the end held back: -ln(1 - p), p about 1/259
    assert drawn.logprobs != pytest.approx(ours, abs=1e-9)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors]) -> None:
    """Changes the tensors on their last step, from the receipt to vLLM's loader."""
    honest = Extension.ostinato_apply
    monkeypatch.setattr(Extension, "ostinato_apply", lambda self, tensors: honest(self, change(tensors)))


def assert_refused(sampler: Any, trainer: Any, match: str) -> None:
    with pytest.raises(SamplerOutOfSync, match=match):
        sync(sampler, trainer, "state-1")
    assert sampler.loaded_state is None
    with pytest.raises(SamplerOutOfSync, match="sync it with the trainer first"):
        draw(sampler)


def assert_recovers(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sync(sampler, trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))
