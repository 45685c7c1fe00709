"""The parts of the GPU bench whose package may be missing: the DeepSpeed trainer and the vLLM sampler."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checking import OBJECTIVES, largest_gap
from bench.gpu.rows import Row
from bench.gpu.setting import Setting, grpo_samples, model_of, seconds, wait
from engine.backends.protocol import Trainer, sync
from engine.models.samples import FloatArray, Sample
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec

SAME_TRAINING = 2e-3
"""Allowed difference of logprobs, in nats, between two trainers after two float32 steps with a rate of 1e-3."""


def missing(package: str, backend: str) -> str | None:
    """Returns why a part cannot run here, or None if it can."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    try:
        module = find_spec(backend)
    except ModuleNotFoundError:
        module = None
    return None if module else f"{backend} is not in this checkout"


def deepspeed(setting: Setting) -> Iterator[Row]:
    """Compares two steps of ZeRO 1, 2 and 3 on all GPUs with those of the torch trainer, and times a larger update."""
    why = missing("deepspeed", "engine.backends.deepspeed.backend")
    if why:
        yield Row("deepspeed", "skipped", why)
        return
    model = setting.checked[-1]
    samples = grpo_samples(model, (4, 4, 12, 5, 20))
    with tempfile.TemporaryDirectory() as parent:
        folder = write_model(model, setting, Path(parent) / "model")
        expected = _after_two_steps(_trainer({"kind": "torch"}, folder, setting), samples)
        for stage in (2,) if setting.smoke else (1, 2, 3):
            start = time.perf_counter()
            trainer = _trainer({"kind": "deepspeed", "zero_stage": stage}, folder, setting)
            gap = largest_gap(_after_two_steps(trainer, samples), expected)
            note = f"at most {SAME_TRAINING:g}; {time.perf_counter() - start:.1f} s with the start"
            yield Row("deepspeed", f"{model} float32 ZeRO {stage}, logprobs", gap, "nats", note, gap <= SAME_TRAINING)
        if not setting.smoke:
            yield from _larger(setting, Path(parent) / "larger")


def _larger(setting: Setting, folder: Path) -> Iterator[Row]:
    write_model(setting.small, setting, folder)
    samples = grpo_samples(setting.small, setting.grpo)
    kind = {"kind": "deepspeed", "zero_stage": 2}
    backend = _backend({"trainer": kind, "max_tokens_per_forward": setting.max_tokens})
    try:
        trainer = backend.load(folder)
        took = seconds(lambda: _update(trainer, samples, setting.max_tokens), setting.device, repeats=2)
    finally:
        backend.close()
    tokens = sum(len(s.token_ids) for s in samples)
    yield Row("deepspeed", f"{setting.small} ZeRO 2, grpo update", took, "s", f"{tokens / took:.0f} sample tokens/s")


def _backend(fields: dict[str, Any]) -> Any:
    from engine.backends.factory import create_trainer_backend

    backend = create_trainer_backend(LocalEngineSpec.model_validate(fields))
    backend.prepare_thread()
    return backend


def _trainer(kind: dict[str, Any], folder: Path, setting: Setting) -> tuple[Any, Trainer]:
    backend = _backend({"trainer": kind, "compute_dtype": "float32", "device": setting.device.type})
    return backend, backend.load(folder)


def _after_two_steps(backend_and_trainer: tuple[Any, Trainer], samples: list[Sample]) -> list[FloatArray]:
    """Takes two steps, and returns the logprobs of the samples. Closes the backend."""
    backend, trainer = backend_and_trainer
    try:
        for _ in range(2):
            _update(trainer, samples, 4096, lr=1e-3)
        sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in samples]
        return trainer.logprobs(sequences, temperature=1.0, max_tokens=4096)
    finally:
        backend.close()


def _update(trainer: Trainer, samples: list[Sample], max_tokens: int, *, lr: float = 1e-6) -> None:
    trainer.update(
        samples, OBJECTIVES["grpo"], OptimizerSpec(lr=lr), max_tokens=max_tokens, on_micro_batch=lambda: None
    )


def vllm(setting: Setting) -> Iterator[Row]:
    """Measures vLLM in this process: the start, a weight sync with its proof, and tokens per second."""
    why = missing("vllm", "engine.backends.vllm.backend")
    if why:
        yield Row("vllm", "skipped", why)
        return
    from engine.backends.factory import create_sampler_backend

    # a trainer, and vLLM as its sampler
    prompts, each, prompt_tokens, new_tokens = setting.sampling
    spec = LocalEngineSpec.model_validate({"sampler": {"kind": "vllm"}, "device": setting.device.type})
    with tempfile.TemporaryDirectory() as parent:
        trainers = _backend({"sampler": {"kind": "vllm"}, "device": setting.device.type})
        trainer = trainers.load(write_model(setting.small, setting, Path(parent) / "model"))
        samplers = create_sampler_backend(spec, trainers)
        try:
            # the start and the syncs
            start = time.perf_counter()
            sampler = samplers.new_sampler(trainer)
            sync(sampler, trainer, "bench-0")
            yield Row("vllm", f"{setting.small} start and first sync", time.perf_counter() - start, "s")
            start = time.perf_counter()
            sync(sampler, trainer, "bench-1")
            wait(setting.device)
            yield Row("vllm", f"{setting.small} weight sync, proved", time.perf_counter() - start, "s")
            # sampling, with one row for each completion
            rows = grpo_samples(setting.small, (prompts, each, prompt_tokens, 1, 1))
            row_prompts = [row.token_ids[:-1].tolist() for row in rows]
            params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
            start = time.perf_counter()
            sampler.sample(row_prompts, list(range(len(rows))), params)
            took = time.perf_counter() - start
            rate = len(rows) * new_tokens / took
            yield Row("vllm", f"{setting.small}, {len(rows)} rows, {new_tokens} tokens", rate, "tokens/s")
        finally:
            samplers.close()
            trainers.close()


def write_model(name: str, setting: Setting, folder: Path) -> Path:
    """Writes a Hugging Face folder with random weights and without a tokenizer. Returns the folder."""
    model = model_of(name, setting, compute_dtype=torch.float32)
    module: Any = model.module
    module.save_pretrained(folder)
    return folder
