"""Under autocast, a step casts each weight once, whatever its number of micro-batches, and computes the same."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.protocol import Objective
from engine.backends.torch import causal_lm
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec
from tests.fixtures.adapters import LORA, backend

CPU = torch.device("cpu")
SAMPLES = [Sample([10, 11, 12, 13 + n], [0, 0, 1.0, 1.0]) for n in range(3)]


def ragged_sample(prompt: list[int], trained: int, group: str) -> Sample:
    """A prompt and `trained` tokens after it, with the columns of a policy loss."""
    ids = [(31 * trained + 7 * place) % 250 for place in range(trained)]
    mask = [0.0] * len(prompt) + [1.0] * trained
    return Sample(
        prompt + ids, mask, group, advantages=[0.5 - trained % 2] * trained, sampler_logprobs=[-6.0] * trained
    )


class CastCounter(TorchDispatchMode):
    """Counts the casts of each float32 weight to bfloat16, by its address."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.casts = Counter({parameter.data_ptr(): 0 for parameter in model.module.parameters()})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16
        if is_cast and args[0].data_ptr() in self.casts:
            self.casts[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def trainer(tiny_folder: Path) -> TorchTrainer:
    return TorchTrainer(load_model(tiny_folder, dtype=torch.float32, compute_dtype=torch.bfloat16, device=CPU))


def linear_weights(trainer: TorchTrainer) -> set[int]:
    linears = [module for module in trainer.model.module.modules() if isinstance(module, torch.nn.Linear)]
    return {linear.weight.data_ptr() for linear in linears}


def update(trainer: TorchTrainer) -> int:
    """One update of three micro-batches, one sample each. Returns the number of micro-batches."""
    report = trainer.update(SAMPLES, Objective(CrossEntropySpec()), OptimizerSpec(lr=1e-2), max_tokens=4)
    return report.micro_batches


def test_an_update_casts_each_matrix_once(trainer: TorchTrainer) -> None:
    with CastCounter(trainer.model) as counter:
        assert update(trainer) == len(SAMPLES)
    cast = {address: count for address, count in counter.casts.items() if count}
    assert cast == dict.fromkeys(linear_weights(trainer), 1)


def test_logprobs_cast_each_matrix_once(trainer: TorchTrainer) -> None:
    with CastCounter(trainer.model) as counter:
        trainer.logprobs(SAMPLES, temperature=1.0, max_tokens=4)
    assert max(counter.casts.values()) <= 1


PROMPT = list(range(30, 50))
RAGGED = [
    ragged_sample(PROMPT, 9, "a"),
    ragged_sample(PROMPT, 1, "a"),
    ragged_sample([10, 11], 30, ""),
    ragged_sample(PROMPT, 17, "a"),
    ragged_sample([20, 21, 22], 5, "b"),
    ragged_sample([20, 21, 22], 12, "b"),
]
"""Two groups that share their prompts and one sample alone, of unequal lengths."""
WITH_ENTROPY = Objective(GRPOSpec(kl_beta=0, entropy_coef=0.1, importance_cap=2.0), 0.8, "forward")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "small", seed=3, hidden=64, layers=2)


def new_trainer(folder: Path, kind: str) -> TorchTrainer:
    engine = backend("bfloat16")
    return engine.load(folder) if kind == "whole" else engine.adapter(engine.load_base(folder), LORA, init_seed=3)


@pytest.mark.parametrize("kind", ["whole", "adapter"])
@pytest.mark.parametrize(
    ("max_tokens", "chunk"), [(40, None), (40, 8), (4096, 8)], ids=["split", "split-and-chunked", "chunked"]
)
def test_updates_have_the_bytes_of_updates_that_cast_in_every_forward_pass(
    small_folder: Path, kind: str, max_tokens: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates and the logprobs after them: a cast that outlives its update would be that of the old weights."""
    digests, logprobs, losses = [], [], []
    for cached in (True, False):
        trainer = new_trainer(small_folder, kind)
        if chunk:
            monkeypatch.setattr(causal_lm, "CHUNK_BYTES", chunk * trainer.model.vocab_size * 2)
        if not cached:
            trainer.model.cached_casts = nullcontext  # type: ignore[method-assign, assignment]
        for objective in (Objective(CrossEntropySpec()), WITH_ENTROPY):
            report = trainer.update(RAGGED, objective, OptimizerSpec(lr=1e-2), max_tokens=max_tokens)
            assert (report.micro_batches > 1) == (max_tokens == 40)
            losses.append(report.metrics)
        sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in RAGGED]
        scored = trainer.logprobs(sequences, temperature=0.8, max_tokens=max_tokens)
        logprobs.append([row.tolist() for row in scored])
        digests.append(trainer.weights_digest())
    assert digests[0] == digests[1]
    assert logprobs[0] == logprobs[1]
    assert losses[:2] == losses[2:]
