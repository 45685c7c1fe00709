"""The two backends that a spec names. Every pair works together: what crosses is staged weights and token ids."""

from __future__ import annotations

from engine.backends.protocol import SamplerBackend, TrainerBackend
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.weight_following import TorchSamplers
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import DeepSpeedSpec


def create_trainer_backend(spec: LocalEngineSpec) -> TrainerBackend:
    if isinstance(spec.trainer, DeepSpeedSpec):
        from engine.backends.deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(spec)
    return TorchBackend(spec)


def create_sampler_backend(spec: LocalEngineSpec, trainers: TrainerBackend) -> SamplerBackend:
    if isinstance(spec.sampler, VllmSpec):
        from engine.backends.vllm.backend import VllmSamplers

        reserve = None
        if isinstance(spec.trainer, DeepSpeedSpec):
            from engine.backends.deepspeed.backend import DeepSpeedBackend

            reserve = trainers.reserve if isinstance(trainers, DeepSpeedBackend) else None
        return VllmSamplers(spec, compute_dtype=trainers.compute_dtype, device=trainers.device, beside=reserve)
    return TorchSamplers(spec, compute_dtype=trainers.compute_dtype, device=trainers.device)
