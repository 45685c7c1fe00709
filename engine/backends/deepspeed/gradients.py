"""Forward, backward and step over all ranks: DeepSpeed's engine for ZeRO 1 to 3, plain data parallelism for stage 0.

Gradients are *summed* over the ranks: the loss of each rank is its part of the whole minibatch's, already normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import isfinite
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from engine.backends.deepspeed.model import Asked, RankModel
from engine.backends.deepspeed.options import ZeroOptions, deepspeed_config
from engine.backends.deepspeed.shards import OneAtATime, Shards, laid_out_once, replicated_shards, zero_shards
from engine.backends.deepspeed.ulysses import SequenceGroup
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packed
from engine.backends.torch.updates import adamw_groups, set_adamw
from storage.chain.records import OptimizerSpec


class Gradients(Protocol):
    """One model on all ranks. Every method is called by every rank."""

    model: RankModel
    shards: Shards
    recovers: bool
    """Whether a pass that failed on one rank leaves the others free: they exchange nothing within a pass."""

    def ask(self, ask: Callable[[RankModel], Tensor]) -> Tensor:
        """What it computes of the model, in one forward."""
        ...

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        """(N,) nats, with gradient where gradients are on."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, a scalar, which counts beside those of the other ranks."""
        ...

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        """(norm of the whole gradient, whether the weights moved); they do not when the norm is not finite. Gradients
        are gone afterwards."""
        ...

    def forget(self) -> None:
        """Drops the gradients of an update that failed."""
        ...


def make_gradients(
    loaded: CausalLM, options: ZeroOptions, device: torch.device, sequence: SequenceGroup | None
) -> Gradients:
    """Takes over a model without weights, in master precision for stage 0 and in that of compute else; its weights
    are to be filled through `shards`. `sequence`: the ranks that compute each row together."""
    return (Replicas if options.trainer.zero_stage == 0 else ZeroGradients)(loaded, options, device, sequence)


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(adamw_groups(parameters), fused=True)


def _set(adamw: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
    set_adamw(adamw.param_groups, spec, decayed=lambda index: index == 0)


class Replicas:
    """Stage 0: every rank holds everything in master precision, computes as the torch trainer does, and sums gradients
    once per update."""

    def __init__(
        self, loaded: CausalLM, options: ZeroOptions, device: torch.device, sequence: SequenceGroup | None
    ) -> None:
        self.recovers = sequence is None
        module = loaded.module.to(device)
        for parameter in module.parameters():
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        self.model = RankModel(
            module,
            compute_dtype=options.dtype,
            master_dtype=options.master_dtype,
            device=device,
            checkpointing=options.trainer.activation_checkpointing,
            sequence=sequence,
        )
        self._adamw = _adamw(module)
        named = {name: p for name, p in loaded.named_weights() if isinstance(p, nn.Parameter)}
        self.shards = replicated_shards(named, self._adamw)
        self._parameters = list(named.values())
        self._bucket_bytes = options.trainer.bucket_mib << 20

    def ask(self, ask: Callable[[RankModel], Tensor]) -> Tensor:
        return ask(self.model)

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        return self.model.logprobs(packed, temperature=temperature)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if dist.get_world_size() > 1:
            for bucket in self._buckets():
                flat = torch.cat([gradient.view(-1) for gradient in bucket])
                dist.all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    gradient.view(-1).copy_(part)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, optimizer.max_grad_norm))
        if isfinite(norm):
            _set(self._adamw, optimizer)
            self._adamw.step()
        self.forget()
        return norm, isfinite(norm)

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= self._bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class ZeroGradients:
    """Stages 1, 2 and 3. In bfloat16 the weights that compute are bfloat16, and their masters float32."""

    def __init__(
        self, loaded: CausalLM, options: ZeroOptions, device: torch.device, sequence: SequenceGroup | None
    ) -> None:
        import deepspeed

        stage = options.trainer.zero_stage
        # 2 and 3 exchange gradients and weights in the middle of a pass
        self.recovers = stage == 1 and sequence is None
        module = loaded.module
        named = {name: p for name, p in loaded.named_weights() if isinstance(p, nn.Parameter)}
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self._adamw = _adamw(module)  # now: a parameter that ZeRO 3 took over has lost its dimensions
        wrapped = Asked(module)
        config = deepspeed_config(options, parameters=sum(p.numel() for p in module.parameters()))
        if stage == 3:  # nothing ever holds the model whole
            deepspeed.zero.Init(module=OneAtATime(module, device), config_dict_or_path=config, dtype=options.dtype)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
        with nullcontext() if stage == 3 else laid_out_once(module):
            self._engine, *_ = deepspeed.initialize(model=wrapped, optimizer=self._adamw, config=config)
        self._optimizer: Any = self._engine.optimizer
        self._optimizer.flatten = _flatten_dense_tensors  # for gradients, which are many and small
        self.model = wrapped.model = RankModel(
            module,
            compute_dtype=options.dtype,
            master_dtype=options.dtype,
            device=device,
            checkpointing=options.trainer.activation_checkpointing,
            sequence=sequence,
        )
        self.shards = zero_shards(self._engine, named, shapes)

    def ask(self, ask: Callable[[RankModel], Tensor]) -> Tensor:
        return self._engine(ask)

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        return self.ask(lambda model: model.logprobs(packed, temperature=temperature))

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over the ranks
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        _set(self._adamw, optimizer)
        self._optimizer.clip_grad = optimizer.max_grad_norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        moved = bool(self._engine.was_step_applied())
        if not moved:
            self.forget()  # in stage 2 with offload DeepSpeed would add the next gradient to this one
        return norm, moved and isfinite(norm)

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._engine.module.parameters():
            parameter.grad = parameter.grad_accum = None  # type: ignore[attr-defined]
        if hasattr(self._optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
            for group in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[group] = None
