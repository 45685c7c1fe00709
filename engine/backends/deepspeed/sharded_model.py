"""Forward, backward and step of one model over all ranks: DeepSpeed's engine for ZeRO 1 to 3, plain data parallelism
for stage 0.

Gradients are *summed* over the ranks, because the loss of each rank is its part of the whole minibatch's loss and is
normalised already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from math import isfinite
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from engine.backends.deepspeed.options import RankOptions, deepspeed_config
from engine.backends.deepspeed.rank_model import EvaluatedModule, RankModel, SequenceGroup
from engine.backends.deepspeed.rank_optimizer import RankOptimizer
from engine.backends.deepspeed.shards import (
    Shards,
    flattened_without_copies,
    replicated_shards,
    split_parameters,
    zero_shards,
)
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.optimizers import hidden_matrices
from engine.backends.torch.packing import Packed
from engine.backends.torch.updates import adamw_groups
from engine.backends.weight_files.tensor_files import shapes_of_tensors
from storage.chain.records import OptimizerSpec


class ShardedModel(Protocol):
    """One model on all ranks, with its gradients and its optimizer. Every method is called by every rank."""

    model: RankModel
    shards: Shards
    exchanges_nothing: bool
    """Whether the ranks exchange nothing within a forward or backward pass. A pass that failed on one rank then leaves
    the other ranks able to go on."""

    def evaluate(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        """Returns `function(model)`, computed in one forward pass."""
        ...

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        """Logprobs of the trained tokens (N,), in nats, with gradient where gradients are on."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a scalar loss. The gradients of all ranks add up."""
        ...

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        """Takes one optimizer step; returns (norm of the whole gradient, whether the weights moved). The weights do not
        move if the norm is not finite. The gradients are dropped afterwards."""
        ...

    def drop_gradients(self) -> None:
        """Drops the gradients of an update that failed."""
        ...

    def close(self) -> None:
        """Drops DeepSpeed's hooks and buffers."""
        ...


def shard_model(
    loaded: CausalLM, options: RankOptions, device: torch.device, sequence: SequenceGroup | None
) -> ShardedModel:
    """Takes over the model of a meta model: in master precision for stage 0, in compute precision for the other stages.
    Its weights are then to be filled through `shards`. `sequence` is the group of ranks that compute each row together.
    """
    module, stage = loaded.module, options.trainer.zero_stage
    # Read the names and the shapes before ZeRO 3 takes the parameters over: afterwards the shapes are lost.
    named = named_parameters(loaded)
    shapes = shapes_of_tensors(named.items())
    optimizer = RankOptimizer(parameter_groups(module.parameters()), hidden_matrices(named.items(), module), device)
    if stage == 0:
        # Allocate all weights. They are filled later through the shards.
        module.to(device)
        for parameter in module.parameters():
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        model = rank_model(module, options, device, sequence, master_dtype=options.master_dtype)
        return ReplicatedModel(model, named, optimizer, bucket_mib=options.trainer.bucket_mib)

    config = deepspeed_config(options, parameters=sum(p.numel() for p in module.parameters()))
    # In stage 3 a rank never holds all weights of the model.
    if stage == 3:
        split_parameters(module, config, options.dtype, device)
    model = rank_model(module, options, device, sequence, master_dtype=options.dtype)
    return ZeroModel(model, module, named, shapes, optimizer, config)


def rank_model(
    module: nn.Module,
    options: RankOptions,
    device: torch.device,
    sequence: SequenceGroup | None,
    *,
    master_dtype: torch.dtype,
) -> RankModel:
    """The model of a module on this rank, which computes as the options say."""
    return RankModel(
        module,
        compute_dtype=options.dtype,
        master_dtype=master_dtype,
        device=device,
        checkpointing=options.trainer.activation_checkpointing,
        sequence=sequence,
    )


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """The groups of `adamw_groups` that have parameters: DeepSpeed takes no empty group."""
    return [group for group in adamw_groups(list(parameters)) if group["params"]]


def named_parameters(model: CausalLM) -> dict[str, nn.Parameter]:
    """The parameters of a model by the names of its weights, each once."""
    return {name: weight for name, weight in model.named_weights() if isinstance(weight, nn.Parameter)}


class ReplicatedModel:
    """Stage 0: every rank holds everything in master precision, computes as the torch trainer does, and sums the
    gradients over the ranks once per update."""

    def __init__(
        self, model: RankModel, named: Mapping[str, nn.Parameter], optimizer: RankOptimizer, *, bucket_mib: int
    ) -> None:
        """`named` are the trained parameters, which `optimizer` steps."""
        self.model = model
        self.exchanges_nothing = model.sequence is None
        self._rank_optimizer = optimizer
        self.shards = replicated_shards(named, optimizer)
        self._parameters = list(named.values())
        self._bucket_bytes = bucket_mib << 20

    def evaluate(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        return function(self.model)

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        return self.model.logprobs(packed, temperature=temperature)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        # A rank may have had empty passes only. It still takes part in the sum.
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if dist.get_world_size() > 1:
            self._sum_over_ranks()
        # Every rank has the same gradient now, and takes the same step.
        norm = float(nn.utils.clip_grad_norm_(self._parameters, optimizer.max_grad_norm))
        if isfinite(norm):
            self._rank_optimizer.apply(optimizer)
            self._rank_optimizer.step()
        self.drop_gradients()
        return norm, isfinite(norm)

    def _sum_over_ranks(self) -> None:
        # One exchange per bucket: one per parameter would cost more time, and one for all would double the memory.
        for bucket in self._buckets():
            flat = torch.cat([gradient.view(-1) for gradient in bucket])
            dist.all_reduce(flat)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, part in zip(bucket, flat.split(sizes), strict=True):
                gradient.view(-1).copy_(part)

    def _buckets(self) -> Iterator[list[Tensor]]:
        """All gradients, in lists of at least `_bucket_bytes`."""
        bucket: list[Tensor] = []
        nbytes = 0
        for parameter in self._parameters:
            assert parameter.grad is not None
            bucket.append(parameter.grad)
            nbytes += parameter.grad.nbytes
            if nbytes >= self._bucket_bytes:
                yield bucket
                bucket, nbytes = [], 0
        if bucket:
            yield bucket

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Does nothing: the weights are freed with the model."""


class ZeroModel:
    """Stages 1, 2 and 3. With bfloat16, the weights that compute are bfloat16 and their master weights float32."""

    def __init__(
        self,
        model: RankModel,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        optimizer: RankOptimizer,
        config: dict[str, Any],
    ) -> None:
        """`module` has the trained parameters `named`, whose shapes before ZeRO 3 split them are `shapes`, and which
        `optimizer` steps. `config` is DeepSpeed's."""
        import deepspeed

        stage = config["zero_optimization"]["stage"]
        # Stages 2 and 3 exchange gradients and weights in the middle of a pass.
        self.exchanges_nothing = stage == 1 and model.sequence is None
        self.model = model
        self._rank_optimizer = optimizer
        evaluated = EvaluatedModule(module, model)
        with nullcontext() if stage == 3 else flattened_without_copies(module):
            self._engine, *_ = deepspeed.initialize(model=evaluated, optimizer=optimizer, config=config)
        self._optimizer: Any = self._engine.optimizer
        # Give DeepSpeed torch's own function again: it also flattens gradients with it, which are many and small.
        self._optimizer.flatten = _flatten_dense_tensors
        self.shards = zero_shards(self._engine, named, shapes)

    def close(self) -> None:
        self._engine.destroy()

    def evaluate(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        return self._engine(function)

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        return self.evaluate(lambda model: model.logprobs(packed, temperature=temperature))

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over the ranks, and the gradients must be summed.
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        self._rank_optimizer.apply(optimizer)
        # DeepSpeed clips the gradient, and skips the step if the norm is not finite.
        self._optimizer.clip_grad = optimizer.max_grad_norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        moved = bool(self._engine.was_step_applied())
        # In stage 2 with offload, DeepSpeed would add the next gradient to this one.
        if not moved:
            self.drop_gradients()
        return norm, moved and isfinite(norm)

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._engine.module.parameters():
            parameter.grad = parameter.grad_accum = None  # type: ignore[attr-defined]
        # Stages 1 and 2 hold the averaged gradients in the optimizer too.
        if hasattr(self._optimizer, "single_partition_of_fp32_groups"):
            for group in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[group] = None
