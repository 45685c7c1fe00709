"""The parts of the GPU bench that are figures: the device, training steps, sampling, weight syncs, checkpoints."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.gpu.checking import OBJECTIVES
from bench.gpu.flops import Work, hardware_flops, model_flops, nominal_peak, work_of
from bench.gpu.rows import Row
from bench.gpu.setting import (
    Setting,
    grpo_samples,
    kernel_for,
    model_of,
    peak_gib,
    reset_peak,
    seconds,
    sft_samples,
    wait,
)
from engine.backends.protocol import sync
from engine.backends.torch import backend
from engine.backends.torch.causal_lm import CHUNK_BYTES, frozen_copy
from engine.backends.torch.determinism import use_deterministic_kernels
from engine.backends.torch.packing import micro_batches
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.trainer_samplers import StagedFilesSampler, WholeModelSampler
from engine.backends.weight_files.tensor_files import staging_folder
from engine.memory_plan.shape import activations, autocast_weights, head_activations, torch_states
from engine.models.samples import Sample
from engine.protocol import SamplingParams, TokenSequence
from storage.chain.records import OptimizerSpec

PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "pydantic", "deepspeed", "vllm", "flash-attn")


def device(setting: Setting) -> Iterator[Row]:
    """Describes the machine, and measures the peaks to which the other parts are compared."""
    # hardware and driver
    on_gpu = setting.device.type == "cuda"
    yield Row("device", "device", torch.cuda.get_device_name() if on_gpu else platform.machine())
    yield Row("device", "GPUs", torch.cuda.device_count())
    yield Row("device", "CPU cores", len(os.sched_getaffinity(0)))
    if on_gpu:
        yield Row("device", "driver", _driver())
        yield Row("device", "CUDA of torch", str(torch.version.cuda))
        yield Row("device", "capability", ".".join(map(str, torch.cuda.get_device_capability())))
        total = torch.cuda.get_device_properties(setting.device).total_memory
        yield Row("device", "memory", total / 2**30, "GiB")
    # software
    for package in PACKAGES:
        yield Row("device", package, _version(package))
    kernel = kernel_for(setting)
    kernel_name = "none" if kernel is None else getattr(kernel, "__qualname__", "unnamed")
    yield Row("device", "variable-length kernel", kernel_name)
    # peaks
    for dtype in (torch.bfloat16, torch.float32):
        rate = backend.operations_per_second(setting.device, dtype)
        yield Row("device", f"{str(dtype).removeprefix('torch.')} matrix product", rate / 1e12, "TFLOP/s")
    yield Row("device", "copy on the device", _copy_rate(setting) / 1e9, "GB/s", "bytes read and written")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.splitlines()[0] if done.stdout else done.stderr.strip()


def _copy_rate(setting: Setting) -> float:
    source = torch.ones(1 << (20 if setting.smoke else 30), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: target.copy_(source), setting.device, repeats=5)


# -- training --------------------------------------------------------------------------------------------------


def training(setting: Setting, name: str) -> Iterator[Row]:
    """Measures seconds, tokens/s, MFU and peak memory of an SFT update, a GRPO update and the logprobs of a GRPO
    step."""
    trainer = TorchTrainer(model_of(name, setting))
    part, optimizer = f"train {name}", OptimizerSpec(lr=1e-6)
    for loss, samples in (("sft", sft_samples(name, setting.sft)), ("grpo", grpo_samples(name, setting.grpo))):
        work = work_of(samples, max_tokens=setting.max_tokens)

        def update(loss: str = loss, samples: list[Sample] = samples) -> None:
            trainer.update(samples, OBJECTIVES[loss], optimizer, max_tokens=setting.max_tokens)

        # the first update allocates the moments
        update()
        reset_peak(setting.device)
        took = seconds(update, setting.device, repeats=setting.repeats)
        yield from _rates(setting, name, part, f"{loss} update", took, work, samples)
        yield from _memory(setting, name, part, loss, samples)
        if loss == "grpo":
            yield from _scoring(setting, part, trainer, samples, took)


def _scoring(
    setting: Setting, part: str, trainer: TorchTrainer, samples: list[Sample], update_seconds: float
) -> Iterator[Row]:
    """Measures the forward pass that computes the old logprobs of a step."""
    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in samples]
    took = seconds(
        lambda: trainer.logprobs(sequences, temperature=1.0, max_tokens=setting.max_tokens),
        setting.device,
        repeats=setting.repeats,
    )
    tokens = sum(len(s.token_ids) for s in samples)
    yield Row(part, "grpo logprobs", took, "s", f"{tokens / took:.0f} sample tokens/s")
    yield Row(part, "grpo step: logprobs and update", took + update_seconds, "s", "without sampling")


def _rates(
    setting: Setting, name: str, part: str, what: str, took: float, work: Work, samples: list[Sample]
) -> Iterator[Row]:
    """Yields the time of a pass, its tokens per second, and its MFU."""
    # seconds and tokens
    shape, sample_tokens = setting.shape(name), sum(len(s.token_ids) for s in samples)
    note = f"{len(samples)} samples, {sample_tokens} tokens, {work.tokens} packed, {work.trained} trained"
    yield Row(part, what, took, "s", note)
    yield Row(part, f"{what}, packed tokens", work.tokens / took, "tokens/s", f"{sample_tokens / took:.0f} of samples")
    # MFU: of the nominal peak if the device is known, else of the measured one
    measured = backend.operations_per_second(setting.device, setting.compute_dtype)
    nominal = nominal_peak(torch.cuda.get_device_name()) if setting.device.type == "cuda" else None
    rate = model_flops(shape, work) / took
    logit_bytes = setting.compute_dtype.itemsize * shape.vocabulary
    chunked = _most_trained(setting, samples) > CHUNK_BYTES // logit_bytes
    hardware = hardware_flops(shape, work, chunked_head=chunked) / took
    note = f"{rate / 1e12:.3g} TFLOP/s; {rate / measured:.1%} of the measured matrix product; "
    note += f"{hardware / 1e12:.3g} TFLOP/s with what is computed again"
    unit = "% of " + ("nominal" if nominal else "measured")
    yield Row(part, f"{what}, MFU", 100 * rate / (nominal or measured), unit, note)


def _most_trained(setting: Setting, samples: list[Sample]) -> int:
    """Returns the largest number of trained tokens in one micro-batch."""
    counts = []
    for indices in micro_batches(samples, max_tokens=setting.max_tokens):
        counts.append(sum(samples[index].trained for index in indices))
    return max(counts)


def _memory(setting: Setting, name: str, part: str, loss: str, samples: list[Sample]) -> Iterator[Row]:
    planned = planned_gib(setting, name, trained=_most_trained(setting, samples))
    peak = peak_gib(setting.device)
    note = f"the plan's formulas: {planned:.1f} GiB"
    what = f"{loss} update, peak memory"
    if peak is None:
        yield Row(part, what, "not counted on the CPU", note=note)
    else:
        yield Row(part, what, peak, "GiB", f"{note}, {peak / planned:.0%} of it used")


def planned_gib(setting: Setting, name: str, *, trained: int) -> float:
    """Returns the GiB that engine.memory_plan.shape compute for one full micro-batch: states, the copies that
    autocast keeps, activations and logits."""
    shape, compute = setting.shape(name), setting.compute_dtype.itemsize
    on_device, _ = activations(shape, setting.max_tokens, compute=compute, autocast=True, recompute="none")
    states = torch_states(shape.parameters).total + autocast_weights(shape, compute)
    return (states + on_device + head_activations(shape, trained, compute=compute)) / 2**30


# -- sampling and syncs ----------------------------------------------------------------------------------------


def sampling(setting: Setting) -> Iterator[Row]:
    """Measures the embedded sampler. Every completion has its full length."""
    # one row for each completion of each prompt
    trainer = TorchTrainer(model_of(setting.small, setting))
    prompts, each, prompt_tokens, new_tokens = setting.sampling
    rows = grpo_samples(setting.small, (prompts, each, prompt_tokens, 1, 1))
    base_prompts = [row.token_ids[:-1].tolist() for row in rows]
    for copies in (1,) if setting.smoke else (1, 4):
        copied_prompts = base_prompts * copies
        seeds = list(range(len(base_prompts))) * copies
        row_count = len(copied_prompts)
        sampler = WholeModelSampler(
            trainer, setting.compute_dtype, max_rows=row_count, max_prefill_tokens=setting.max_tokens
        )
        sync(sampler, trainer, "bench")
        # the time of one token is mostly that of the prefill
        for what, tokens in (("prefill and 1 token", 1), (f"{new_tokens} tokens", new_tokens)):
            params = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens)
            reset_peak(setting.device)
            took = seconds(
                partial(sampler.sample, copied_prompts, seeds, params), setting.device, repeats=1
            )
            note = f"{took:.3g} s, {1000 * took / tokens:.3g} ms a token"
            peak = peak_gib(setting.device)
            if peak:
                note += f", peak {peak:.1f} GiB"
            rate = row_count * tokens / took
            yield Row("sampler", f"{setting.small}, {row_count} rows, {what}", rate, "tokens/s", note)


def syncing(setting: Setting) -> Iterator[Row]:
    """Measures weight syncs from the trainer to a bfloat16 sampler: in this process, and by files in shared memory."""
    # in this process
    trainer = TorchTrainer(model_of(setting.large, setting))
    size = sum(t.nbytes for _, t in trainer.model.exported_weights()) * setting.compute_dtype.itemsize // 4
    took = _follow(setting, trainer)
    yield Row("sync", f"{setting.large} copy in this process", took, "s", f"{size / took / 1e9:.3g} GB/s of bfloat16")
    # by files: write them; then write and read them
    start = time.perf_counter()
    mirror = StagedFilesSampler(
        trainer, setting.compute_dtype, setting.device, max_rows=1, max_prefill_tokens=setting.max_tokens
    )
    yield Row("sync", f"{setting.large} new sampler of its own", time.perf_counter() - start, "s", "made once")
    with staging_folder(size) as folder:
        where = str(folder.parent)
    took = seconds(
        lambda: _stage(trainer, setting.compute_dtype, size), setting.device, repeats=setting.repeats, warm_up=0
    )
    yield Row("sync", f"{setting.large} staged", took, "s", f"{size / took / 1e9:.3g} GB/s, in {where}")
    took = seconds(lambda: sync(mirror, trainer, "bench"), setting.device, repeats=setting.repeats, warm_up=0)
    yield Row("sync", f"{setting.large} staged and read", took, "s", f"{size / took / 1e9:.3g} GB/s")
    # the sampler must have the trainer's weights
    expected = dict(frozen_copy(trainer.model.module, setting.compute_dtype).named_parameters())
    equal = all(torch.equal(p, expected[name]) for name, p in mirror.model.module.named_parameters())
    yield Row("sync", f"{setting.large} weights that arrived", "equal bytes" if equal else "different", ok=equal)


def _follow(setting: Setting, trainer: TorchTrainer) -> float:
    follower = WholeModelSampler(trainer, setting.compute_dtype, max_rows=1, max_prefill_tokens=setting.max_tokens)
    return seconds(lambda: sync(follower, trainer, "bench"), setting.device, repeats=setting.repeats)


def _stage(trainer: TorchTrainer, dtype: torch.dtype, size: int) -> None:
    with staging_folder(size) as folder:
        trainer.stage_weights(folder, dtype=dtype)


# -- redos -----------------------------------------------------------------------------------------------------


def redos(setting: Setting) -> Iterator[Row]:
    """Measures what makes a redo comparable: deterministic kernels, digests and sketches. Leaves the kernels on."""
    trainer = TorchTrainer(model_of(setting.small, setting))
    samples, optimizer = grpo_samples(setting.small, setting.grpo), OptimizerSpec(lr=1e-6)

    def update() -> None:
        trainer.update(samples, OBJECTIVES["grpo"], optimizer, max_tokens=setting.max_tokens)

    update()  # allocates the moments
    part = f"redo {setting.small}"
    plain = seconds(update, setting.device, repeats=setting.repeats)
    yield Row(part, "update, torch's default kernels", plain, "s")
    if setting.device.type == "cuda":
        use_deterministic_kernels(strict=False)
    took = seconds(update, setting.device, repeats=setting.repeats)
    yield Row(part, "update, deterministic kernels", took, "s", f"{took / plain:.2f} times the default")
    for what, call in (("digest", trainer.weights_digest), ("sketch", trainer.weights_sketch)):
        took = seconds(call, setting.device, repeats=setting.repeats)
        yield Row(part, what, took, "s", f"{trainer.weights_nbytes / took / 1e9:.3g} GB/s")


# -- checkpoints -----------------------------------------------------------------------------------------------


def checkpoints(setting: Setting) -> Iterator[Row]:
    """Writes a checkpoint of weights and moments to a disk and reads it. The weights must be the same after that."""
    trainer = TorchTrainer(model_of(setting.small, setting))
    samples = grpo_samples(setting.small, (1, 2, 8, 4, 8))
    trainer.update(samples, OBJECTIVES["grpo"], OptimizerSpec(lr=1e-3), max_tokens=setting.max_tokens)
    before = trainer.weights_digest()[0]
    folder = Path(tempfile.mkdtemp(prefix="ostinato-bench-"))
    try:
        # write
        wait(setting.device)
        start = time.perf_counter()
        files = trainer.write_checkpoint(folder)
        wrote = time.perf_counter() - start
        size = sum(path.stat().st_size for path in files.values())
        note = f"{size / wrote / 1e9:.3g} GB/s, {size / 1e9:.3g} GB"
        yield Row("checkpoint", f"{setting.small} write", wrote, "s", note)
        # change the weights, so that reading must restore them
        trainer.update(samples, OBJECTIVES["grpo"], OptimizerSpec(lr=1e-3), max_tokens=setting.max_tokens)
        moved = trainer.weights_digest()[0] != before
        wait(setting.device)
        start = time.perf_counter()
        trainer.read_checkpoint(files, optimizer=True)
        wait(setting.device)
        read = time.perf_counter() - start
        equal = moved and trainer.weights_digest()[0] == before
        note = f"{size / read / 1e9:.3g} GB/s, pages cached"
        yield Row("checkpoint", f"{setting.small} read", read, "s", note, equal)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
