"""The model on one rank: activation checkpointing, sequence parallelism, fused kernels, and the module that DeepSpeed
wraps.

Everything is computed by the modules' own forwards, because ZeRO 3 gathers a module's weights when it is called.

With Ulysses sequence parallelism (arXiv:2309.14509), several ranks share one packed row, and each computes a run of its
tokens. Around attention, the ranks exchange tokens for heads: there each rank has the whole row and a part of the
heads. The row is padded to a multiple of the number of ranks; padding is cut off before attention and has no loss.

Axes: B row · T packed token · C token of one rank's run · N trained token · n trained token of one rank's run
· H hidden · S rank of the sequence group · H query head · K key head · X heads of one rank (queries, keys, values)
· D head dimension
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.backends.deepspeed.meta_model import MetaModel, streamed_weights
from engine.backends.deepspeed.options import RankOptions
from engine.backends.torch.attention import IMPLEMENTATION, Layout, PackedLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packed
from engine.backends.torch.probes import probe_model
from engine.backends.torch.scalar_lm import values_of
from engine.errors import BadModelFolder, BadSpec
from engine.models.images import Images


class RankModel(CausalLM):
    """A `CausalLM` or a scalar model whose activations may be recomputed in the backward pass, or wait in the machine's
    memory until then."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
        checkpointing: str,
        sequence: SequenceGroup | None = None,
    ) -> None:
        """`sequence` is the group of ranks that compute each row together."""
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self.sequence = sequence
        self.scalar = self.head is None
        """Whether the head gives one number per token instead of logits."""
        if self.scalar:
            self.head = module.score  # type: ignore[assignment]
        self.device = device  # not the device of the first parameter, which may be offloaded
        # Both kinds of checkpointing recompute the layers; "offload" also moves their inputs to the host.
        self._offload = checkpointing == "offload"
        if checkpointing != "none":
            _checkpoint_layers(module)

    @property
    def vocab_size(self) -> int:
        if self.scalar:
            return int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]
        return super().vocab_size

    def hidden(self, token_ids_BT: Tensor, positions_BT: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        with self._offloaded_activations():
            return super().hidden(token_ids_BT, positions_BT, layout, images)

    def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """Logprobs of all trained tokens (N,). Those that other ranks compute come without gradient."""

        def head(hidden_nH: Tensor, target_n: Tensor) -> Tensor:
            return self._token_logprobs(hidden_nH, target_n, temperature)

        return self._at_sources(packed, head)

    def logprobs_and_entropy(self, packed: Packed, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of all trained tokens, (N,) each. Those that other ranks compute come without
        gradient."""

        def head(hidden_nH: Tensor, target_n: Tensor) -> Tensor:
            return self._token_logprobs_and_entropy(hidden_nH, target_n, temperature)

        both_N2 = self._at_sources(packed, head)
        return both_N2[:, 0], both_N2[:, 1]

    def top_logprobs(self, packed: Packed, count: int) -> Tensor:
        """As `CausalLM.top_logprobs`. Those that other ranks compute come without gradient."""

        def head(hidden_nH: Tensor, target_n: Tensor) -> Tensor:
            return self._token_top_logprobs(hidden_nH, target_n, count)

        return self._at_sources(packed, head)

    def values(self, packed: Packed) -> Tensor:
        """A scalar head's numbers (N,), as `ScalarLM.values`. Those that other ranks compute come without gradient."""
        return self._at_sources(packed, lambda hidden_nH, _target_n: values_of(self.head, hidden_nH))

    def _at_sources(self, packed: Packed, head: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Applies `head` to all trained tokens: (N, …) over all ranks of the sequence group.

        Args:
            head: gets the hidden states before the trained tokens of this rank (n, H), and these tokens (n,).
        """
        # Without sequence parallelism, this rank has the whole row.
        if self.sequence is None:
            with self.autocast():
                hidden_TH = self.packed_hidden(packed)
                return head(hidden_TH.index_select(0, packed.source_N), packed.target_N)

        # This rank computes a run of the row, and the trained tokens in it.
        row = len(packed.token_ids_T)
        layout = UlyssesLayout(PackedLayout(packed.groups, device=self.device), self.sequence, row=row)
        index_n, source_n = self.sequence.within_run(packed.source_N, row=row)
        with self.autocast():
            token_ids_C = self.sequence.run(packed.token_ids_T)
            positions_C = self.sequence.run(packed.positions_T)
            hidden_CH = self.hidden(token_ids_C.unsqueeze(0), positions_C.unsqueeze(0), layout, packed.images)[0]
            values_n = head(hidden_CH.index_select(0, source_n), packed.target_N[index_n])
            return self.sequence.gather(values_n, index_n, total=len(packed.source_N))

    def _offloaded_activations(self) -> AbstractContextManager[Any]:
        """A context that saves activations in the machine's memory, if they are to be offloaded."""
        if not self._offload or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


def _checkpoint_layers(module: nn.Module) -> None:
    """Makes each decoder layer keep only its input, and run again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    # Without such layers transformers would ignore the setting, and memory would run out later.
    if not layers:
        raise BadSpec(
            f"{type(module).__name__} has no layers that can be computed again; set activation_checkpointing='none'"
        )
    # Layers are checkpointed in training mode only. The modules inside stay in eval mode, without dropout.
    for layer in layers:
        layer.training = True


def fuse_kernels(module: nn.Module, liger: bool | str, device: torch.device) -> None:
    """Puts Liger's fused kernels into the module. "auto" does so if they are installed and the device is a GPU.

    Raises BadSpec where they are required (`liger` is True) and cannot run."""
    if liger is False:
        return
    # Where the kernels cannot run, "auto" does without them.
    is_installed = find_spec("liger_kernel") is not None
    if not is_installed or device.type != "cuda":
        if liger == "auto":
            return
        raise BadSpec(
            "trainer.liger=true needs the package liger-kernel "
            f"({'installed' if is_installed else 'not installed'}) and "
            f"a GPU (the device is {device.type}); install it, or set trainer.liger='auto'"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Keep our own head: it computes logits in chunks, and applies the temperature.
    _apply_liger_kernel_to_instance(model=module, cross_entropy=False, fused_linear_cross_entropy=False)


class EvaluatedModule(nn.Module):
    """The module that DeepSpeed wraps. Its forward pass calls a function of the model. DeepSpeed hooks into the forward
    pass of one module, so logprobs, entropies and values must all be computed by this one."""

    def __init__(self, module: nn.Module, model: RankModel) -> None:
        """`module` has the parameters that DeepSpeed takes over, and `model` computes with them."""
        super().__init__()
        self.inner, self.model = module, model

    def forward(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        return function(self.model)


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


class SequenceGroup:
    """The neighbouring ranks that share this rank's sequences. Every rank creates one, at the same time."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, dist.get_rank() % size
        # torch requires every rank to create all groups, in the same order, also those that it is not in.
        for first in range(0, dist.get_world_size(), size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= dist.get_rank() < first + size:
                self.group = group

    def check(self, config: Any) -> None:
        """Raises BadSpec unless every rank gets equally many heads."""
        heads = int(config.num_attention_heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if heads % self.size or key_heads % self.size:
            raise BadSpec(
                f"trainer.sequence_parallel={self.size} does not divide the model's {heads} attention heads and "
                f"{key_heads} key heads; give a divisor of both"
            )

    def run(self, row_T: Tensor) -> Tensor:
        """This rank's run (C,) of a row, padded with zeros."""
        length = self._run_length(len(row_T))
        padded = pad(row_T, (0, length * self.size - len(row_T)))
        return padded[self.rank * length : (self.rank + 1) * length]

    def within_run(self, source_N: Tensor, *, row: int) -> tuple[Tensor, Tensor]:
        """For positions in a row of `row` tokens: (indices of the positions in this rank's run, their positions within
        the run), both (n,)."""
        length = self._run_length(row)
        index_n = (source_N // length == self.rank).nonzero().squeeze(1)
        return index_n, source_N[index_n] - self.rank * length

    def gather(self, values_n: Tensor, index_n: Tensor, *, total: int) -> Tensor:
        """(N, …): the values of all ranks. Only this rank's values have a gradient, so gradients add up over the
        ranks."""
        # The values of the ranks are at different places, and all other places are zero: the sum has each value.
        zeros_N = values_n.detach().new_zeros(total, *values_n.shape[1:])
        values_N = zeros_N.index_copy(0, index_n, values_n.detach())
        dist.all_reduce(values_N, group=self.group)
        return values_N.index_copy(0, index_n, values_n)

    def _run_length(self, row: int) -> int:
        return -(-row // self.size)


class _Exchange(torch.autograd.Function):
    """Sends part s of (S, …) to rank s, and returns the parts that the ranks sent to this one. It is its own
    transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class UlyssesLayout:
    """A layout of the whole row, on ranks that each have a run of it."""

    def __init__(self, whole: Layout, sequence: SequenceGroup, *, row: int) -> None:
        """`whole` is the layout of the row of `row` tokens."""
        self.longest = whole.longest
        self._whole, self._sequence, self._row = whole, sequence, row

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(1, H, C, D), (1, K, C, D) twice -> (1, C, H, D)."""
        size, group = self._sequence.size, self._sequence.group

        # Exchange tokens for heads. Queries, keys and values go in one exchange, so that the ranks make one collective
        # per layer, in the same order.
        parts_SXCD = torch.cat([x[0].unflatten(0, (size, -1)) for x in (query, key, value)], dim=1)
        row_XTD = _Exchange.apply(parts_SXCD, group).transpose(0, 1).flatten(1, 2)[:, : self._row]
        # Attend over the whole row with this rank's heads.
        heads, key_heads = query.shape[1] // size, key.shape[1] // size
        row_query, row_key, row_value = row_XTD.unsqueeze(0).split([heads, key_heads, key_heads], dim=1)
        out_THD = self._whole.attend(layer, row_query, row_key, row_value, scale)[0]

        # Exchange heads for tokens. The row is padded again, so that all runs have the same length.
        length = query.shape[2]
        padded_SCHD = pad(out_THD, (0, 0, 0, 0, 0, size * length - self._row)).unflatten(0, (size, length))
        return _Exchange.apply(padded_SCHD, group).transpose(0, 1).flatten(1, 2).unsqueeze(0)
