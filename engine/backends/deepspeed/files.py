"""Checkpoints and model folders, written by all ranks at once, a tensor at a time.

A checkpoint is written without the ranks talking: each its own pieces (engine.backends.weight_files.pieces has the
layout). A folder of whole tensors is gathered, each file on the rank that writes it, so that a rank holds one tensor
more than it did before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.deepspeed.meta_model import WeightSource
from engine.backends.deepspeed.shards import MOMENTS, Shards
from engine.backends.weight_files.digests import combine_digests, digest_tensor
from engine.backends.weight_files.pieces import (
    OPTIMIZER,
    WEIGHTS,
    moment_shapes,
    open_checkpoint,
    part_file,
    piece_name,
    shapes_metadata,
)
from engine.backends.weight_files.tensor_files import TensorWriter, check_shapes, file_order
from engine.cluster.rank_progress import report_progress
from engine.errors import BadSpec

SHARD_BYTES = 5_000_000_000
"""Largest file of a model folder, unless one tensor alone is larger: what `save_pretrained` does."""


@dataclass(frozen=True, slots=True)
class State:
    """What a model's files hold."""

    shards: Shards
    buffers: Mapping[str, Tensor]
    """Persistent ones, equal on every rank."""
    exported: Mapping[str, str]
    """Names that `save_pretrained` gives -> names here."""
    trained: Mapping[str, str]
    """Names here -> those of the moments, as `named_parameters` gives them: a tied head is the embedding there."""
    device: torch.device
    master_dtype: torch.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.buffers[name].shape) if name in self.buffers else self.shards.shapes[name]

    def assemble(self, name: str, *, on: int) -> Tensor | None:
        """On rank `on`, the whole tensor; every rank calls it."""
        if name in self.buffers:
            return self.buffers[name] if dist.get_rank() == on else None
        return self.shards.assemble(name, on=on, device=self.device)


# -- checkpoints --------------------------------------------------------------------------------------------------


def write_checkpoint(state: State, folder: Path) -> list[str]:
    """This rank's files; returns those of all ranks, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, rank, world_size = state.shards, dist.get_rank(), dist.get_world_size()
    owned = shards.owned()
    weights = {piece_name(piece.name, piece.start): piece.of(piece.flat) for piece in owned}
    shapes = {piece.name: shards.shapes[piece.name] for piece in owned}
    whole = dict(state.buffers) if rank == 0 else {}
    _write(folder / part_file(WEIGHTS, rank, world_size), weights | whole, shapes)
    if shards.has_moments:
        moments = {
            piece_name(f"{moment}.{state.trained[piece.name]}", piece.start): shards.moment(piece, moment)
            for piece in owned
            for moment in MOMENTS
        }
        steps = {f"step.{state.trained[piece.name]}": shards.step for piece in owned if piece.start == 0}
        of_moments = {f"{moment}.{state.trained[name]}": shape for name, shape in shapes.items() for moment in MOMENTS}
        _write(folder / part_file(OPTIMIZER, rank, world_size), moments | steps, of_moments)
    kinds = [WEIGHTS, OPTIMIZER] if shards.has_moments else [WEIGHTS]
    return sorted(part_file(kind, rank, world_size) for kind in kinds for rank in range(world_size))


def _write(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    layouts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, layouts, metadata=shapes_metadata(shapes)) as writer:
        for name in writer.order:
            writer.write(tensors[name])
            report_progress()


@torch.no_grad()
def read_checkpoint(state: State, files: Mapping[str, Path], *, optimizer: bool) -> None:
    """Into this rank's pieces, whoever wrote the files. BadSpec leaves everything as it was."""
    shards = state.shards
    given = open_checkpoint(files)
    shapes = {**shards.shapes, **{name: tuple(buffer.shape) for name, buffer in state.buffers.items()}}
    check_shapes(given.weights.shapes(), shapes, "checkpoint")
    moments = given.moments if optimizer else None
    if moments is not None:
        trained = {state.trained[name]: shape for name, shape in shards.shapes.items()}
        check_shapes(moments.shapes(), moment_shapes(trained, MOMENTS), "optimizer's checkpoint")
        steps = {float(moments.read(f"step.{name}")) for name in trained}
        if len(steps) > 1:
            raise BadSpec(f"the checkpoint's weights were updated {sorted(steps)} times; ZeRO keeps one count for all")
    fill(state, given.weights)
    shards.forget_moments()
    if moments is not None:
        shards.make_moments(steps.pop())
        for piece in shards.pieces:
            for moment in MOMENTS:
                key = f"{moment}.{state.trained[piece.name]}"
                moments.read_into(key, shards.moment(piece, moment), start=piece.start)
            report_progress()


@torch.no_grad()
def fill(state: State, weights: WeightSource) -> None:
    """Reads this rank's pieces, no more, and brings the weights that compute to them. Every rank calls it."""
    for piece in state.shards.pieces:
        weights.read_into(piece.name, piece.of(piece.flat), start=piece.start)
        report_progress()
    for name, buffer in state.buffers.items():
        weights.read_into(name, buffer)
    state.shards.publish()


# -- digests ------------------------------------------------------------------------------------------------------


def weights_digest(state: State) -> tuple[str, dict[str, str]]:
    """The torch trainer's digest of the same weights, on every rank; the ranks share the hashing."""
    mine = {}
    names = sorted([*state.shards.shapes, *state.buffers])
    for index, name in enumerate(names):
        tensor = state.assemble(name, on=index % dist.get_world_size())
        if tensor is not None:
            mine[name] = digest_tensor(tensor)
        report_progress()
    gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    found = {name: digest for part in gathered for name, digest in part.items()}
    return combine_digests({name: found[name] for name in names})


# -- model folders ------------------------------------------------------------------------------------------------


def write_folder(state: State, folder: Path, *, dtype: torch.dtype | None = None, spread: bool = False) -> list[str]:
    """Every exported weight, floating ones in `dtype` (None: in master precision), as `save_pretrained` lays them out.
    With `spread` there is a file for every rank at least. Returns the files' names, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    layouts = {name: (_dtype_of(state, own, dtype), state.shape(own)) for name, own in state.exported.items()}
    total = sum(_nbytes(layout) for layout in layouts.values())
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parts = _split(layouts, min(SHARD_BYTES, -(-total // world_size)) if spread else SHARD_BYTES)
    names = [
        "model.safetensors" if len(parts) == 1 else f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        for index in range(1, len(parts) + 1)
    ]
    for begin in range(0, len(parts), world_size):
        batch = parts[begin : begin + world_size]
        with ExitStack() as open_files:
            if rank < len(batch):
                mine = {name: layouts[name] for name in batch[rank]}
                path = folder / names[begin + rank]
                writer = open_files.enter_context(TensorWriter(path, mine, metadata={"format": "pt"}))
            for row in zip_longest(*batch):  # turn about, so that the ranks write at the same time
                for owner, name in enumerate(row):
                    tensor = None if name is None else state.assemble(state.exported[name], on=owner)
                    if tensor is not None:
                        writer.write(tensor)
                    report_progress()
    if len(parts) > 1:
        names.append("model.safetensors.index.json")
        if rank == 0:
            weight_map = {name: file for file, part in zip(names, parts, strict=False) for name in part}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / names[-1]).write_text(json.dumps(index, indent=2) + "\n")
    dist.barrier()
    return sorted(names)


def _dtype_of(state: State, own: str, dtype: torch.dtype | None) -> torch.dtype:
    stored = state.buffers[own].dtype if own in state.buffers else state.master_dtype
    return dtype if dtype is not None and stored.is_floating_point else stored


def _nbytes(layout: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return prod(layout[1]) * layout[0].itemsize


def _split(layouts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], most: int) -> list[Sequence[str]]:
    """The names of each file, in their order there."""
    parts: list[list[str]] = [[]]
    used = 0
    for name in sorted(layouts):
        size = _nbytes(layouts[name])
        if parts[-1] and used + size > most:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    return [file_order({name: layouts[name] for name in part}) for part in parts]


def sorted_paths(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    return {name: folder / name for name in sorted(names)}
