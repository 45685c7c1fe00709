"""The steps of loading that whole models and frozen bases share: kernels, the names of weights, and the probe of packed
forward passes on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.deepspeed.meta_model import MetaModel, streamed_weights
from engine.backends.deepspeed.options import RankOptions
from engine.backends.deepspeed.rank_model import RankModel, fuse_kernels
from engine.backends.deepspeed.ulysses import SequenceGroup
from engine.backends.torch.attention import IMPLEMENTATION
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.probes import probe_model
from engine.errors import BadModelFolder


class WeightNames(NamedTuple):
    """The names of a model's weights."""

    buffers: list[str]
    """Persistent buffers."""
    exported: dict[str, str]
    """`ShardedState.exported`."""
    trained: dict[str, str]
    """`ShardedState.trained`."""


def prepare_module(
    meta_model: MetaModel, options: RankOptions, device: torch.device, sequence: SequenceGroup | None
) -> None:
    """Puts fused kernels into the module. Raises BadSpec for a model whose rows the ranks cannot share."""
    module: Any = meta_model.model.module
    fuse_kernels(module, options.trainer.liger, device)
    if sequence is not None:
        sequence.check(module.config)


def names_of(model: CausalLM) -> WeightNames:
    """The names of the weights of a meta model. Call it before DeepSpeed changes the parameters."""
    # A tied weight has several names. Tensors are compared by identity, so each gets the name of `named_weights`.
    buffers: list[str] = []
    names: dict[int, str] = {}
    for name, tensor in model.named_weights():
        names[id(tensor)] = name
        if not isinstance(tensor, torch.nn.Parameter):
            buffers.append(name)
    exported = {name: names[id(tensor)] for name, tensor in model.exported_weights()}
    trained = {names[id(parameter)]: name for name, parameter in model.module.named_parameters()}
    return WeightNames(buffers, exported, trained)


@torch.no_grad()
def probe_on_ranks(
    evaluate: Callable[[Callable[[RankModel], Tensor]], Tensor], folder: Path, device: torch.device
) -> None:
    """Raises BadModelFolder, on all ranks alike, for an architecture that packed attention does not reproduce.
    `evaluate` calls a function of the model in one forward pass."""
    messages: list[str] = []

    def compare(model: RankModel) -> Tensor:
        try:
            probe_model(model, folder)
        except BadModelFolder as error:  # raised below, after the ranks have exchanged what they had to
            messages.append(str(error))
        return torch.zeros((), device=device)

    evaluate(compare)
    _raise_on_all_ranks(messages)


def probe_on_rank_0(meta_model: MetaModel, folder: Path) -> None:
    """Does the same as `probe_on_ranks` before the weights have memory: rank 0 reads the weights of one module at a
    time."""
    messages: list[str] = []
    if dist.get_rank() == 0 and not meta_model.probed:
        try:
            with streamed_weights(meta_model):
                probe_model(meta_model.model, folder)
        except BadModelFolder as error:
            messages.append(str(error))
    meta_model.model.use_attention(IMPLEMENTATION)  # as a probe does
    _raise_on_all_ranks(messages)


def _raise_on_all_ranks(messages: list[str]) -> None:
    """Raises BadModelFolder with the first message of any rank. Every rank calls it."""
    for rank_messages in gather(messages):
        if rank_messages:
            raise BadModelFolder(rank_messages[0])


def gather(value: Any) -> list[Any]:
    """The `value` of every rank, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
