"""The pieces of master weights and of the optimizer's moments on this rank, in the same form for every ZeRO stage.

A *piece* is a range of a flattened parameter inside one of the tensors that AdamW steps. Checkpoints, digests and
exports read and write pieces. This is the only module that uses DeepSpeed's internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from engine.backends.weight_files.tensor_files import shapes_of_tensors
from engine.cluster.rank_progress import report_progress
from storage.chain.records import OptimizerKind, OptimizerSpec

if TYPE_CHECKING:
    from engine.backends.deepspeed.rank_optimizer import RankOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""The only moment of a matrix that Muon steps."""
PUBLISHED_ELEMENTS = 1 << 25
"""Number of elements that are sent at once when the weights that compute are set to their masters."""


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Elements [start, start + length) of the flattened parameter `name`, which are the elements
    [offset, offset + length) of `flat`."""

    name: str
    start: int
    length: int
    flat: Tensor
    """A tensor in master precision. It is the key of its moments in AdamW's state."""
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """This piece of `flat`, or of a moment of `flat`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


class Shards:
    """All pieces of this rank, with the optimizer's state of them."""

    def __init__(
        self,
        pieces: Iterable[ShardPiece],
        optimizer: RankOptimizer | None,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        replicated: bool,
        publish: Callable[[], None],
    ) -> None:
        """`optimizer` is None for frozen weights, which have no moments. `replicated` says whether every rank has every
        piece. `publish` copies the master weights to the weights that compute."""
        self.shapes = dict(sorted(shapes.items()))
        self.replicated, self.publish, self._optimizer = replicated, publish, optimizer
        self.pieces = sorted(pieces, key=lambda piece: (piece.name, piece.start))
        self._by_name: dict[str, list[ShardPiece]] = {}
        for piece in self.pieces:
            self._by_name.setdefault(piece.name, []).append(piece)

    def owned(self) -> list[ShardPiece]:
        """The pieces that this rank writes. Over all ranks, they contain each element once."""
        if not self.replicated:
            return self.pieces
        world_size, rank = dist.get_world_size(), dist.get_rank()
        # Every rank has all pieces: each rank writes every n-th parameter.
        names_of_rank = set(list(self.shapes)[rank::world_size])
        return [piece for piece in self.pieces if piece.name in names_of_rank]

    # -- moments ----------------------------------------------------------------------------------------------

    @property
    def _optimizer_state(self) -> dict[Any, Any]:
        return {} if self._optimizer is None else self._optimizer.state

    @property
    def has_moments(self) -> bool:
        return any(self._optimizer_state.values())

    @property
    def step(self) -> Tensor:
        """The number of updates, as AdamW counts them. Only valid with moments."""
        # AdamW counts for each tensor, and all tensors were updated together.
        return next(state["step"] for state in self._optimizer_state.values() if state)

    def matrices_of_muon(self, kind: OptimizerKind) -> frozenset[str]:
        """The names of the parameters that an optimizer of this kind steps with Muon."""
        return self._optimizer.hidden if self._optimizer is not None and kind == "muon" else frozenset()

    def moments_of(self, name: str) -> tuple[str, ...]:
        """The names of the moments of a parameter in a checkpoint."""
        kind = "adamw" if self._optimizer is None else self._optimizer.kind
        return (MOMENTUM,) if name in self.matrices_of_muon(kind) else MOMENTS

    def moment(self, piece: ShardPiece, name: str) -> Tensor:
        """The moment of a piece. `name` is one of `moments_of`."""
        return piece.of(self._optimizer_state[piece.flat]["exp_avg" if name == MOMENTUM else name])

    def check_optimizer(self, spec: OptimizerSpec) -> None:
        """Raises BadSpec if the moments are those of another kind of optimizer."""
        if self._optimizer is not None:
            self._optimizer.check(spec)

    def drop_moments(self) -> None:
        self._optimizer_state.clear()

    def create_moments(self, step: float, kind: OptimizerKind) -> None:
        """Gives every piece moments of zero, after `step` updates by an optimizer of this kind."""
        self.drop_moments()
        assert self._optimizer is not None  # frozen weights have no moments
        self._optimizer.kind = kind
        # Several pieces may be in one flat tensor, which has one state.
        for flat in {id(piece.flat): piece.flat for piece in self.pieces}.values():
            moments = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
            count = torch.tensor(float(step), dtype=torch.float32, device=flat.device)
            self._optimizer_state[flat] = {"step": count, **moments}

    # -- whole tensors ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def assemble(
        self, name: str, *, on: int, device: torch.device, of: Callable[[Tensor], Tensor] = lambda flat: flat
    ) -> Tensor | None:
        """The whole parameter in master precision on rank `on`, None on the others. With `of`, it is assembled of the
        tensor that `of` returns of each flat one, such as its gradient. Every rank calls it."""
        pieces, shape = self._by_name.get(name, []), self.shapes[name]
        # No exchange is needed where each rank has the whole parameter.
        if self.replicated or dist.get_world_size() == 1:
            if dist.get_rank() != on:
                return None
            return pieces[0].of(of(pieces[0].flat)).view(shape)
        # Sum the pieces as integers: zero plus the bits of a number are its bits, also those of -0.0 and NaN. Frozen
        # weights in bfloat16 become float32, which is exact.
        whole = torch.zeros(shape, dtype=torch.int32, device=device).view(-1)
        for piece in pieces:
            bits = piece.of(of(piece.flat)).to(torch.float32).view(torch.int32)
            whole[piece.start : piece.start + piece.length] = bits.to(device)
        dist.reduce(whole, on)
        if dist.get_rank() != on:
            return None
        return whole.view(torch.float32).view(shape)


# -- handing a model over to DeepSpeed ---------------------------------------------------------------------------


def split_parameters(module: nn.Module, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Splits the parameters of a meta model's module over the ranks, as ZeRO 3 does. They are zeros in `dtype`.
    `config` is DeepSpeed's."""
    import deepspeed

    one_by_one = _AllocatedOneByOne(module, dtype, device)
    deepspeed.zero.Init(module=one_by_one, config_dict_or_path=config, dtype=dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


class _AllocatedOneByOne(nn.Module):
    """The module as `deepspeed.zero.Init` gets it. DeepSpeed splits parameter after parameter, and each gets its
    storage just before that."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.inner, self._dtype, self._device = module, dtype, device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self.inner.parameters(recurse):
            parameter.data = torch.zeros(parameter.shape, dtype=self._dtype, device=self._device)
            report_progress()
            yield parameter


@contextmanager
def flattened_without_copies(module: nn.Module) -> Iterator[None]:
    """Within this context, stages 1 and 2 take over the module of a meta model without a second copy of it. DeepSpeed's
    own way to flatten the parameters into one tensor broadcasts them first, and copies them all."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    # DeepSpeed does not broadcast a parameter with this mark, which says that it differs by rank.
    for parameter in module.parameters():
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    # Both modules have imported the same function of torch.
    patched: list[Any] = [bf16_optimizer, stage_1_and_2]
    for module_of_deepspeed in patched:
        module_of_deepspeed._flatten_dense_tensors = _flatten
    try:
        yield
    finally:
        for module_of_deepspeed in patched:
            module_of_deepspeed._flatten_dense_tensors = _flatten_dense_tensors
        for parameter in module.parameters():
            del parameter.ds_optim_param  # type: ignore[attr-defined]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one dimension, in one allocation."""
    size = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(size, dtype=tensors[0].dtype, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
        start += tensor.numel()
    return flat


# -- the pieces of each stage --------------------------------------------------------------------------------------

NamedParameters = Mapping[str, nn.Parameter]


def replicated_shards(named: NamedParameters, optimizer: RankOptimizer) -> Shards:
    """The shards without ZeRO: the optimizer steps the parameters themselves, on every rank."""
    pieces: list[ShardPiece] = []
    for name, parameter in named.items():
        pieces.append(ShardPiece(name, 0, parameter.numel(), parameter, 0))
    shapes = shapes_of_tensors(named.items())
    shards = Shards(pieces, optimizer, shapes=shapes, replicated=True, publish=lambda: None)
    optimizer.bind(shards, list(named.values()))
    return shards


def frozen_shards(named: NamedParameters, shapes: Mapping[str, tuple[int, ...]], *, split: bool) -> Shards:
    """The shards of weights that are not trained. With `split`, ZeRO 3 has split them (`split_parameters`), else every
    rank has them whole. `shapes` are the shapes of the whole weights."""
    pieces: list[ShardPiece] = []
    for name, parameter in named.items():
        if not split:
            pieces.append(ShardPiece(name, 0, parameter.numel(), parameter, 0))
            continue
        # Each rank has one part. The last parts are padded to the common length, or are only padding.
        part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        start = dist.get_rank() * part.ds_numel
        length = min(part.ds_numel, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if length > 0:
            pieces.append(ShardPiece(name, start, length, part, 0))
    return Shards(pieces, None, shapes=shapes, replicated=not split, publish=lambda: None)


def gathered(parameter: Tensor) -> AbstractContextManager[object]:
    """A context within which every rank has a whole weight that ZeRO 3 has split."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def gather_when_called(module: nn.Module, config: dict[str, Any]) -> Any:
    """Makes each module of a frozen model that `split_parameters` has split gather its weights when it is called, in
    the backward pass too. `config` is DeepSpeed's. Returns DeepSpeed's object with the hooks.

    DeepSpeed's engine can do this for a model without an optimizer, but not in a backward pass."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    zero = config["zero_optimization"]
    offload = DeepSpeedZeroOffloadParamConfig(**zero["offload_param"]) if "offload_param" in zero else None
    return DeepSpeedZeRoOffload(
        module,
        timers=None,
        ds_config=config,
        overlap_comm=False,
        prefetch_bucket_size=zero["stage3_prefetch_bucket_size"],
        max_live_parameters=zero["stage3_max_live_parameters"],
        offload_param_config=offload,
    )


def zero_shards(engine: Any, named: NamedParameters, shapes: Mapping[str, tuple[int, ...]]) -> Shards:
    """The shards of a DeepSpeed engine of stage 1, 2 or 3, whose optimizer is a RankOptimizer. `shapes` are the shapes
    of the parameters before DeepSpeed took them over."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        flats = optimizer.fp32_partitioned_groups_flat
        pieces = _stage_3_pieces(optimizer, named)
        publish = _stage_3_publish(optimizer)
    else:
        # For bfloat16 in stage 1, DeepSpeed uses another optimizer class, with other names.
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
        if flats is None:
            flats = optimizer.fp32_groups_flat_partition
        pieces = _stage_1_2_pieces(flats, named)
        publish = _stage_1_2_publish(optimizer)
    shards = Shards(pieces, engine.basic_optimizer, shapes=shapes, replicated=False, publish=publish)
    engine.basic_optimizer.bind(shards, flats)
    return shards


def _stage_1_2_pieces(flats: Sequence[Tensor], named: NamedParameters) -> list[ShardPiece]:
    # `_hp_mapping` says which part of a parameter is on this rank, and where it is in the flat master weights.
    pieces = []
    for name, parameter in named.items():
        fragment: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            continue
        master, source = fragment.hp_fragment_address, fragment.lp_fragment_address
        flat = flats[fragment.param_group_index]
        pieces.append(ShardPiece(name, source.start, master.numel, flat, master.start))
    return pieces


def _stage_1_2_publish(optimizer: Any) -> Callable[[], None]:
    """A function with the same result as DeepSpeed's `update_lp_params`, bit for bit. DeepSpeed's own function gathers
    all weights at once, and gloo copies what it gathers, so it needs more memory."""

    def publish() -> None:
        if hasattr(optimizer, "single_partition_of_fp32_groups"):
            masters, flats = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
        else:
            masters, flats = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
        for master, flat in zip(masters, flats, strict=True):
            # Each rank copies its own part, and sends it to the others in chunks.
            parts = flat.detach().split(len(flat) // dist.get_world_size())
            parts[dist.get_rank()].copy_(master.detach())
            for rank, part in enumerate(parts):
                for chunk in part.split(PUBLISHED_ELEMENTS):
                    dist.broadcast(chunk, rank)
                    report_progress()

    return publish


def _stage_3_pieces(optimizer: Any, named: NamedParameters) -> list[ShardPiece]:
    # Each rank has one part of every parameter. The last parts are padded to the common length.
    pieces = []
    for name, parameter in named.items():
        group, offset, padded_length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * padded_length
        length = min(padded_length, parameter.ds_numel - start)  # type: ignore[attr-defined]
        # For a small parameter, the parts of the last ranks are only padding.
        if length > 0:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            pieces.append(ShardPiece(name, start, length, flat, offset))
    return pieces


def _stage_3_publish(optimizer: Any) -> Callable[[], None]:
    def publish() -> None:
        # Drop the gathered weights, then copy each rank's partition from the masters.
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters stay whole on every rank, and must be gathered again.
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    return publish
