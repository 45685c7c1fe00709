"""Reads weights back from vLLM's live layers, also if vLLM has packed or fused them, and compares them bit by bit.

The output of a linear layer for the unit vector e_c is W[:, c], exactly in every precision, since it is 1 * w plus
zeros. The layer's own kernel therefore shows the weights that it decodes with, wherever they are stored. Embeddings are
looked up. Norms and biases are compared directly. A rank of a tensor-parallel group reads its own shard.

Signed zeros and subnormal numbers count as zero: sums lose the sign, and some bfloat16 kernels flush subnormals.

Axes: P pick (an input column of a linear layer, a row of an embedding) · O output of a layer · I input of a layer
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.backends.weight_files.tensor_files import tensor_bytes

UNIT_VECTORS = 256
"""Unit vectors in one forward pass of a layer."""

Picks = dict[str, list[int]]
"""By slot key: the columns (of a linear layer) or rows (of an embedding) of the tensor that are read."""
Range = tuple[int, int]
"""(start, stop), stop excluded."""
Fingerprints = tuple[Tensor, Tensor]
"""Checksums of a matrix: (by column, by row)."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one rank holds one Hugging Face tensor, or its shard of the tensor."""

    tensor: str
    """Name of the tensor in the checkpoint."""
    path: str
    """Name of the live module in the model."""
    kind: Literal["linear", "embedding", "vector"]
    outputs: Range
    """The outputs of the linear layer, or elements of the live vector, that belong to this tensor."""
    rows: Range
    """Rows of the tensor that this rank holds."""
    columns: Range = (0, 0)
    """Columns of the tensor that this rank holds; (0, 0) for vectors."""
    leaf: str = "weight"
    """Name of the parameter in its module."""

    @property
    def key(self) -> str:
        return f"{self.path}|{self.tensor}|{self.kind}"

    @property
    def pick_range(self) -> Range:
        """The columns (of a linear layer) or rows (of an embedding) that can be picked; (0, 0) for vectors."""
        if self.kind == "linear":
            return self.columns
        return self.rows if self.kind == "embedding" else (0, 0)

    def expected_values(self, tensor: Tensor, picks: Sequence[int]) -> Tensor:
        """The values that reading this slot must give: (P, O) for a linear layer, (P, I) for an embedding, (O,) for a
        vector."""
        if self.kind == "vector":
            return tensor[self.rows[0] : self.rows[1]].clone()
        indices = torch.as_tensor(list(picks), device=tensor.device, dtype=torch.long)
        if self.kind == "embedding":
            return tensor.index_select(0, indices)
        return tensor[self.rows[0] : self.rows[1]].index_select(1, indices).T.contiguous()


@dataclass(frozen=True, slots=True)
class ReadbackPlan:
    """Where each tensor of a model is held."""

    slots: list[TensorSlot]
    unread: dict[str, str]
    """Tensors that cannot be read back, with the reason."""
    unfilled: list[str]
    """Live parameters that no tensor fills."""


def plan_readback(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> ReadbackPlan:
    """Finds the slots of tensors. `shapes`: their shapes, by their names in a Hugging Face checkpoint."""
    modules = dict(model.named_modules())
    # The slots of each tensor, or the reason why it cannot be read back.
    slots: list[TensorSlot] = []
    unread: dict[str, str] = {}
    for name, shape in shapes.items():
        tensor_slots, reason = _slots_of_tensor(model, modules, name, shape)
        slots += tensor_slots
        if not tensor_slots:
            unread[name] = reason
    # The live parameters that no tensor fills keep random values, so the caller must refuse them.
    filled = {f"{slot.path}.{slot.leaf}" for slot in slots}
    for name in unread:
        filled.update(_live_names(model, modules, name))
    unfilled = []
    for name, parameter in model.named_parameters():
        is_used = parameter.numel() > 0 or name.endswith(".weight")
        if name not in filled and ".lora_" not in name and is_used:
            unfilled.append(name)
    return ReadbackPlan(slots, unread, unfilled + _partly_filled(modules, slots))


def _partly_filled(modules: dict[str, nn.Module], slots: Iterable[TensorSlot]) -> list[str]:
    """Fused layers of which some parts have a tensor and others do not. Embeddings and heads are left out, because they
    are padded."""
    from vllm.model_executor.layers.linear import LinearBase

    filled_outputs: dict[str, int] = {}
    for slot in slots:
        if slot.kind == "linear" and isinstance(modules[slot.path], LinearBase):
            filled_outputs[slot.path] = filled_outputs.get(slot.path, 0) + slot.outputs[1] - slot.outputs[0]
    partly_filled = []
    for path, outputs in filled_outputs.items():
        layer: Any = modules[path]
        if outputs < getattr(layer, "output_size_per_partition", layer.output_size):
            partly_filled.append(f"{path}.weight")
    return partly_filled


def _live_names(model: nn.Module, modules: dict[str, nn.Module], name: str) -> list[str]:
    """Names of the live parameters that may hold a tensor."""
    prefix, _, leaf = _model_name(model, name).rpartition(".")
    return [f"{path}.{leaf}" for path, _ in _candidates(model, modules, prefix)]


def _model_name(model: nn.Module, name: str) -> str:
    """Converts a tensor's name in the checkpoint to its name in the model."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "get_rename_mapper", None)
    if rename is None:
        return name
    names = rename().apply_list([name])
    return names[0] if names else name


def _candidates(model: nn.Module, modules: dict[str, nn.Module], prefix: str) -> Iterator[tuple[str, int | None]]:
    """Yields (module path, part of a fused layer or None) where the tensor of module `prefix` may be held."""
    if prefix in modules:
        yield _base_layer_path(modules, prefix), None
    parent, _, last = prefix.rpartition(".")
    for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        path = f"{parent}.{fused}"
        if last in parts and last != fused and path in modules:
            yield _base_layer_path(modules, path), parts.index(last)


def _base_layer_path(modules: dict[str, nn.Module], path: str) -> str:
    """The path of the layer inside vLLM's LoRA wrapper, if there is one."""
    return f"{path}.base_layer" if f"{path}.base_layer" in modules else path


def _slots_of_tensor(
    model: nn.Module, modules: dict[str, nn.Module], name: str, shape: tuple[int, ...]
) -> tuple[list[TensorSlot], str]:
    """(slots of one tensor, ""), or ([], the reason why there are none)."""
    prefix, _, leaf = _model_name(model, name).rpartition(".")
    reason = "no live module of that name"
    for path, part in _candidates(model, modules, prefix):
        slots, reason = _slots_in_layer(modules[path], path, name, leaf, shape, part)
        if slots:
            return slots + _tied_head_slots(model, modules, slots[0]), ""
    return [], reason


def _tied_head_slots(model: nn.Module, modules: dict[str, nn.Module], embedding: TensorSlot) -> list[TensorSlot]:
    """The slot of the language head that shares the embedding's tensor. If the model has no separate head module, the
    embedding itself is the head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if embedding.kind != "embedding" or not getattr(model.config, "tie_word_embeddings", False):
        return []
    heads = [path for path, module in modules.items() if isinstance(module, ParallelLMHead)]
    if not heads:
        heads = [embedding.path]
    width: Any = modules[embedding.path].embedding_dim
    outputs = (0, embedding.rows[1] - embedding.rows[0])
    return [TensorSlot(embedding.tensor, path, "linear", outputs, embedding.rows, (0, width)) for path in heads]


def _slots_in_layer(
    layer: Any, path: str, name: str, leaf: str, shape: tuple[int, ...], part: int | None
) -> tuple[list[TensorSlot], str]:
    """([the slot of one tensor in one live layer], ""), or ([], the reason why there is none)."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    # Embeddings and language heads.
    if isinstance(layer, VocabParallelEmbedding):
        if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod) or leaf != "weight":
            return [], f"{type(layer.quant_method).__name__} does not allow a read-back"
        shard = layer.shard_indices
        rows = (shard.org_vocab_start_index, shard.org_vocab_end_index)
        kind: Literal["linear", "embedding"] = "linear" if isinstance(layer, ParallelLMHead) else "embedding"
        return [TensorSlot(name, path, kind, (0, rows[1] - rows[0]), rows, (0, layer.embedding_dim))], ""
    # Linear layers, fused ones included.
    if isinstance(layer, LinearBase):
        if not isinstance(layer.quant_method, UnquantizedLinearMethod) or leaf not in ("weight", "bias"):
            return [], f"{type(layer.quant_method).__name__} does not allow a read-back"
        ranges = _shard_ranges(layer, shape, part)
        if ranges is None:
            return [], f"{type(layer).__name__} splits it over {layer.tp_size} ranks in an unknown way"
        outputs, rows, columns = ranges
        if leaf == "bias":
            return [TensorSlot(name, path, "vector", outputs, rows, leaf="bias")], ""
        return [TensorSlot(name, path, "linear", outputs, rows, columns)], ""
    # Norms and other vectors.
    live = getattr(layer, leaf, None)
    if part is None and isinstance(live, Tensor) and tuple(live.shape) == shape and len(shape) == 1:
        return [TensorSlot(name, path, "vector", (0, shape[0]), (0, shape[0]), leaf=leaf)], ""
    return [], f"layers of type {type(layer).__name__} are not read back"


def _shard_ranges(layer: Any, shape: tuple[int, ...], part: int | None) -> tuple[Range, Range, Range] | None:
    """(outputs of the layer, rows of the tensor, columns of the tensor) of this rank; None if the split is unknown."""
    from vllm.model_executor.layers import linear

    rank, ranks = layer.tp_rank, layer.tp_size
    width = shape[1] if len(shape) > 1 else 0
    unsplit = ((0, shape[0]), (0, shape[0]), (0, width))
    # A row-parallel layer splits the columns.
    if isinstance(layer, linear.RowParallelLinear):
        size = layer.input_size_per_partition
        return unsplit[0], unsplit[1], (rank * size, (rank + 1) * size) if width else (0, 0)
    # A column-parallel layer that is not fused splits the rows.
    if part is None:
        if ranks == 1 or isinstance(layer, linear.ReplicatedLinear):
            return unsplit
        if type(layer) is not linear.ColumnParallelLinear:
            return None
        size = layer.output_size_per_partition
        return (0, size), (rank * size, (rank + 1) * size), (0, width)
    # A fused layer holds the rank's shards of its parts one after the other.
    if isinstance(layer, linear.QKVParallelLinear):
        sizes = [
            layer.num_heads * layer.head_size,
            layer.num_kv_heads * layer.head_size,
            layer.num_kv_heads * layer.v_head_size,
        ]
        shard = rank if part == 0 else rank // layer.num_kv_head_replicas
    elif isinstance(layer, linear.MergedColumnParallelLinear):
        sizes, shard = [size // ranks for size in layer.output_sizes], rank
    else:
        return None
    start = sum(sizes[:part])
    size = sizes[part]
    return (start, start + size), (shard * size, (shard + 1) * size), (0, width)


# -- picking ------------------------------------------------------------------------------------------------------


def fingerprints(tensor: Tensor) -> Fingerprints | None:
    """Sums of the bit patterns by column and by row, modulo 2^32. They show which columns and rows changed since the
    last load. None for anything but a floating-point matrix."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        return None
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return bits.sum(0, dtype=torch.int32).cpu(), bits.sum(1, dtype=torch.int32).cpu()


def pick(
    slot: TensorSlot, current: Fingerprints | None, previous: Fingerprints | None, rng: random.Random, *, count: int
) -> list[int]:
    """Chooses `count` columns (rows of an embedding) to read.

    Half of them are among those that this load changed, so that a tensor that was not applied cannot pass, even if only
    a few of its values changed. The others are random.
    """
    start, stop = slot.pick_range
    if stop - start <= count:
        return list(range(start, stop))
    picks: set[int] = set()
    if current is not None and previous is not None:
        axis = 0 if slot.kind == "linear" else 1
        changed = (current[axis][start:stop] != previous[axis][start:stop]).nonzero().flatten().tolist()
        picks.update(start + index for index in rng.sample(changed, min(len(changed), count // 2)))
    while len(picks) < count:
        picks.add(rng.randrange(start, stop))
    return sorted(picks)


# -- reading ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def read_slots(model: nn.Module, slots: Iterable[TensorSlot], picks: Picks) -> Iterator[tuple[TensorSlot, Tensor]]:
    """Yields the values of the live layers at these picks, in the shapes of `TensorSlot.expected_values`."""
    # Read vectors and embeddings at once. Group the linear slots, so that those of one layer share its calls.
    modules = dict(model.named_modules())
    slots_by_layer: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        if slot.kind == "vector":
            vector = getattr(modules[slot.path], slot.leaf)
            yield slot, vector[slot.outputs[0] : slot.outputs[1]].detach().clone()
        elif slot.kind == "embedding":
            yield slot, _embedding_rows(modules[slot.path], slot, picks[slot.key])
        else:
            slots_by_layer.setdefault(slot.path, []).append(slot)

    # Read the linear layers, with one product for all slots of a layer.
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    with _exact_products():
        for path, layer_slots in slots_by_layer.items():
            columns: list[int] = []
            for slot in layer_slots:
                columns += [column - slot.columns[0] for column in picks[slot.key]]
            outputs_PO = _linear_columns(modules[path], columns, layer_slots[0], dtype)
            start = 0
            for slot in layer_slots:
                stop = start + len(picks[slot.key])
                yield slot, outputs_PO[start:stop, slot.outputs[0] : slot.outputs[1]]
                start = stop


def _embedding_rows(layer: Any, slot: TensorSlot, rows: Sequence[int]) -> Tensor:
    """(P, I): the layer's own lookup of these rows."""
    ids = torch.as_tensor([row - slot.rows[0] for row in rows], device=layer.weight.device, dtype=torch.long)
    return layer.quant_method.embedding(layer, ids)


def _linear_columns(layer: Any, columns: Sequence[int], slot: TensorSlot, dtype: torch.dtype) -> Tensor:
    """(P, O): the layer's own product with one unit vector per column, without the bias and without communication."""
    width = slot.columns[1] - slot.columns[0]
    weight = layer.weight
    outputs = []
    for start in range(0, len(columns), UNIT_VECTORS):
        chunk = torch.as_tensor(list(columns[start : start + UNIT_VECTORS]), device=weight.device, dtype=torch.long)
        units_PI = torch.zeros(len(chunk), width, device=weight.device, dtype=dtype)
        units_PI.scatter_(1, chunk.unsqueeze(1), 1.0)
        outputs.append(layer.quant_method.apply(layer, units_PI))
    return torch.cat(outputs)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Disables TF32, which would round the weights that are read. Only float32 on CUDA uses it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def first_difference(slot: TensorSlot, live: Tensor, received: Tensor, picks: Sequence[int]) -> str | None:
    """Describes the first difference between the live and the received values; None if they are equal."""
    expected = received.to(live.device, live.dtype) if live.is_floating_point() else received.to(live.device)
    if live.shape != expected.shape:
        return f"{slot.path} has values of shape {tuple(live.shape)}, expected {tuple(expected.shape)}"
    if torch.equal(live, expected):
        return None
    # Signed zeros and subnormal numbers count as zero.
    if live.is_floating_point():
        tiny = torch.finfo(live.dtype).tiny
        live, expected = live.masked_fill(live.abs() < tiny, 0), expected.masked_fill(expected.abs() < tiny, 0)
    differences = (live != expected).nonzero()
    if not len(differences):
        return None
    # Describe the first one.
    index = differences[0].tolist()
    if slot.kind == "vector":
        position = f"element {index[0]}"
    elif slot.kind == "linear":
        position = f"column {picks[index[0]]}, row {slot.rows[0] + index[1]}"
    else:
        position = f"row {picks[index[0]]}, column {index[1]}"
    live_value, expected_value = live[tuple(index)].item(), expected[tuple(index)].item()
    return (
        f"{slot.path} holds {live_value:.9g} at {position}, received was {expected_value:.9g} "
        f"({len(differences)} of {live.numel()} values read differ)"
    )


def digest(tensor: Tensor) -> str:
    """A digest that is equal for tensors that `first_difference` considers equal."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0)
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
