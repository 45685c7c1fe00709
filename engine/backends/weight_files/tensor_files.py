"""Safetensors files written and read one tensor at a time: memory beyond the model itself stays at one tensor.

The bytes are those of `safetensors.torch.save_file`; any safetensors reader opens them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import BadSpec

REOPEN_BYTES = 64 << 20
"""A reader maps the file; after this much it maps anew, so that what was read leaves the process."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(["I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"])}
"""The order in a file: wide elements first, so that each tensor is aligned; then by name."""


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, Tensor]], *, floating: torch.dtype | None = None
) -> None:
    """Writes the tensors as they are now, floating ones in `floating` if it is given. Equal names and values give equal
    bytes, in whatever order they come. A cast tensor lives as long as it is written.

    Raises:
        BadSpec: a name twice, or a dtype that the format lacks.
    """
    named = dict[str, Tensor]()
    dtypes = dict[str, torch.dtype]()
    for name, tensor in tensors:
        dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        if name in named or dtype not in _DTYPES:
            what = "is given twice" if name in named else f"is of {dtype}, which safetensors files lack"
            raise BadSpec(f"tensor {name!r} {what}")
        named[name], dtypes[name] = tensor, dtype
    with TensorWriter(path, {name: (dtypes[name], tuple(named[name].shape)) for name in named}) as writer:
        for name in writer.order:
            writer.write(named[name])


Layouts = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""(dtype, shape) by name."""


def file_order(layouts: Layouts) -> list[str]:
    """The names in the order of their bytes in a file."""
    return sorted(layouts, key=lambda name: (_RANK[_DTYPES[layouts[name][0]]], name))


class TensorWriter:
    """A file whose tensors come one after another, in `order`, and are not held."""

    def __init__(self, path: Path, layouts: Layouts, *, metadata: Mapping[str, str] | None = None) -> None:
        self.order = file_order(layouts)
        self._layouts, self._written = layouts, 0
        header, end = dict[str, object](), 0
        if metadata:
            header["__metadata__"] = dict(metadata)
        for name in self.order:
            dtype, shape = layouts[name]
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """The next of `order`, cast to the dtype that it was announced with."""
        dtype, shape = self._layouts[self.order[self._written]]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.order[self._written]} was announced as {shape} and is {tuple(tensor.shape)}")
        self._file.write(tensor_bytes(tensor.detach().to(dtype)))
        self._written += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None and self._written != len(self.order):
            raise ValueError(f"{len(self.order)} tensors were announced and {self._written} written")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order; copied only where the tensor is not contiguous or not on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, on the CPU, in the file's order. A tensor is a view of the file: copy what is kept.

    Raises:
        BadSpec: not a whole safetensors file.
    """
    names = list(shapes_of(path))
    while names:
        taken = 0
        with safe_open(path, framework="pt") as file:
            while names and taken < REOPEN_BYTES:
                tensor = file.get_tensor(names[0])
                taken += tensor.numel() * tensor.element_size()
                yield names.pop(0), tensor
                del tensor


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the file's order, without reading a tensor. Raises BadSpec on what is no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise BadSpec(f"{path.name} is not a whole safetensors file: {error}") from error


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises BadSpec naming the first tensor (by name) that is missing, unknown or of another shape."""
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise BadSpec(
                f"the {what} does not fit the model: first differing tensor {name}, in the file "
                f"{found.get(name, 'missing')}, in the model {expected.get(name, 'missing')}"
            )


@torch.no_grad()
def read_into(path: Path, place_of: Callable[[str], Tensor]) -> None:
    """Copies every tensor of the file into the tensor that `place_of` gives for its name."""
    for name, tensor in read_tensors(path):
        place_of(name).copy_(tensor)
