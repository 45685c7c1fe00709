"""Creates the trainer backend and the sampler backend that an engine's spec asks for.

Every trainer works with every sampler. How a sampler gets the weights depends on the pair: it shares tensors with a
trainer of the same process, and otherwise reads staged files or receives a broadcast.
"""

from __future__ import annotations

from engine.backends.protocol import SamplerBackend, TrainerBackend
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.trainer_samplers import TorchSamplerBackend
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec


def create_trainer_backend(spec: LocalEngineSpec) -> TrainerBackend:
    if isinstance(spec.trainer, DeepSpeedSpec):
        from engine.backends.deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(spec)
    return TorchBackend(spec)


def create_sampler_backend(spec: LocalEngineSpec, trainers: TrainerBackend) -> SamplerBackend:
    dtype, device = trainers.compute_dtype, trainers.device
    if not isinstance(spec.sampler, VllmSpec):
        return TorchSamplerBackend(spec, compute_dtype=dtype, device=device)
    from engine.backends.vllm.backend import VllmSamplers

    # Replicas can share the GPUs of DeepSpeed's ranks, which the trainer backend reserves for both.
    reserve = None
    if isinstance(spec.trainer, DeepSpeedSpec):
        from engine.backends.deepspeed.backend import DeepSpeedBackend

        if isinstance(trainers, DeepSpeedBackend):
            reserve = trainers.reserve
    return VllmSamplers(spec, compute_dtype=dtype, device=device, reserve_trainer_placement=reserve)
