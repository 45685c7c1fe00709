"""Checkpoint files, read by name and range whoever wrote them: whole tensors, or pieces of flat ones from many ranks.

Two layouts, told apart by the names in the files:

- whole: `weights.safetensors` and `optimizer.safetensors`, a tensor per weight, as the torch trainer writes them. A
  plain Hugging Face folder is read the same way.
- pieces: `weights-00001-of-00004.safetensors`, `optimizer-…`: one file per rank, in it one-dimensional tensors
  `NAME@START`, the elements [START, START + length) of the flattened tensor. The metadata of each file has the shapes
  of its names. A tensor without a range (`step.NAME`, a buffer) is whole.

Files are read in place: memory beyond what is read into stays at `CHUNK_BYTES`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.weight_files.tensor_files import DTYPES_BY_CODE, shapes_of
from engine.errors import BadSpec

WEIGHTS, OPTIMIZER = "weights", "optimizer"
SHAPES_KEY = "shapes"
CHUNK_BYTES = 16 << 20


def piece_name(name: str, start: int) -> str:
    return f"{name}@{start}"


def part_file(kind: str, rank: int, world_size: int) -> str:
    """`kind` is WEIGHTS or OPTIMIZER; ranks count from 0, files from 1."""
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def shapes_metadata(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    return {SHAPES_KEY: json.dumps({name: list(shape) for name, shape in shapes.items()}, separators=(",", ":"))}


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, start + length) of a flattened tensor, at `at` of a file."""

    start: int
    length: int
    path: Path
    at: int
    dtype: torch.dtype


class StoredTensors:
    """The tensors of some files, whole or in pieces."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises BadSpec on what is no whole safetensors file, on a gap, and on elements that are there twice."""
        self._ranges: dict[str, list[_Range]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(paths):
            self._add(path)
        for name, ranges in self._ranges.items():
            ranges.sort(key=lambda one: one.start)
            end = 0
            for one in ranges:
                if one.start != end:
                    what = "missing" if one.start > end else "there twice"
                    raise BadSpec(
                        f"checkpoint tensor {name}: elements from {min(end, one.start)} are {what} "
                        f"({one.path.name}); give all files of one checkpoint, and only those"
                    )
                end += one.length
            if end != prod(self._shapes[name]):
                raise BadSpec(
                    f"checkpoint tensor {name} has {prod(self._shapes[name])} elements, and the files hold {end}; "
                    "give all files of the checkpoint"
                )

    def _add(self, path: Path) -> None:
        shapes_of(path)  # refuses what is torn
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        shapes = json.loads(header.pop("__metadata__", {}).get(SHAPES_KEY, "{}"))
        for key, entry in header.items():
            name, separator, start = key.rpartition("@")
            in_pieces = bool(separator) and name in shapes
            name = name if in_pieces else key
            shape = tuple(shapes[name] if in_pieces else entry["shape"])
            if self._shapes.setdefault(name, shape) != shape:
                raise BadSpec(
                    f"checkpoint tensor {name} is {self._shapes[name]} in one file and {shape} in {path.name}; "
                    "give the files of one checkpoint"
                )
            self._ranges[name].append(
                _Range(
                    start=int(start) if in_pieces else 0,
                    length=prod(entry["shape"]),
                    path=path,
                    at=8 + header_bytes + entry["data_offsets"][0],
                    dtype=DTYPES_BY_CODE[entry["dtype"]],
                )
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors, by name."""
        return dict(sorted(self._shapes.items()))

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        """Fills `out` with the elements of the flattened tensor from `start` on, cast to its dtype. `out` may be on a
        device; if it is not contiguous, it is one-dimensional."""
        flat, end = out.detach().view(-1), start + out.numel()
        for one in self._ranges[name]:
            first, last = max(start, one.start), min(end, one.start + one.length)
            if first < last:
                _read(one, first - one.start, flat[first - start : last - start])

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        made = torch.empty(self._shapes[name], dtype=self._ranges[name][0].dtype)
        self.read_into(name, made)
        return made


def _read(one: _Range, skip: int, out: Tensor) -> None:
    step = CHUNK_BYTES // one.dtype.itemsize
    with open(one.path, "rb") as file:
        file.seek(one.at + skip * one.dtype.itemsize)
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            buffer = bytearray(len(part) * one.dtype.itemsize)
            if file.readinto(buffer) != len(buffer):
                raise BadSpec(f"{one.path.name} ended in the middle of a tensor")
            part.copy_(torch.frombuffer(buffer, dtype=one.dtype))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`moments` has `step.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`; None before a trainer's first update."""

    weights: StoredTensors
    moments: StoredTensors | None


def open_checkpoint(files: Mapping[str, Path]) -> Checkpoint:
    """`files` by name, as `write_checkpoint` of any trainer returned them.

    Raises:
        BadSpec: no weights among them, a torn file, or a set that is not one whole checkpoint.
    """
    kinds: dict[str, list[Path]] = {WEIGHTS: [], OPTIMIZER: []}
    for name, path in files.items():
        for kind, paths in kinds.items():
            if name == f"{kind}.safetensors" or (name.startswith(f"{kind}-") and name.endswith(".safetensors")):
                paths.append(path)
    if not kinds[WEIGHTS]:
        raise BadSpec(f"no weights among the checkpoint's files {sorted(files)}; expected {WEIGHTS}*.safetensors")
    moments = StoredTensors(kinds[OPTIMIZER]) if kinds[OPTIMIZER] else None
    return Checkpoint(StoredTensors(kinds[WEIGHTS]), moments)


def moment_shapes(trained: Mapping[str, tuple[int, ...]], moments: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """What an optimizer's checkpoint holds for trained tensors of these shapes."""
    shapes = {f"{moment}.{name}": shape for moment in moments for name, shape in trained.items()}
    return shapes | {f"step.{name}": () for name in trained}
