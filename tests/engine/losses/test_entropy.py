"""Logprobs and entropies of packed rows are those of the plain softmax; in chunks too, with the same gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.torch import causal_lm
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import pack
from engine.models.samples import Sample
from tests.engine.losses.cases import SHAPES, sample
from tests.engine.losses.plain import Plain

CPU = torch.device("cpu")
SAMPLES = sorted((sample(*shape) for shape in SHAPES), key=lambda s: s.group)  # neighbours share their prompt


def both(model: CausalLM, temperature: float) -> tuple[Tensor, Tensor]:
    return model.logprobs_and_entropy(pack(SAMPLES, device=CPU), temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_they_are_those_of_the_plain_softmax(exact: CausalLM, small_folder: Path, temperature: float) -> None:
    plain = Plain(small_folder, torch.float64)
    outs = [plain.out(s, temperature) for s in SAMPLES]
    logprobs_N, entropy_N = both(exact, temperature)
    torch.testing.assert_close(logprobs_N, torch.cat([out.logprobs for out in outs]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_N, torch.cat([out.entropies for out in outs]), rtol=1e-12, atol=1e-12)
    assert torch.equal(logprobs_N, exact.logprobs(pack(SAMPLES, device=CPU), temperature=temperature))


def test_chunks_change_neither_them_nor_the_gradient(exact: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(found: tuple[Tensor, Tensor]) -> list[Tensor]:
        weights_N = torch.linspace(-1, 1, len(found[0]), dtype=torch.float64)
        return list(
            torch.autograd.grad(((found[0] - 2 * found[1]) * weights_N).sum(), list(exact.module.parameters()))
        )

    whole = both(exact, 0.7)
    expected = gradient(whole)
    chunks = []
    in_one = causal_lm.token_logprobs_and_entropy
    monkeypatch.setattr(
        causal_lm, "token_logprobs_and_entropy", lambda *args: (chunks.append(len(args[0])), in_one(*args))[1]
    )
    monkeypatch.setattr(causal_lm, "CHUNK_BYTES", 5 * exact.vocab_size * 8)  # five tokens in float64
    parts = both(exact, 0.7)
    assert len(chunks) == -(-sum(s.trained for s in SAMPLES) // 5)
    for actual, expected_N in zip(parts, whole, strict=True):
        torch.testing.assert_close(actual, expected_N, rtol=1e-13, atol=1e-13)
    for actual, expected_grad in zip(gradient(parts), expected, strict=True):
        torch.testing.assert_close(actual, expected_grad, rtol=1e-11, atol=1e-13)


def test_bounds(exact: CausalLM) -> None:
    """As the temperature rises, the entropy rises from 0 (one certain token) to the log of the vocabulary's size."""
    cold, mild, hot = (both(exact, temperature)[1] for temperature in (1e-4, 1.0, 1e6))
    assert (cold >= 0).all() and (cold < mild).all() and (mild < hot).all()
    torch.testing.assert_close(hot, torch.full_like(hot, exact.vocab_size).log(), rtol=1e-9, atol=0)
    assert cold.max() < 1e-6


def test_a_sample_of_its_own(exact: CausalLM) -> None:
    """The entropy of a sample does not depend on the other samples of the packed row."""
    alone = exact.logprobs_and_entropy(pack([Sample([40, 31, 50], [0, 1.0, 1.0])], device=CPU))
    packed = exact.logprobs_and_entropy(
        pack([Sample([9, 9, 9], [0, 0, 1.0]), Sample([40, 31, 50], [0, 1.0, 1.0])], device=CPU)
    )
    for alone_N, packed_N in zip(alone, packed, strict=True):
        torch.testing.assert_close(alone_N, packed_N[1:], rtol=1e-12, atol=1e-12)
