"""Where the master weights and AdamW's moments of each parameter lie on this rank, for every ZeRO stage alike.

A *piece* is a range of a flattened parameter inside one of the tensors that AdamW steps. All that moves state in and
out (checkpoints, digests, exports) is written on pieces. This is the one module that knows DeepSpeed's inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.cluster.rank_progress import report_progress

MOMENTS = ("exp_avg", "exp_avg_sq")
PUBLISHED_ELEMENTS = 1 << 25
"""Sent at once when weights are brought to their masters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + length) of the flattened parameter `name`: [offset, offset + length) of `flat`."""

    name: str
    start: int
    length: int
    flat: Tensor
    """In master precision; the key of the moments in AdamW's state."""
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """This piece of `flat` or of a moment of it."""
        return whole.detach().view(-1).narrow(0, self.offset, self.length)


class Shards:
    """All pieces of this rank, and AdamW's state under them."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        adamw: torch.optim.Optimizer,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        replicated: bool,
        publish: Callable[[], None],
    ) -> None:
        """`replicated`: every rank has every piece. `publish` makes the weights that compute equal the masters."""
        self.shapes = dict(sorted(shapes.items()))
        self.replicated, self.publish, self._adamw = replicated, publish, adamw
        self.pieces = sorted(pieces, key=lambda piece: (piece.name, piece.start))
        self._by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            self._by_name.setdefault(piece.name, []).append(piece)

    def owned(self) -> list[Piece]:
        """Pieces that this rank writes: over all ranks, each element once."""
        if not self.replicated:
            return self.pieces
        world_size, rank = dist.get_world_size(), dist.get_rank()
        mine = {name for index, name in enumerate(self.shapes) if index % world_size == rank}
        return [piece for piece in self.pieces if piece.name in mine]

    # -- moments ----------------------------------------------------------------------------------------------

    @property
    def has_moments(self) -> bool:
        return any(self._adamw.state.values())

    @property
    def step(self) -> Tensor:
        """Updates made, as AdamW counts them; only with moments."""
        return next(iter(state["step"] for state in self._adamw.state.values() if state))

    def moment(self, piece: Piece, name: str) -> Tensor:
        """`name` is one of MOMENTS."""
        return piece.of(self._adamw.state[piece.flat][name])

    def forget_moments(self) -> None:
        self._adamw.state.clear()

    def make_moments(self, step: float) -> None:
        """Zero moments of every piece, after `step` updates."""
        self.forget_moments()
        for flat in {id(piece.flat): piece.flat for piece in self.pieces}.values():
            self._adamw.state[flat] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=flat.device),
                **{name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS},
            }

    def nbytes(self) -> int:
        """Bytes of this rank's masters."""
        return sum(piece.length * piece.flat.element_size() for piece in self.pieces)

    def moments_nbytes(self) -> int:
        """Bytes of this rank's moments, as held now."""
        return sum(value.nbytes for state in self._adamw.state.values() for value in state.values())

    # -- whole tensors ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def assemble(self, name: str, *, on: int, device: torch.device) -> Tensor | None:
        """The whole parameter in master precision, on rank `on`; None elsewhere. Every rank calls it."""
        pieces, shape = self._by_name.get(name, []), self.shapes[name]
        if self.replicated or dist.get_world_size() == 1:
            return pieces[0].of(pieces[0].flat).view(shape) if dist.get_rank() == on else None
        # added up as integers: zero plus the bits of a number are its bits, also those of -0.0 and NaN
        whole = torch.zeros(shape, dtype=torch.int32, device=device).view(-1)
        for piece in pieces:
            whole[piece.start : piece.start + piece.length] = piece.of(piece.flat).view(torch.int32).to(device)
        dist.reduce(whole, on)
        return whole.view(torch.float32).view(shape) if dist.get_rank() == on else None


# -- handing a model over ----------------------------------------------------------------------------------------


class OneAtATime(nn.Module):
    """For `deepspeed.zero.Init`, which splits parameter after parameter: each gets its storage just before that."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self._device = module, device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self.inner.parameters(recurse):
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
            report_progress()
            yield parameter


@contextmanager
def laid_out_once(module: nn.Module) -> Iterator[None]:
    """Within this context, stages 1 and 2 take over the module of a meta model without a second copy of it. DeepSpeed's
    own way to flatten the parameters into one tensor broadcasts them first, and copies them all."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    users: list[Any] = [bf16_optimizer, stage_1_and_2]
    theirs = [user._flatten_dense_tensors for user in users]
    for parameter in module.parameters():
        parameter.ds_optim_param = True  # type: ignore[attr-defined]  # "differs by rank": not broadcast
    for user in users:
        user._flatten_dense_tensors = _lay_out
    try:
        yield
    finally:
        for user, function in zip(users, theirs, strict=True):
            user._flatten_dense_tensors = function
        for parameter in module.parameters():
            del parameter.ds_optim_param  # type: ignore[attr-defined]


def _lay_out(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one dimension, in one allocation."""
    whole = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        whole[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
        start += tensor.numel()
    return whole


# -- finding them -------------------------------------------------------------------------------------------------

Named = Mapping[str, nn.Parameter]


def replicated_shards(named: Named, adamw: torch.optim.Optimizer) -> Shards:
    """Without ZeRO: AdamW steps the parameters themselves, on every rank."""
    pieces = [Piece(name, 0, parameter.numel(), parameter, 0) for name, parameter in named.items()]
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return Shards(pieces, adamw, shapes=shapes, replicated=True, publish=lambda: None)


def zero_shards(engine: Any, named: Named, shapes: Mapping[str, tuple[int, ...]]) -> Shards:
    """Of a DeepSpeed engine of stage 1, 2 or 3. `shapes` are those before it took the parameters over."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        pieces = _stage_3_pieces(optimizer, named)
        publish = _stage_3_publish(optimizer)
    else:
        pieces = _stage_1_2_pieces(optimizer, named)
        publish = _stage_1_2_publish(optimizer)
    return Shards(pieces, engine.basic_optimizer, shapes=shapes, replicated=False, publish=publish)


def _stage_1_2_pieces(optimizer: Any, named: Named) -> list[Piece]:
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flats is None:  # bfloat16 in stage 1: another class of DeepSpeed's
        flats = optimizer.fp32_groups_flat_partition
    found = []
    for name, parameter in named.items():
        fragment: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is not None:  # None: nothing of it is on this rank
            at, source = fragment.hp_fragment_address, fragment.lp_fragment_address
            found.append(Piece(name, source.start, at.numel, flats[fragment.param_group_index], at.start))
    return found


def _stage_1_2_publish(optimizer: Any) -> Callable[[], None]:
    """Bit for bit what DeepSpeed's `update_lp_params` does, which gathers everything at once: gloo makes a copy of
    what it gathers."""

    def publish() -> None:
        if hasattr(optimizer, "single_partition_of_fp32_groups"):
            masters, flats = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
        else:
            masters, flats = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
        for master, flat in zip(masters, flats, strict=True):
            parts = flat.detach().split(len(flat) // dist.get_world_size())
            parts[dist.get_rank()].copy_(master.detach())
            for rank, part in enumerate(parts):
                for chunk in part.split(PUBLISHED_ELEMENTS):
                    dist.broadcast(chunk, rank)
                    report_progress()

    return publish


def _stage_3_pieces(optimizer: Any, named: Named) -> list[Piece]:
    found = []
    for name, parameter in named.items():
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * padded
        length = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if length > 0:  # the last ranks' parts are padding where a parameter is small
            found.append(Piece(name, start, length, optimizer.fp32_partitioned_groups_flat[group], offset))
    return found


def _stage_3_publish(optimizer: Any) -> Callable[[], None]:
    def publish() -> None:
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = optimizer.persistent_parameters  # small ones that stay whole on every rank
        if persistent:
            persistent[0].all_gather(persistent)

    return publish
