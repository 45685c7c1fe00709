"""Checkpoint files, read by name and range: whole tensors, or pieces of flattened tensors from many ranks.

There are two layouts, which the names in the files tell apart:

- whole: `weights.safetensors` and `optimizer.safetensors`, with one tensor per weight, as the torch trainer writes
  them. A plain Hugging Face folder is read in the same way.
- pieces: `weights-00001-of-00004.safetensors` and `optimizer-…`, one file per rank. It contains one-dimensional tensors
  `NAME@START`: the elements [START, START + length) of the flattened tensor NAME. The metadata of each file has the
  shapes of the tensors it has pieces of. A tensor without a range (`step.NAME`, a buffer) is whole.

Files are read in chunks of `CHUNK_BYTES`, so reading takes no more memory than that besides the target.
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
    """Name in a file of the piece of tensor `name` that begins at element `start`."""
    return f"{name}@{start}"


def part_file(kind: str, rank: int, world_size: int) -> str:
    """Name of a rank's file. `kind` is WEIGHTS or OPTIMIZER; ranks count from 0, files from 1."""
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def shapes_metadata(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Metadata of a file with pieces of tensors of these shapes."""
    return {SHAPES_KEY: json.dumps({name: list(shape) for name, shape in shapes.items()}, separators=(",", ":"))}


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements [start, start + length) of a flattened tensor, at byte `offset` of a file."""

    start: int
    length: int
    path: Path
    offset: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.length


class StoredTensors:
    """The tensors of some files, whole or in pieces."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises BadSpec for a file that is not a whole safetensors file, and for elements that are missing or in the
        files twice."""
        self._ranges: dict[str, list[_Range]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(paths):
            self._add(path)
        for name, ranges in self._ranges.items():
            ranges.sort(key=lambda part: part.start)
            self._check_complete(name, ranges)

    def _check_complete(self, name: str, ranges: list[_Range]) -> None:
        """Raises BadSpec unless the sorted ranges cover the tensor exactly once."""
        end = 0
        for part in ranges:
            if part.start != end:
                what = "missing" if part.start > end else "there twice"
                raise BadSpec(
                    f"checkpoint tensor {name}: elements from {min(end, part.start)} are {what} "
                    f"({part.path.name}); give all files of one checkpoint, and only those"
                )
            end = part.end
        if end != prod(self._shapes[name]):
            raise BadSpec(
                f"checkpoint tensor {name} has {prod(self._shapes[name])} elements, and the files hold {end}; "
                "give all files of the checkpoint"
            )

    def _add(self, path: Path) -> None:
        shapes_of(path)  # raises for a file that was cut short
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        # Names with a range are pieces of the tensors in the metadata; all others are whole.
        shapes = json.loads(header.pop("__metadata__", {}).get(SHAPES_KEY, "{}"))
        for key, entry in header.items():
            name, separator, start = key.rpartition("@")
            in_pieces = bool(separator) and name in shapes
            if not in_pieces:
                name, start = key, "0"
            shape = tuple(shapes[name] if in_pieces else entry["shape"])
            if self._shapes.setdefault(name, shape) != shape:
                raise BadSpec(
                    f"checkpoint tensor {name} is {self._shapes[name]} in one file and {shape} in {path.name}; "
                    "give the files of one checkpoint"
                )
            self._ranges[name].append(
                _Range(
                    start=int(start),
                    length=prod(entry["shape"]),
                    path=path,
                    offset=8 + header_bytes + entry["data_offsets"][0],
                    dtype=DTYPES_BY_CODE[entry["dtype"]],
                )
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors, sorted by name."""
        return dict(sorted(self._shapes.items()))

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        """Fills `out` with the elements of the flattened tensor from `start` on, cast to the dtype of `out`.

        `out` may be on a device. If it is not contiguous, it has to be one-dimensional."""
        flat, end = out.detach().view(-1), start + out.numel()
        for part in self._ranges[name]:
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                _read(part, first - part.start, flat[first - start : last - start])

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        tensor = torch.empty(self._shapes[name], dtype=self._ranges[name][0].dtype)
        self.read_into(name, tensor)
        return tensor


def _read(part: _Range, skip: int, out: Tensor) -> None:
    """Fills `out` with the elements of the range from element `skip` on."""
    step = CHUNK_BYTES // part.dtype.itemsize
    with open(part.path, "rb") as file:
        file.seek(part.offset + skip * part.dtype.itemsize)
        for begin in range(0, len(out), step):
            chunk = out[begin : begin + step]
            buffer = bytearray(len(chunk) * part.dtype.itemsize)
            if file.readinto(buffer) != len(buffer):
                raise BadSpec(f"{part.path.name} ends in the middle of a tensor; give the whole file")
            chunk.copy_(torch.frombuffer(buffer, dtype=part.dtype))


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint's tensors. `moments` contains `step.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`; it is None for a
    checkpoint from before the first update."""

    weights: StoredTensors
    moments: StoredTensors | None


def open_checkpoint(files: Mapping[str, Path]) -> CheckpointFiles:
    """Opens the files, by name, that `write_checkpoint` of any trainer returned.

    Raises:
        BadSpec: no weights among them, a file that was cut short, or a set of files that is not one whole checkpoint.
    """
    # A file is named weights.safetensors, or weights-00001-of-00004.safetensors if it has pieces.
    kinds: dict[str, list[Path]] = {WEIGHTS: [], OPTIMIZER: []}
    for name, path in files.items():
        for kind, paths in kinds.items():
            if name == f"{kind}.safetensors" or (name.startswith(f"{kind}-") and name.endswith(".safetensors")):
                paths.append(path)
    if not kinds[WEIGHTS]:
        raise BadSpec(f"no weights among the checkpoint's files {sorted(files)}; expected {WEIGHTS}*.safetensors")
    moments = StoredTensors(kinds[OPTIMIZER]) if kinds[OPTIMIZER] else None
    return CheckpointFiles(StoredTensors(kinds[WEIGHTS]), moments)


def moment_shapes(trained: Mapping[str, tuple[int, ...]], moments: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in an optimizer's checkpoint, for trained tensors of the shapes `trained`."""
    shapes: dict[str, tuple[int, ...]] = {f"step.{name}": () for name in trained}
    for moment in moments:
        shapes |= {f"{moment}.{name}": shape for name, shape in trained.items()}
    return shapes
