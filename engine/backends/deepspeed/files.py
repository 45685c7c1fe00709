"""Checkpoints and model folders, written by all ranks at the same time, one tensor after another.

For a checkpoint, the ranks exchange nothing: each writes its own pieces (engine.backends.weight_files.pieces describes
the layout). For a folder of whole tensors, each tensor is gathered on the rank that writes its file, so a rank holds
one tensor more than before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.backends.deepspeed.meta_model import WeightSource
from engine.backends.deepspeed.rank_model import WeightNames, gather
from engine.backends.deepspeed.sending import HeldParts
from engine.backends.deepspeed.shards import MOMENTS, MOMENTUM, Shards
from engine.backends.torch.optimizers import kind_of_moments
from engine.backends.weight_files.digests import Sums, combine_digests, digest_of_sums, tensor_sums
from engine.backends.weight_files.pieces import (
    OPTIMIZER,
    WEIGHTS,
    moment_shapes,
    open_checkpoint,
    part_file,
    piece_name,
    shapes_metadata,
)
from engine.backends.weight_files.sketches import BUCKETS, Sketch, tensor_sketch
from engine.backends.weight_files.tensor_files import (
    Layouts,
    TensorWriter,
    check_shapes,
    file_order,
)
from engine.cluster.rank_progress import report_progress
from engine.errors import BadSpec

SHARD_BYTES = 5_000_000_000
"""Largest file of a model folder, unless a single tensor is larger; the same as `save_pretrained` uses."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ShardedState:
    """The contents of a model's files, as this rank holds its part of them."""

    shards: Shards
    buffers: Mapping[str, Tensor]
    """The persistent buffers, which are equal on every rank."""
    exported: Mapping[str, str]
    """Names that `save_pretrained` gives -> names in the model."""
    trained: Mapping[str, str]
    """Names in the model -> names of the moments, which are those of `named_parameters`: there, a tied head has the
    embedding's name."""
    device: torch.device
    master_dtype: torch.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.buffers:
            return tuple(self.buffers[name].shape)
        return self.shards.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in master precision."""
        return self.buffers[name].dtype if name in self.buffers else self.master_dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights: parameters, then buffers."""
        return {name: self.shape(name) for name in [*self.shards.shapes, *self.buffers]}

    def own_parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name, start, flat part in master precision) of the parts that this rank writes: the elements [start, start +
        length) of the flattened tensor. Over all ranks, they contain each element once. Every rank calls it."""
        for piece in self.shards.owned():
            # Frozen weights that the rank holds in bfloat16 become float32, which is exact.
            yield piece.name, piece.start, piece.of(piece.flat).to(self.master_dtype)
        if dist.get_rank() == 0:  # the buffers are equal on all ranks
            for name, buffer in self.buffers.items():
                yield name, 0, buffer.reshape(-1)

    def assemble(self, name: str, *, on: int) -> Tensor | None:
        """The whole tensor on rank `on`, None on the others. Every rank calls it."""
        if name in self.buffers:
            return self.buffers[name] if dist.get_rank() == on else None
        return self.shards.assemble(name, on=on, device=self.device)


def state_of(
    names: WeightNames, shards: Shards, module: nn.Module, device: torch.device, master_dtype: torch.dtype
) -> ShardedState:
    """The state of a whole model with these weights."""
    return ShardedState(
        shards=shards,
        buffers={name: module.get_buffer(name) for name in names.buffers},
        exported=names.exported,
        trained=names.trained,
        device=device,
        master_dtype=master_dtype,
    )


# -- checkpoints --------------------------------------------------------------------------------------------------


def write_checkpoint(state: ShardedState, folder: Path) -> list[str]:
    """Writes this rank's files; returns the names of the files of all ranks, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, rank, world_size = state.shards, dist.get_rank(), dist.get_world_size()
    owned = shards.owned()

    # The weights. The buffers are equal on all ranks, so only rank 0 writes them.
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in owned:
        tensors[piece_name(piece.name, piece.start)] = piece.of(piece.flat)
        shapes[piece.name] = shards.shapes[piece.name]
    if rank == 0:
        tensors |= state.buffers
    _write(folder / part_file(WEIGHTS, rank, world_size), tensors, shapes)

    # Before the first update there are no moments, and the checkpoint has no optimizer files.
    if not shards.has_moments:
        return _files_of_all_ranks(WEIGHTS)

    # The moments. The order of `shapes` is part of the file's bytes: first all exp_avg, then all exp_avg_sq.
    tensors, shapes = {}, {}
    for moment in (*MOMENTS, MOMENTUM):
        for piece in owned:
            if moment not in shards.moments_of(piece.name):
                continue
            moment_name = f"{moment}.{state.trained[piece.name]}"
            tensors[piece_name(moment_name, piece.start)] = shards.moment(piece, moment)
            shapes[moment_name] = shards.shapes[piece.name]
    # The step counts of AdamW. The rank with the beginning of a weight writes its count.
    for piece in owned:
        if piece.start == 0 and shards.moments_of(piece.name) == MOMENTS:
            tensors[f"step.{state.trained[piece.name]}"] = shards.step
    _write(folder / part_file(OPTIMIZER, rank, world_size), tensors, shapes)
    return sorted(_files_of_all_ranks(WEIGHTS) + _files_of_all_ranks(OPTIMIZER))


def _files_of_all_ranks(kind: str) -> list[str]:
    world_size = dist.get_world_size()
    return [part_file(kind, rank, world_size) for rank in range(world_size)]


def _write(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    layouts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, layouts, metadata=shapes_metadata(shapes)) as writer:
        for name in writer.order:
            writer.write(tensors[name])
            report_progress()


@torch.no_grad()
def read_checkpoint(state: ShardedState, files: Mapping[str, Path], *, optimizer: bool) -> None:
    """Reads the files of any trainer's checkpoint into this rank's pieces. After a BadSpec, everything is as it was."""
    shards = state.shards

    # Check everything before anything changes.
    checkpoint = open_checkpoint(files)
    check_shapes(checkpoint.weights.shapes(), state.shapes(), "checkpoint")
    moments = checkpoint.moments if optimizer else None
    if moments is not None:
        kind = kind_of_moments(moments.shapes())
        if kind == "adamw_8bit":
            raise BadSpec(
                "the checkpoint has the moments of adamw_8bit, which only the torch trainer has; set "
                "engine.trainer.kind='torch', or begin a new stage or run from the policy's weights"
            )
        of_muon = shards.matrices_of_muon(kind)
        trained = {state.trained[name]: shape for name, shape in shards.shapes.items() if name not in of_muon}
        momenta = {f"{MOMENTUM}.{state.trained[name]}": shards.shapes[name] for name in sorted(of_muon)}
        check_shapes(moments.shapes(), moment_shapes(trained, MOMENTS) | momenta, "optimizer's checkpoint")
        steps = {float(moments.read(f"step.{name}")) for name in trained}
        if len(steps) > 1:
            raise BadSpec(
                f"the checkpoint's weights were updated {sorted(steps)} times, and ZeRO keeps one count for all; give "
                "a checkpoint whose weights were all trained together"
            )

    # Read the weights, then create moments of zero, which the checkpoint's moments overwrite.
    fill(state, checkpoint.weights)
    shards.drop_moments()
    if moments is not None:
        # without a count, all weights are matrices of Muon, which counts no steps
        shards.create_moments(steps.pop() if steps else 0.0, kind)
        for piece in shards.pieces:
            for moment in shards.moments_of(piece.name):
                name = f"{moment}.{state.trained[piece.name]}"
                moments.read_into(name, shards.moment(piece, moment), start=piece.start)
            report_progress()


@torch.no_grad()
def fill(state: ShardedState, weights: WeightSource) -> None:
    """Reads this rank's pieces into the master weights, and copies them to the weights that compute. Every rank calls
    it."""
    # A piece is read into its place in the master weights, without a copy.
    for piece in state.shards.pieces:
        weights.read_into(piece.name, piece.of(piece.flat), start=piece.start)
        report_progress()
    for name, buffer in state.buffers.items():
        weights.read_into(name, buffer)
    state.shards.publish()


# -- digests ------------------------------------------------------------------------------------------------------


def weights_digest(state: ShardedState, *, base: str = "") -> tuple[str, dict[str, str]]:
    """The digest that the torch trainer computes of the same weights, on every rank. Each rank sums over its own
    pieces, and only the sums are exchanged. `base` is the digest of the base of an adapter."""
    return digest_of_ranks(state, _of_own_parts(state, tensor_sums), base=base)


def digest_of_ranks(state: ShardedState, sums: Mapping[str, Sums], *, base: str = "") -> tuple[str, dict[str, str]]:
    """The digest of tensors whose parts have these sums on this rank. Every rank calls it."""
    layouts = {name: (state.dtype(name), state.shape(name)) for name in sorted(state.shapes())}
    return combine_digests(_digests_of_ranks(layouts, sums, state.device), base=base)


def _digests_of_ranks(layouts: Layouts, sums: Mapping[str, Sums], device: torch.device) -> dict[str, str]:
    """The digest of each tensor, whose parts have these sums on this rank. Every rank calls it."""
    # The sum of int64 numbers wraps around as those of the digest do.
    signed = {name: of_tensor.view(np.int64) for name, of_tensor in sums.items()}
    total = _add_over_ranks(layouts, signed, np.zeros(2, dtype=np.int64), device)
    digests: dict[str, str] = {}
    for (name, (dtype, shape)), sums_of_all in zip(layouts.items(), total.view(np.uint64), strict=True):
        digests[name] = digest_of_sums(dtype, shape, sums_of_all)
    return digests


def weights_sketch(state: ShardedState) -> Sketch:
    """The sketch that the torch trainer computes of the same weights, on every rank. Each rank sketches its pieces."""
    sketches = _of_own_parts(state, tensor_sketch)
    return _add_over_ranks(sorted(state.shapes()), sketches, np.zeros(BUCKETS), state.device)


def _of_own_parts(state: ShardedState, compute: Callable[..., NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """By tensor: the sum of `compute(part, start=...)` over the parts that this rank writes."""
    sums: dict[str, NDArray[Any]] = {}
    for name, start, part in state.own_parts():
        sums[name] = sums.get(name, 0) + compute(part, start=start)
        report_progress()
    return sums


def _add_over_ranks(
    names: Iterable[str], parts: Mapping[str, NDArray[Any]], zeros: NDArray[Any], device: torch.device
) -> NDArray[Any]:
    """The sum over the ranks of the `parts` of each tensor, in the order of the names. `zeros` are those of a tensor
    without a part on this rank. Every rank calls it."""
    total = torch.from_numpy(np.array([parts.get(name, zeros) for name in names])).to(device)
    dist.all_reduce(total)
    return total.cpu().numpy()


# -- weights that the ranks send ----------------------------------------------------------------------------------


@torch.no_grad()
def hold_parts(state: ShardedState, *, dtype: torch.dtype) -> HeldParts:
    """Copies this rank's part of every exported weight, floating ones in `dtype`, and digests it. Every rank calls it.
    """
    layouts = {name: _layout(state, state.exported[name], dtype) for name in sorted(state.exported)}
    exported_names = {source: name for name, source in state.exported.items()}
    # Copy and digest.
    held: list[tuple[str, int, Tensor]] = []
    sums: dict[str, Sums] = {}
    for source, start, part in state.own_parts():
        if source in exported_names:
            name = exported_names[source]
            copy = part.detach().to(layouts[name][0], copy=True)
            held.append((name, start, copy))
            sums[name] = sums.get(name, np.zeros(2, dtype=np.uint64)) + tensor_sums(copy, start=start)
        report_progress()
    held.sort(key=lambda part: part[:2])

    # Exchange the sums, and who has which part.
    digests = _digests_of_ranks(layouts, sums, state.device)
    manifest = {name: (str(layout[0]), layout[1], digests[name]) for name, layout in layouts.items()}
    parts: dict[str, list[tuple[int, int, int]]] = {name: [] for name in layouts}
    for rank, of_rank in enumerate(gather([(name, start, len(copy)) for name, start, copy in held])):
        for name, start, length in of_rank:
            parts[name].append((rank, start, length))
    for of_tensor in parts.values():
        of_tensor.sort(key=lambda part: part[1])
    return HeldParts(manifest, parts, [(name, copy) for name, _, copy in held])


# -- model folders ------------------------------------------------------------------------------------------------


def write_folder(
    state: ShardedState, folder: Path, *, dtype: torch.dtype | None = None, file_per_rank: bool = False
) -> list[str]:
    """Writes every exported weight, floating ones in `dtype` (None: in master precision), in the layout of
    `save_pretrained`. With `file_per_rank` there is at least one file per rank. Returns the names of the files, sorted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layouts = {name: _layout(state, source, dtype) for name, source in state.exported.items()}
    # Split the tensors into files. The split depends on sizes only, so it is the same on every rank.
    total = sum(map(_nbytes, layouts.values()))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    limit = SHARD_BYTES
    if file_per_rank:
        limit = min(limit, -(-total // world_size))
    parts = _split(layouts, limit)
    names = _file_names(len(parts))

    # Each batch has one file per rank; the ranks write at the same time.
    for begin in range(0, len(parts), world_size):
        batch = parts[begin : begin + world_size]
        with ExitStack() as open_files:
            if rank < len(batch):
                own_layouts = {name: layouts[name] for name in batch[rank]}
                path = folder / names[begin + rank]
                writer = open_files.enter_context(TensorWriter(path, own_layouts, metadata={"format": "pt"}))
            # Assemble one tensor for each file in turn, so that no rank waits while another writes a whole file.
            for row in zip_longest(*batch):
                for owner, name in enumerate(row):
                    tensor = None if name is None else state.assemble(state.exported[name], on=owner)
                    if tensor is not None:
                        writer.write(tensor)
                    report_progress()

    if len(parts) > 1:
        if rank == 0:
            _write_index(folder, names, parts, total)
        names.append(INDEX)
    dist.barrier()
    return sorted(names)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _write_index(folder: Path, names: Sequence[str], parts: Sequence[Sequence[str]], total: int) -> None:
    weight_map: dict[str, str] = {}
    for file, part in zip(names, parts, strict=True):
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _layout(state: ShardedState, name: str, dtype: torch.dtype | None) -> tuple[torch.dtype, tuple[int, ...]]:
    """(dtype, shape) in which a weight is written."""
    stored = state.dtype(name)
    # Integer buffers keep their dtype.
    if dtype is not None and stored.is_floating_point:
        stored = dtype
    return stored, state.shape(name)


def _nbytes(layout: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = layout
    return prod(shape) * dtype.itemsize


def _split(layouts: Layouts, limit: int) -> list[Sequence[str]]:
    """The names of each file's tensors, in their order in the file. A file has at most `limit` bytes of tensors, unless
    a single tensor is larger."""
    parts: list[list[str]] = [[]]
    used = 0
    for name in sorted(layouts):
        nbytes = _nbytes(layouts[name])
        if parts[-1] and used + nbytes > limit:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += nbytes
    return [file_order({name: layouts[name] for name in part}) for part in parts]
