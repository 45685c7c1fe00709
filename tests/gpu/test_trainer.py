"""The torch trainer on a GPU computes what it computes on the CPU, in float32 and under bfloat16 autocast."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Literal

import pytest
import torch

from bench.gpu.checking import LOGPROB_TOLERANCE, OBJECTIVES, TOLERANCE, gradient_of_update
from bench.gpu.reference import distance, gradient, trained_logprobs
from bench.gpu.setting import ON_GPU, exact_twin, grpo_samples, model_of, near_policy, sft_samples
from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.digests import digest_tensors
from engine.errors import OutOfMemory
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
LR = OptimizerSpec(lr=1e-3)


def load(folder: Path, device: torch.device, compute_dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, dtype=torch.float32, compute_dtype=compute_dtype, device=device)


def batch(name: str, folder: Path) -> list[Sample]:
    if name == "sft":
        return sft_samples("1M", (4, 20, 60))
    return near_policy(grpo_samples("1M", (2, 3, 12, 5, 20)), exact_twin(load(folder, CPU).module))


@pytest.mark.parametrize("max_tokens", [4096, 60])
@pytest.mark.parametrize("loss", ["sft", "grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_gradient_is_that_of_the_definition(
    cuda: torch.device, tiny_folder: Path, dtype: torch.dtype, loss: str, max_tokens: int
) -> None:
    samples, model = batch(loss, tiny_folder), load(tiny_folder, cuda, dtype)
    expected = gradient(exact_twin(model.module), samples, loss)
    actual = gradient_of_update(TorchTrainer(model), samples, OBJECTIVES[loss], max_tokens=max_tokens)
    assert all(grad.device == cuda and grad.dtype == torch.float32 for grad in actual.values())
    assert distance(actual, expected) <= TOLERANCE[dtype]


def test_two_steps_end_where_the_cpu_ends(cuda: torch.device, tiny_folder: Path) -> None:
    """AdamW divides by the gradient's size: where a gradient is nearly 0 its sign, and so a step of lr, may differ."""
    ends = []
    for device in (CPU, cuda):
        trainer = TorchTrainer(load(tiny_folder, device))
        for _ in range(2):
            trainer.update(batch("sft", tiny_folder), OBJECTIVES["sft"], LR, max_tokens=4096)
        ends.append({name: p.detach().cpu() for name, p in trainer.model.module.named_parameters()})
    moved = load(tiny_folder, CPU).module.state_dict()
    gap = sum((ends[0][n] - ends[1][n]).square().sum().item() for n in ends[0]) ** 0.5
    way = sum((ends[0][n] - moved[n]).square().sum().item() for n in ends[0]) ** 0.5
    assert gap <= 0.01 * way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logprobs_are_those_of_the_definition(cuda: torch.device, tiny_folder: Path, dtype: torch.dtype) -> None:
    samples, model = batch("grpo", tiny_folder), load(tiny_folder, cuda, dtype)
    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in samples]
    actual = TorchTrainer(model).logprobs(sequences, temperature=1.0, max_tokens=4096)
    twin = exact_twin(model.module)
    with torch.no_grad():
        for sample, values in zip(samples, actual, strict=True):
            assert values == pytest.approx(trained_logprobs(twin, sample).tolist(), abs=LOGPROB_TOLERANCE[dtype])


def test_autocast_leaves_weights_and_moments_in_float32(cuda: torch.device, tiny_folder: Path) -> None:
    trainer = TorchTrainer(load(tiny_folder, cuda, torch.bfloat16))
    trainer.update(batch("sft", tiny_folder), OBJECTIVES["sft"], LR, max_tokens=4096)
    assert {p.dtype for p in trainer.model.module.parameters()} == {torch.float32}
    assert {t.dtype for t in trainer._optimizer_tensors().values()} == {torch.float32}
    assert {t.device for t in trainer._optimizer_tensors().values()} == {cuda}


def test_the_deterministic_engine_takes_equal_steps(cuda: torch.device, tiny_folder: Path) -> None:
    backend = TorchBackend(LocalEngineSpec(deterministic=True))
    backend.prepare_thread()
    samples = batch("grpo", tiny_folder)

    def end() -> str:
        trainer = backend.load(tiny_folder)
        for _ in range(3):
            trainer.update(samples, OBJECTIVES["grpo"], LR, max_tokens=4096)
        return digest_tensors(trainer.model.named_weights())[0]

    try:
        assert end() == end()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engines_kernels_repeat_their_sums(cuda: torch.device, dtype: Literal["bfloat16", "float32"]) -> None:
    backend = TorchBackend(LocalEngineSpec(compute_dtype=dtype))
    backend.prepare_thread()
    assert backend.numerics().repeats
    samples = grpo_samples("54M", (8, 8, 512, 100, 400))

    def end() -> str:
        trainer = TorchTrainer(model_of("54M", ON_GPU, compute_dtype=backend.compute_dtype))
        trainer.update(samples, OBJECTIVES["grpo"], LR, max_tokens=16384)
        return digest_tensors(trainer.model.named_weights())[0]

    try:
        assert end() == end()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_checkpoint_of_the_gpu_goes_on_as_if_nothing_was(
    cuda: torch.device, tiny_folder: Path, tmp_path: Path
) -> None:
    samples = batch("sft", tiny_folder)

    def step(trainer: TorchTrainer) -> None:
        trainer.update(samples, OBJECTIVES["sft"], LR, max_tokens=4096)

    first, second = TorchTrainer(load(tiny_folder, cuda)), TorchTrainer(load(tiny_folder, cuda))
    step(first)
    files = first.write_checkpoint(tmp_path)
    second.read_checkpoint(files, optimizer=True)
    assert second.weights_digest() == first.weights_digest()
    step(first)
    step(second)
    for (name, actual), (_, expected) in zip(second.weights(), first.weights(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=name)


# -- memory ----------------------------------------------------------------------------------------------------


def test_the_budget_is_a_share_of_the_device(cuda: torch.device) -> None:
    total = torch.cuda.get_device_properties(cuda).total_memory
    assert TorchBackend(LocalEngineSpec(device="cuda")).memory_bytes() == int(0.7 * total)
    assert TorchBackend(LocalEngineSpec(device="cuda", memory_gib=2)).memory_bytes() == 2 << 30


def test_a_trainer_holds_what_it_says(cuda: torch.device, tiny_folder: Path) -> None:
    gc.collect()  # what earlier tests left would be given back in between
    before = torch.cuda.memory_allocated(cuda)
    trainer = TorchTrainer(load(tiny_folder, cuda))
    trainer.update(batch("sft", tiny_folder), OBJECTIVES["sft"], LR, max_tokens=4096)
    held = torch.cuda.memory_allocated(cuda) - before
    planned = trainer.nbytes(training=False)
    # also in memory: rotary frequencies, 512 bytes of rounding a tensor, what cuBLAS keeps
    assert planned <= held <= 1.1 * planned + (40 << 20)


LONG = [Sample([3 + n % 200 for n in range(1000)], [0.0] + [1.0] * 999, f"s{k}") for k in range(8)]


def limited_to(cuda: torch.device, more: int) -> None:
    """This process gets `more` bytes beyond what it holds now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + more) / total, cuda)


def test_memory_that_does_not_do_halves_the_micro_batches(cuda: torch.device, tiny_folder: Path) -> None:
    trainer, objective = TorchTrainer(load(tiny_folder, cuda)), OBJECTIVES["sft"]

    def peak(max_tokens: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(cuda)
        held = torch.cuda.memory_allocated(cuda)
        trainer.update(LONG, objective, OptimizerSpec(lr=0), max_tokens=max_tokens)
        return torch.cuda.max_memory_allocated(cuda) - held

    peak(8000)  # makes the moments
    whole, half = peak(8000), peak(4000)
    assert half < 0.75 * whole
    try:
        limited_to(cuda, (whole + half) // 2)
        report = trainer.update(LONG, objective, OptimizerSpec(lr=0), max_tokens=8000)
        assert (report.max_tokens, report.micro_batches) == (4000, 2)
        limited_to(cuda, half // 8)
        with pytest.raises(OutOfMemory, match="max_tokens_per_forward"):
            trainer.update(LONG, objective, OptimizerSpec(lr=0), max_tokens=8000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert trainer.update(LONG, objective, OptimizerSpec(lr=0), max_tokens=8000).micro_batches == 1


def test_no_memory_is_kept_from_step_to_step(cuda: torch.device, tiny_folder: Path) -> None:
    trainer, objective = TorchTrainer(load(tiny_folder, cuda, torch.bfloat16)), Objective(OBJECTIVES["sft"].loss)
    trainer.update(LONG, objective, LR, max_tokens=8000)
    after_one = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        trainer.update(LONG, objective, LR, max_tokens=8000)
    assert torch.cuda.memory_allocated(cuda) == after_one
