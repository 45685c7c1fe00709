"""The rank side of a frozen base model that adapters share.

Below stage 3 every rank has the whole base, in the precisions of the torch trainer's base
(engine.backends.torch.shared_base). Stage 3 splits it over the ranks, with all weights in the compute precision. The
base has no gradients and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.backends.deepspeed import files
from engine.backends.deepspeed.meta_model import MetaModel, open_meta_model
from engine.backends.deepspeed.options import RankOptions, deepspeed_config
from engine.backends.deepspeed.rank_model import (
    EvaluatedModule,
    RankModel,
    SequenceGroup,
    gather,
    names_of,
    prepare_module,
    probe_on_rank_0,
)
from engine.backends.deepspeed.sharded_model import named_parameters, rank_model
from engine.backends.deepspeed.shards import frozen_shards, gather_when_called, gathered, split_parameters
from engine.backends.deepspeed.trainer import ZeroTrainer
from engine.backends.protocol import UPDATE_REFUSED
from engine.backends.torch.lora import replace_linears
from engine.backends.torch.packing import Packed
from engine.backends.torch.scalar_lm import HEAD_NAME, new_head, with_scalar_head
from engine.backends.torch.shared_base import linear_parameters
from engine.backends.weight_files.digests import Sums, tensor_sums
from engine.backends.weight_files.tensor_files import shapes_of_tensors
from engine.cluster.rank_progress import report_progress
from engine.errors import BadSpec
from engine.models.folder import scalar_head_message
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec


class RankBase:
    """This rank's part of a frozen model whose linear layers take adapters."""

    def __init__(
        self, folder: Path, key: str, options: RankOptions, *, device: torch.device, sequence: SequenceGroup | None
    ) -> None:
        """`key` is the registry key of the model. For `sequence`, see `ZeroTrainer.load`."""
        self.key, self.options, self.sequence = key, options, sequence
        self.is_split = options.trainer.zero_stage == 3
        # Open the model without its weights, and check it in master precision.
        master_dtype, cpu = options.master_dtype, torch.device("cpu")
        meta_model = open_meta_model(folder, dtype=master_dtype, parameter_dtype=master_dtype, device=cpu)
        probe_on_rank_0(meta_model, folder)
        prepare_module(meta_model, options, device, sequence)
        loaded = meta_model.model
        self.layers = replace_linears(loaded)
        module = loaded.module.requires_grad_(False)

        # Give the weights their memory, and fill it.
        names, named = names_of(loaded), named_parameters(loaded)
        shapes = shapes_of_tensors(named.items())
        config = deepspeed_config(options, parameters=sum(weight.numel() for weight in named.values()))
        if self.is_split:
            split_parameters(module, config, options.dtype, device)
        else:
            _allocate(module, options.dtype, device)
        self.model = rank_model(module, options, device, sequence, master_dtype=master_dtype)
        shards = frozen_shards(named, shapes, split=self.is_split)
        self.state = files.state_of(names, shards, module, device, master_dtype)
        files.fill(self.state, meta_model.weights)

        # Read now what is needed in master precision, because the files may be deleted later.
        self.digest, self.digests = _digest_of(meta_model, self.state)
        self._stored_head_weight: Tensor | None = None
        if self.model.scalar:
            self._stored_head_weight = torch.empty(shapes[f"{HEAD_NAME}.weight"], dtype=master_dtype)
            meta_model.weights.read_into(f"{HEAD_NAME}.weight", self._stored_head_weight)

        self._evaluated = EvaluatedModule(module, self.model)
        self._hooks: Any = gather_when_called(self._evaluated, config) if self.is_split else None

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Returns `compute()`, which uses the base in one forward pass."""
        return self._evaluated(lambda _: compute())

    def gathered_weight(self, layer: nn.Linear) -> AbstractContextManager[object]:
        """A context within which every rank has the whole weight of the layer. Every rank calls it."""
        return gathered(layer.weight) if self.is_split else nullcontext()

    def after_backward(self) -> None:
        """Frees the gathered weights of modules that the backward pass did not reach."""
        if self.is_split:
            self._hooks.release_backward_leftovers()

    def scalar_model(self, *, init_seed: int) -> RankModel:
        """The base's decoder under a new scalar head, with the weight of the checkpoint if it has one, as
        `SharedBase.scalar_model`."""
        head = new_head(self.model, init_seed)
        if self._stored_head_weight is not None:
            head.weight.data.copy_(self._stored_head_weight)
        scalar = with_scalar_head(self.model, head, self.key or "the base model")
        device, master_dtype = self.model.device, self.options.master_dtype
        return rank_model(scalar.module, self.options, device, self.sequence, master_dtype=master_dtype)

    def nbytes(self) -> int:
        """Bytes of the weights on the devices of all ranks."""
        device_type = self.model.device.type
        held = [piece.flat for piece in self.state.shards.pieces if piece.flat.device.type == device_type]
        held += self.state.buffers.values()
        return sum(gather(sum(tensor.nbytes for tensor in held)))

    def close(self) -> None:
        """Removes DeepSpeed's hooks."""
        if self._hooks is not None:
            self._hooks.destroy()


def _allocate(module: nn.Module, compute_dtype: torch.dtype, device: torch.device) -> None:
    """Gives the parameters of a meta model their memory: linear layers in the compute dtype, the others in their own.
    """
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    lowered = {id(parameter) for parameter in linear_parameters(module)}
    for parameter in module.parameters():
        dtype = compute_dtype if id(parameter) in lowered else parameter.dtype
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)


def _digest_of(meta_model: MetaModel, state: files.ShardedState) -> tuple[str, dict[str, str]]:
    """The digest of the model's weights in master precision, whatever precision the ranks hold them in. Each rank reads
    every n-th tensor."""
    sums: dict[str, Sums] = {}
    for name in sorted(state.shapes())[dist.get_rank() :: dist.get_world_size()]:
        tensor = torch.empty(state.shape(name), dtype=state.dtype(name))
        meta_model.weights.read_into(name, tensor)
        sums[name] = tensor_sums(tensor)
        report_progress()
    return files.digest_of_ranks(state, sums)


class FrozenBaseModel:
    """The base alone, as the `ShardedModel` of a policy that is only read."""

    def __init__(self, base: RankBase, model: RankModel) -> None:
        """`model` has the decoder of the base, and may have a head of its own."""
        self.base, self.model = base, model
        self.shards = base.state.shards
        self.exchanges_nothing = not base.is_split and base.sequence is None

    def evaluate(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        return self.base.run(lambda: function(self.model))

    def logprobs(self, packed: Packed, temperature: float) -> Tensor:
        return self.evaluate(lambda model: model.logprobs(packed, temperature=temperature))

    def backward(self, loss: Tensor) -> None:
        raise BadSpec(UPDATE_REFUSED)

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        raise BadSpec(UPDATE_REFUSED)

    def drop_gradients(self) -> None:
        """Does nothing: the base has no gradients."""

    def close(self) -> None:
        """Does nothing: the base is freed by itself."""


class ZeroBaseTrainer(ZeroTrainer):
    """The base itself, which can only be read: logprobs, digest and export."""

    def __init__(self, base: RankBase) -> None:
        super().__init__(FrozenBaseModel(base, base.model), base.state, base.options)
        self.base = base

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return self.base.digest, self.base.digests


def check_head(base: RankBase, spec: LoraSpec) -> None:
    """Raises BadSpec for an adapter with a language head on a model with a scalar head."""
    if base.model.scalar and spec.head == "lm":
        raise BadSpec(scalar_head_message(base.key or "the base model"))
