"""Safetensors files, written and read one tensor at a time, so that at most one tensor is in memory besides the model;
and folders in which they travel from one process to another.

The bytes are those of `safetensors.torch.save_file`, and any safetensors reader opens them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import (
    CONFIG_FILE,
    SUFFIX,
    ModelFolder,
    dtype_of_config,
    folder_parameter_count,
    read_config,
)
from storage.errors import CorruptArtifact, StorageFull
from storage.temporary import process_folder

REOPEN_BYTES = 64 << 20
"""A reader maps the file into memory. After this many bytes it maps it again, so that the pages that were read are
released."""

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
"""Order of the dtypes in a file: wide elements first, so that each tensor is aligned. Within a dtype, tensors are
sorted by name."""

MASTER_DTYPE = "float32"
"""The type in which trainers keep, and export, their weights."""
MIN_CHECKED_BYTES = 2
"""Element size in bytes from which tensors are checked. torch cannot find NaN in narrower floating-point types, which
quantized weights use."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SHARED_MEMORY = Path("/dev/shm")
SPARE = 1.25
"""Free space that is required, as a multiple of the bytes to be staged: other processes stage there too."""


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], *, floating: torch.dtype | None = None) -> None:
    """Writes the tensors, floating ones cast to `floating` if it is given. Equal names and values give equal bytes, in
    whatever order they come. A cast copy is released once it is written.

    Raises:
        BadSpec: a name comes twice, or the format does not have a tensor's dtype.
    """
    # Collect the tensors first, because the header comes before their bytes.
    by_name = dict[str, Tensor]()
    layouts = dict[str, tuple[torch.dtype, tuple[int, ...]]]()
    for name, tensor in tensors:
        dtype = tensor.dtype
        if floating is not None and tensor.is_floating_point():
            dtype = floating
        if name in by_name:
            raise BadSpec(f"tensor {name!r} is given twice; give each name once")
        if dtype not in _DTYPES:
            raise BadSpec(f"tensor {name!r} is of {dtype}, which safetensors files lack; cast it first")
        by_name[name], layouts[name] = tensor, (dtype, tuple(tensor.shape))
    # Write them one by one, so that at most one cast copy exists.
    with TensorWriter(path, layouts) as writer:
        for name in writer.order:
            writer.write(by_name[name])


Layouts = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""(dtype, shape) of each tensor by name."""


def file_order(layouts: Layouts) -> list[str]:
    """The names in the order in which a file has their bytes."""
    return sorted(layouts, key=lambda name: (_RANK[_DTYPES[layouts[name][0]]], name))


class TensorWriter:
    """Writes a file whose tensors are given one after another, in `order`. It keeps none of them."""

    def __init__(self, path: Path, layouts: Layouts, *, metadata: Mapping[str, str] | None = None) -> None:
        """Writes the header of a file with these tensors."""
        self.order = file_order(layouts)
        self._layouts, self._written = layouts, 0
        # The header lists the tensors in the order of their bytes.
        header, end = dict[str, object](), 0
        if metadata:
            header["__metadata__"] = dict(metadata)
        for name in self.order:
            dtype, shape = layouts[name]
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Pad the header, so that the first tensor is aligned to 8 bytes.
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """Writes the next tensor of `order`, cast to the dtype in the header."""
        name = self.order[self._written]
        dtype, shape = self._layouts[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} was announced with the shape {shape} and has {tuple(tensor.shape)}")
        self._file.write(tensor_bytes(tensor.detach().to(dtype)))
        self._written += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None and self._written != len(self.order):
            raise ValueError(f"{len(self.order)} tensors were announced and {self._written} were written")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order. They are copied only if the tensor is not contiguous or not on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the file, on the CPU, in the file's order. A tensor is a view of the file: copy what you
    keep.

    Raises:
        BadSpec: not a whole safetensors file.
    """
    # Open the file again after REOPEN_BYTES, which releases the memory of the pages that were read.
    names = list(shapes_of(path))
    while names:
        nbytes = 0
        with safe_open(path, framework="pt") as file:
            while names and nbytes < REOPEN_BYTES:
                tensor = file.get_tensor(names[0])
                nbytes += tensor.numel() * tensor.element_size()
                yield names.pop(0), tensor
                del tensor


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the file's order. No tensor is read. Raises BadSpec if it is not a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise BadSpec(f"{path.name} is not a whole safetensors file: {error}") from error


def shapes_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the order of the (name, tensor) pairs."""
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def check_shapes(actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises BadSpec unless the shapes of `source` are those of the model. The message names the first tensor, in the
    order of the names, that is missing, unknown or of another shape."""
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise BadSpec(
                f"the {source} does not fit the model: first differing tensor {name}, in the {source} "
                f"{actual.get(name, 'missing')}, in the model {expected.get(name, 'missing')}"
            )


@torch.no_grad()
def read_into(path: Path, target_of: Callable[[str], Tensor]) -> None:
    """Copies every tensor of the file into the tensor that `target_of` returns for its name."""
    for name, tensor in read_tensors(path):
        target_of(name).copy_(tensor)


def cast_model(files: Mapping[str, Path], folder: Path, dtype: str) -> dict[str, Path]:
    """Returns the files of a model folder, by name, with floating tensors of `dtype` and a config that says so. Files
    that change are written into `folder`. None change if the config says so already."""
    if dtype_of_config(read_config(files[CONFIG_FILE])) == dtype:
        return dict(files)
    folder.mkdir(parents=True, exist_ok=True)
    target: torch.dtype = getattr(torch, dtype)
    cast = dict(files)
    nbytes = 0
    for name, path in files.items():
        if not name.endswith(SUFFIX):
            continue
        layouts = {}
        for tensor_name, tensor in read_tensors(path):
            tensor_dtype = target if tensor.is_floating_point() else tensor.dtype
            layouts[tensor_name] = (tensor_dtype, tuple(tensor.shape))
            nbytes += tensor.numel() * tensor_dtype.itemsize
        cast[name] = folder / name
        with TensorWriter(cast[name], layouts, metadata={"format": "pt"}) as writer, safe_open(path, "pt") as file:
            for tensor_name in writer.order:
                writer.write(file.get_tensor(tensor_name))
    for name, path in files.items():
        if name == CONFIG_FILE or name.endswith(f"{SUFFIX}.index.json"):
            cast[name] = folder / name
            body = json.loads(path.read_text(encoding="utf-8"))
            cast[name].write_text(json.dumps(_with_dtype(body, dtype, nbytes), indent=2) + "\n", encoding="utf-8")
    return cast


def _with_dtype(body: dict[str, Any], dtype: str, nbytes: int) -> dict[str, Any]:
    """A config, or the index of the weight files, of the same model in another type."""
    if "weight_map" in body:
        return body | {"metadata": body.get("metadata", {}) | {"total_size": nbytes}}
    changed = {}
    for name, value in body.items():
        if isinstance(value, dict) and ("dtype" in value or name == "text_config"):
            value = value | {"dtype": dtype}
        changed[name] = value
    changed.pop("torch_dtype", None)
    return changed | {"dtype": dtype}


def checked_parameter_count(folder: ModelFolder) -> int:
    """Counts the elements of the folder's weights and checks that all of them are finite.

    Raises BadModelFolder for an incomplete file, and for a tensor that holds NaN or infinity."""
    try:
        count = folder_parameter_count(folder.files)
        for name in sorted(folder.files):
            if name.endswith(SUFFIX):
                _check_finite(folder, name)
    except (BadSpec, CorruptArtifact) as error:
        raise BadModelFolder(f"{folder.path} does not load: {error}") from error
    return count


def _check_finite(folder: ModelFolder, name: str) -> None:
    for tensor_name, tensor in read_tensors(folder.files[name]):
        if not tensor.is_floating_point() or tensor.element_size() < MIN_CHECKED_BYTES:
            continue
        finite = torch.isfinite(tensor)
        if not finite.all():
            value = "NaN" if tensor.isnan().any() else "infinity"
            raise BadModelFolder(
                f"{folder.path / name}: the tensor {tensor_name} holds {value} in {int((~finite).sum())} of its "
                f"{tensor.numel()} elements; export the model again from a checkpoint whose weights are finite"
            )


@contextlib.contextmanager
def staging_folder(nbytes: int, *, inside: Path | None = None) -> Iterator[Path]:
    """A new folder for `nbytes` of files, deleted afterwards. It is created inside `inside` if that is given, else in
    shared memory if there is room, else in the system's folder for temporary files.

    Raises StorageFull if the space is gone before the files are written, because other processes took it.
    """
    parent = inside or process_folder(SHARED_MEMORY if _has_room(SHARED_MEMORY, nbytes) else None)
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=parent))
    try:
        yield folder
    except OSError as error:
        if error.errno in DISK_FULL:
            raise StorageFull(f"no space for {nbytes} bytes of weights in {folder.parent}") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path, nbytes: int) -> bool:
    try:
        return shutil.disk_usage(folder).free >= SPARE * nbytes
    except OSError:  # this machine has no such file system
        return False


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Writes `folder` with config, tokenizer and dequantised bfloat16 safetensors. The folder appears whole or not at
    all.

    Raises:
        BadModelFolder: `gguf` is not a file.
    """
    if not gguf.is_file():
        raise BadModelFolder(f"{gguf} is not a file; give a GGUF file")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Without `dequantize` the model loads, but refuses to be saved (transformers 5.19).
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.config._name_or_path = ""  # the config would contain a path of this machine
    # Write under another name first, so that a folder of this name is always complete.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
