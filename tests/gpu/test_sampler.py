"""The embedded sampler on a GPU: its logprobs are the trainer's, it is repeatable, and it follows its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.checking import LOGPROB_TOLERANCE, OBJECTIVES
from bench.gpu.setting import sft_samples
from engine.backends.protocol import sync
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.trainer_samplers import StagedFilesSampler, WholeModelSampler
from engine.protocol import SamplingParams, TokenSequence
from storage.chain.records import OptimizerSpec

pytestmark = pytest.mark.gpu
PROMPTS = [[10, 11, 12], [10, 11, 12], [40, 41], [7], list(range(20, 90))]
SEEDS = [1, 2, 3, 4, 5]


def trainer_on(cuda: torch.device, folder: Path, dtype: torch.dtype) -> TorchTrainer:
    return TorchTrainer(load_model(folder, dtype=torch.float32, compute_dtype=dtype, device=cuda))


def following(trainer: TorchTrainer, dtype: torch.dtype, rows: int = 64) -> WholeModelSampler:
    sampler = WholeModelSampler(trainer, dtype, max_rows=rows, max_prefill_tokens=4096)
    sync(sampler, trainer, "state")
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sampled_logprobs_are_the_trainers(cuda: torch.device, tiny_folder: Path, dtype: torch.dtype) -> None:
    trainer = trainer_on(cuda, tiny_folder, dtype)
    done = following(trainer, dtype).sample(PROMPTS, SEEDS, SamplingParams(max_new_tokens=40, temperature=0.7))
    assert done[0].token_ids != done[1].token_ids  # equal prompts, different seeds
    sequences = [
        TokenSequence(p + c.token_ids, [0.0] * len(p) + [1.0] * len(c.token_ids))
        for p, c in zip(PROMPTS, done, strict=True)
    ]
    scored = trainer.logprobs(sequences, temperature=0.7, max_tokens=4096)
    for completion, values in zip(done, scored, strict=True):
        # at temperature 0.7 a difference of logits counts 1 / 0.7 times
        assert completion.logprobs == pytest.approx(values, abs=LOGPROB_TOLERANCE[dtype] / 0.7)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_equal_seeds_give_equal_completions(cuda: torch.device, tiny_folder: Path, top_p: float) -> None:
    sampler = following(trainer_on(cuda, tiny_folder, torch.float32), torch.float32)
    params = SamplingParams(max_new_tokens=30, top_p=top_p)
    first, second = (sampler.sample(PROMPTS, SEEDS, params) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]


def test_rows_that_end_leave_the_others_alone(cuda: torch.device, tiny_folder: Path) -> None:
    """Greedy, so that only the cache decides: a row that outlives the others by compactions equals itself alone."""
    sampler = following(trainer_on(cuda, tiny_folder, torch.float32), torch.float32)
    free = SamplingParams(max_new_tokens=24, temperature=0)
    alone = [sampler.sample([prompt], [0], free)[0] for prompt in PROMPTS]
    stop = alone[0].token_ids[3]
    stopping = SamplingParams(max_new_tokens=24, temperature=0, stop_token_ids=(stop,))
    together = sampler.sample(PROMPTS, SEEDS, stopping)
    for mine, whole in zip(together, alone, strict=True):
        assert whole.token_ids[: len(mine.token_ids)] == mine.token_ids
    assert together[0].stop_reason == "stop"


def test_a_sync_brings_the_trainers_weights(cuda: torch.device, tiny_folder: Path) -> None:
    trainer = trainer_on(cuda, tiny_folder, torch.bfloat16)
    sampler = following(trainer, torch.bfloat16)
    mirror = StagedFilesSampler(trainer, torch.bfloat16, cuda, max_rows=64, max_prefill_tokens=4096)
    trainer.update(sft_samples("1M", (4, 20, 60)), OBJECTIVES["sft"], OptimizerSpec(lr=1e-2), max_tokens=4096)
    for follower in (sampler, mirror):
        sync(follower, trainer, "next")
        assert follower.loaded_state == "next"
        mine = dict(follower.model.module.named_parameters())
        for name, weight in trainer.model.module.named_parameters():
            assert mine[name].device == cuda
            assert torch.equal(mine[name], weight.to(torch.bfloat16)), name
