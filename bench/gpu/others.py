"""Parts that need a package which may be missing: the DeepSpeed trainer and the vLLM sampler, by the protocols of the
engine's backends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checking import OBJECTIVES
from bench.gpu.rows import Row
from bench.gpu.setting import Setting, grpo_samples, model_of, seconds, wait
from engine.backends.protocol import Trainer
from engine.models.samples import Sample
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec

SAME_TRAINING = 2e-3
"""Largest |difference| of logprobs, nats, after two float32 steps of lr 1e-3 of one trainer and of another."""


def missing(package: str, backend: str) -> str | None:
    """Why a part cannot run here, or None."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    try:
        found = find_spec(backend)
    except ModuleNotFoundError:
        found = None
    return None if found else f"{backend} is not in this checkout"


def deepspeed(setting: Setting) -> Iterator[Row]:
    """ZeRO 1, 2 and 3 on all GPUs: two steps beside the torch trainer's, and the seconds of a larger update."""
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
            found = _after_two_steps(_trainer({"kind": "deepspeed", "zero_stage": stage}, folder, setting), samples)
            gap = max(abs(a - b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True))
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


def _after_two_steps(made: tuple[Any, Trainer], samples: list[Sample]) -> list[list[float]]:
    """Logprobs of the samples; closes the backend."""
    backend, trainer = made
    try:
        for _ in range(2):
            _update(trainer, samples, 4096, lr=1e-3)
        sequences = [TokenSequence(s.token_ids, s.weights, s.group) for s in samples]
        return trainer.logprobs(sequences, temperature=1.0, max_tokens=4096)
    finally:
        backend.close()


def _update(trainer: Trainer, samples: list[Sample], max_tokens: int, *, lr: float = 1e-6) -> None:
    trainer.update(
        samples, OBJECTIVES["grpo"], OptimizerSpec(lr=lr), max_tokens=max_tokens, on_micro_batch=lambda: None
    )


def vllm(setting: Setting) -> Iterator[Row]:
    """vLLM in this process: start, weight sync with its proof, tokens per second."""
    why = missing("vllm", "engine.backends.vllm.backend")
    if why:
        yield Row("vllm", "skipped", why)
        return
    from engine.backends.factory import create_sampler_backend

    prompts, each, prompt_tokens, new_tokens = setting.sampling
    spec = LocalEngineSpec.model_validate({"sampler": {"kind": "vllm"}, "device": setting.device.type})
    with tempfile.TemporaryDirectory() as parent:
        trainers = _backend({"sampler": {"kind": "vllm"}, "device": setting.device.type})
        trainer = trainers.load(write_model(setting.small, setting, Path(parent) / "model"))
        samplers = create_sampler_backend(spec, trainers)
        try:
            start = time.perf_counter()
            sampler = samplers.sampler(trainer)
            sampler.sync(trainer, "bench-0")
            yield Row("vllm", f"{setting.small} start and first sync", time.perf_counter() - start, "s")
            start = time.perf_counter()
            sampler.sync(trainer, "bench-1")
            wait(setting.device)
            yield Row("vllm", f"{setting.small} weight sync, proved", time.perf_counter() - start, "s")
            asked = [s.token_ids[:-1] for s in grpo_samples(setting.small, (prompts, each, prompt_tokens, 1, 1))]
            params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
            start = time.perf_counter()
            sampler.sample(asked, list(range(len(asked))), params)
            took = time.perf_counter() - start
            rate = len(asked) * new_tokens / took
            yield Row("vllm", f"{setting.small}, {len(asked)} rows, {new_tokens} tokens", rate, "tokens/s")
        finally:
            samplers.close()
            trainers.close()


def write_model(name: str, setting: Setting, folder: Path) -> Path:
    """A plain Hugging Face folder of random weights, without a tokenizer."""
    model = model_of(name, setting, compute_dtype=torch.float32)
    module: Any = model.module
    module.save_pretrained(folder)
    return folder
