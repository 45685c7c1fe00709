"""Sequences beyond the model's context are refused by the trainer, as the sampler refuses prompts. The context of a
model whose rotary factors depend on the longest sequence of a pass ends where they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.tiny import CONTEXT_TOKENS
from engine.backends.vllm.architecture import architecture_of
from engine.errors import SampleTooLong
from engine.losses.likelihood import CrossEntropySpec
from engine.memory_plan.shape import read_shape
from engine.models.folder import context_length_in, read_folder_config
from engine.models.samples import Sample
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tests.fixtures.architectures import SIZES, save_tiny

LONG, SHORT = 64, 12
"""Tokens of the longest sequence whose rotary factors are those of short ones, and of a short one."""
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        SIZES | {"pad_token_id": 0, "initializer_range": 0.3, "original_max_position_embeddings": LONG}
        | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}},
    ),
    "dynamic NTK": (
        "Llama",
        SIZES | {"max_position_embeddings": LONG, "initializer_range": 0.3}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}},
    ),
}  # fmt: skip
"""(prefix of the class, config) of models whose rotary factors are others in a pass of more than LONG tokens."""


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


def ids_of(length: int) -> list[int]:
    return [3 + 7 * position % 250 for position in range(length)]


@pytest.mark.parametrize("kind", ROTARY)
def test_transformers_changes_a_short_sequence_next_to_a_long_one(kind: str, tmp_path: Path) -> None:
    """The reason for the limit: a pass with one more token than LONG changes the logprobs of the short sequence."""
    trainer = TorchBackend(LocalEngineSpec(threads=1, compute_dtype="float32")).load(save_tiny(*ROTARY[kind], tmp_path))
    decoder: Any = trainer.model.decoder
    decoder.set_attn_implementation("eager")
    short = torch.tensor([ids_of(SHORT)])

    def outputs(longest: int) -> torch.Tensor:
        """Of the short sequence, in a batch whose other row ends at position `longest` - 1."""
        positions = torch.stack([torch.arange(SHORT), torch.arange(SHORT) + longest - SHORT])
        return decoder(input_ids=short.expand(2, -1), position_ids=positions, use_cache=False).last_hidden_state[0]

    with torch.no_grad():
        torch.testing.assert_close(outputs(LONG), outputs(SHORT), rtol=0, atol=1e-5)
        assert (outputs(LONG + 1) - outputs(SHORT)).abs().max() > 0.05


@pytest.mark.parametrize("kind", ROTARY)
def test_up_to_the_change_of_its_rotary_factors_a_model_trains_and_samples(kind: str, tmp_path: Path) -> None:
    """Packed with a sequence of LONG tokens, or decoded next to one, a short sequence is what it is alone."""
    trainer = TorchBackend(LocalEngineSpec(threads=1, compute_dtype="float32")).load(save_tiny(*ROTARY[kind], tmp_path))
    short = TokenSequence(ids_of(SHORT), [0.0] + [1.0] * (SHORT - 1))
    long = TokenSequence(ids_of(LONG), [0.0] + [1.0] * (LONG - 1))
    (alone,) = trainer.logprobs([short], temperature=1.0, max_tokens=256)
    packed = trainer.logprobs([long, short], temperature=1.0, max_tokens=256)
    torch.testing.assert_close(torch.tensor(packed[1]), torch.tensor(alone), rtol=0, atol=1e-5)

    sampler = TorchSampler(trainer.model)
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    (by_itself,) = sampler.sample([ids_of(SHORT)], [0], params)
    beside = sampler.sample([ids_of(LONG - 8), ids_of(SHORT)], [0, 0], params)[1]
    assert beside.token_ids == by_itself.token_ids
    assert beside.logprobs == pytest.approx(by_itself.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_sequence_past_the_change_of_the_rotary_factors_is_refused(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(*ROTARY[kind], tmp_path)
    trainer = TorchBackend(LocalEngineSpec(threads=1)).load(folder)
    too_long = TokenSequence(ids_of(LONG + 1), [0.0] * LONG + [1.0])
    with pytest.raises(SampleTooLong, match=rf"context of {LONG} \(.*original_max_position_embeddings with longrope"):
        trainer.logprobs([too_long], temperature=1.0, max_tokens=256)
    with pytest.raises(SampleTooLong, match=rf"context of {LONG} \(.*original_max_position_embeddings with longrope"):
        TorchSampler(trainer.model).sample([ids_of(LONG - 7)], [0], SamplingParams(max_new_tokens=8))
    # What reads config.json has the same limit: the prompts' checks, the samplers of vLLM, the memory plan.
    assert context_length_in(read_folder_config(folder)) == LONG
    assert architecture_of(folder).context_length == LONG
    assert read_shape(folder).context == LONG


def test_the_context_of_a_config() -> None:
    rope = {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}
    given = {"max_position_embeddings": 131072, "rope_scaling": rope, "original_max_position_embeddings": 4096}
    assert context_length_in(given) == 4096
    assert context_length_in({"text_config": given}) == 4096
    assert context_length_in(given | {"rope_scaling": rope | {"type": "yarn"}}) == 131072
    assert context_length_in(given | {"max_position_embeddings": 2048}) == 2048
    layers = {"full_attention": rope | {"original_max_position_embeddings": 1024}, "sliding_attention": None}
    assert context_length_in({"max_position_embeddings": 131072, "rope_parameters": layers}) == 1024
    assert context_length_in({"hidden_size": 64}) is None
    assert context_length_in({"max_position_embeddings": 2048, "rope_scaling": "longrope"}) == 2048  # not a valid one
