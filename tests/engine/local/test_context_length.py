"""Sequences beyond the model's context are refused by the trainer, as the sampler refuses prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.tiny import CONTEXT_TOKENS
from engine.errors import SampleTooLong
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec


def test_a_sequence_beyond_the_context_is_neither_scored_nor_trained(tiny_folder: Path) -> None:
    trainer = TorchBackend(LocalEngineSpec(threads=1)).load(tiny_folder)
    before = trainer.weights_digest()
    tokens, weights = [10] * (CONTEXT_TOKENS + 1), [0.0] * CONTEXT_TOKENS + [1.0]
    with pytest.raises(SampleTooLong, match=f"{CONTEXT_TOKENS + 1} tokens .*context of {CONTEXT_TOKENS}"):
        trainer.logprobs([TokenSequence(tokens, weights)], temperature=1.0, max_tokens=8192)
    with pytest.raises(SampleTooLong, match="'row'"):
        trainer.update(
            [Sample(tokens, weights, "row")], Objective(CrossEntropySpec()), OptimizerSpec(lr=1.0), max_tokens=8192
        )
    assert trainer.weights_digest() == before
