"""Reads weights back out of vLLM's live layers, whatever it packed, fused or prepacked, and compares them bit by bit.

A linear layer fed the unit vector e_c answers W[:, c]: 1 * w plus zeros is w in every precision. So the layer's own
kernel, on the operands it will decode with, says what it holds, where its parameters have been packed away. Embeddings
are looked up; norms and biases are compared as they are. A rank of a tensor-parallel group reads its own shard.

Signed zeros and subnormal numbers count as zero: sums lose the sign, and some bfloat16 kernels flush the latter.

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

CHUNK = 256
"""Unit vectors fed at once."""

Picks = dict[str, list[int]]
"""By slot key: global column (linear) or row (embedding) numbers of the tensor."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one rank holds one Hugging Face tensor, or its shard of it. Ranges are [start, stop)."""

    tensor: str
    path: str
    """The live module, by its name in the model."""
    kind: Literal["linear", "embedding", "vector"]
    out: tuple[int, int]
    """Outputs of the layer (linear), elements of the live vector, that are this tensor's."""
    rows: tuple[int, int]
    """Rows of the tensor that this rank holds."""
    columns: tuple[int, int] = (0, 0)
    """Columns of the tensor that this rank holds; of vectors none."""
    leaf: str = "weight"

    @property
    def key(self) -> str:
        return f"{self.path}|{self.tensor}|{self.kind}"

    @property
    def choices(self) -> tuple[int, int]:
        return self.columns if self.kind == "linear" else self.rows if self.kind == "embedding" else (0, 0)

    def cut(self, tensor: Tensor, picks: Sequence[int]) -> Tensor:
        """What reading this slot must give: (P, O) of a linear layer, (P, I) of an embedding, (O,) of a vector."""
        if self.kind == "vector":
            return tensor[self.rows[0] : self.rows[1]].clone()
        chosen = torch.as_tensor(list(picks), device=tensor.device, dtype=torch.long)
        if self.kind == "embedding":
            return tensor.index_select(0, chosen)
        return tensor[self.rows[0] : self.rows[1]].index_select(1, chosen).T.contiguous()


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every tensor lives; `unread` are those whose layer does not answer with its weights."""

    slots: list[Slot]
    unread: dict[str, str]
    """Tensor -> why."""
    untouched: list[str]
    """Live parameters that no tensor fills."""


def plan_of(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Plan:
    """For tensors of these names and shapes, under the names of a Hugging Face checkpoint."""
    modules = dict(model.named_modules())
    slots: list[Slot] = []
    unread: dict[str, str] = {}
    for name, shape in shapes.items():
        found, why = _place(model, modules, name, shape)
        slots += found
        if not found:
            unread[name] = why
    filled = {f"{slot.path}.{slot.leaf}" for slot in slots}
    filled |= {live for name in unread for live in _live_names(model, modules, name)}
    untouched = [
        name
        for name, parameter in model.named_parameters()
        if name not in filled and ".lora_" not in name and (parameter.numel() > 0 or name.endswith(".weight"))
    ]
    return Plan(slots, unread, untouched + _half_filled(modules, slots))


def _half_filled(modules: dict[str, nn.Module], slots: Iterable[Slot]) -> list[str]:
    """Fused layers that are given some of their parts and not all. Embeddings and heads are padded: not they."""
    from vllm.model_executor.layers.linear import LinearBase

    given: dict[str, int] = {}
    for slot in slots:
        if slot.kind == "linear" and isinstance(modules[slot.path], LinearBase):
            given[slot.path] = given.get(slot.path, 0) + slot.out[1] - slot.out[0]
    layers: dict[str, Any] = {path: modules[path] for path in given}
    whole = {path: getattr(layer, "output_size_per_partition", layer.output_size) for path, layer in layers.items()}
    return [f"{path}.weight" for path, outputs in given.items() if outputs < whole[path]]


def _live_names(model: nn.Module, modules: dict[str, nn.Module], name: str) -> list[str]:
    prefix, _, leaf = _renamed(model, name).rpartition(".")
    return [f"{path}.{leaf}" for path, _ in _candidates(model, modules, prefix)]


def _renamed(model: nn.Module, name: str) -> str:
    """The checkpoint's name as the model's own modules spell it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "get_rename_mapper", None)
    if rename is None:
        return name
    names = rename().apply_list([name])
    return names[0] if names else name


def _candidates(
    model: nn.Module, modules: dict[str, nn.Module], prefix: str
) -> Iterator[tuple[str, int | None]]:
    """(module path, part of a fused layer or None) that the tensor of module `prefix` may live in."""
    if prefix in modules:
        yield _unwrapped(modules, prefix), None
    parent, _, last = prefix.rpartition(".")
    for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        path = f"{parent}.{fused}"
        if last in parts and last != fused and path in modules:
            yield _unwrapped(modules, path), parts.index(last)


def _unwrapped(modules: dict[str, nn.Module], path: str) -> str:
    return f"{path}.base_layer" if f"{path}.base_layer" in modules else path


def _place(
    model: nn.Module, modules: dict[str, nn.Module], name: str, shape: tuple[int, ...]
) -> tuple[list[Slot], str]:
    prefix, _, leaf = _renamed(model, name).rpartition(".")
    why = "no live module of that name"
    for path, part in _candidates(model, modules, prefix):
        found, why = _slots(modules[path], path, name, leaf, shape, part)
        if found:
            return found + _tied(model, modules, found[0]), ""
    return [], why


def _tied(model: nn.Module, modules: dict[str, nn.Module], embedding: Slot) -> list[Slot]:
    """The language head that shares the embedding; where the model uses the embedding itself, that."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if embedding.kind != "embedding" or not getattr(model.config, "tie_word_embeddings", False):
        return []
    heads = [path for path, module in modules.items() if isinstance(module, ParallelLMHead)] or [embedding.path]
    width: Any = modules[embedding.path].embedding_dim
    out = (0, embedding.rows[1] - embedding.rows[0])
    return [Slot(embedding.tensor, path, "linear", out, embedding.rows, (0, width)) for path in heads]


def _slots(
    layer: Any, path: str, name: str, leaf: str, shape: tuple[int, ...], part: int | None
) -> tuple[list[Slot], str]:
    """The slot of one tensor in one live layer, or why there is none."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    if isinstance(layer, VocabParallelEmbedding):
        if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod) or leaf != "weight":
            return [], f"{type(layer.quant_method).__name__} does not answer with its weights"
        shard = layer.shard_indices
        rows = (shard.org_vocab_start_index, shard.org_vocab_end_index)
        kind: Literal["linear", "embedding"] = "linear" if isinstance(layer, ParallelLMHead) else "embedding"
        return [Slot(name, path, kind, (0, rows[1] - rows[0]), rows, (0, layer.embedding_dim))], ""
    if isinstance(layer, LinearBase):
        if not isinstance(layer.quant_method, UnquantizedLinearMethod) or leaf not in ("weight", "bias"):
            return [], f"{type(layer.quant_method).__name__} does not answer with its weights"
        ranges = _shard(layer, shape, part)
        if ranges is None:
            return [], f"{type(layer).__name__} splits it over {layer.tp_size} ranks in a way that is not known here"
        out, rows, columns = ranges
        if leaf == "bias":
            return [Slot(name, path, "vector", out, rows, leaf="bias")], ""
        return [Slot(name, path, "linear", out, rows, columns)], ""
    live = getattr(layer, leaf, None)
    if part is None and isinstance(live, Tensor) and tuple(live.shape) == shape and len(shape) == 1:
        return [Slot(name, path, "vector", (0, shape[0]), (0, shape[0]), leaf=leaf)], ""
    return [], f"{type(layer).__name__} is of no kind that is read here"


def _shard(
    layer: Any, shape: tuple[int, ...], part: int | None
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """(outputs of the layer, rows, columns of the tensor) of this rank; None where the split is not known."""
    from vllm.model_executor.layers import linear as kinds

    rank, ranks = layer.tp_rank, layer.tp_size
    width = shape[1] if len(shape) > 1 else 0
    whole = ((0, shape[0]), (0, shape[0]), (0, width))
    if isinstance(layer, kinds.RowParallelLinear):
        size = layer.input_size_per_partition
        return whole[0], whole[1], (rank * size, (rank + 1) * size) if width else (0, 0)
    if part is None:
        if ranks == 1 or isinstance(layer, kinds.ReplicatedLinear):
            return whole
        if type(layer) is not kinds.ColumnParallelLinear:
            return None
        size = layer.output_size_per_partition
        return (0, size), (rank * size, (rank + 1) * size), (0, width)
    if isinstance(layer, kinds.QKVParallelLinear):
        sizes = [
            layer.num_heads * layer.head_size,
            layer.num_kv_heads * layer.head_size,
            layer.num_kv_heads * layer.v_head_size,
        ]
        own = rank if part == 0 else rank // layer.num_kv_head_replicas
    elif isinstance(layer, kinds.MergedColumnParallelLinear):
        sizes, own = [size // ranks for size in layer.output_sizes], rank
    else:
        return None
    start = sum(sizes[:part])
    size = sizes[part]
    return (start, start + size), (own * size, (own + 1) * size), (0, width)


# -- picking ------------------------------------------------------------------------------------------------------


def fingerprints(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Sums of the bit patterns by column and by row, modulo 2^32: tells which of them changed since the last load."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        return None
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return bits.sum(0, dtype=torch.int32).cpu(), bits.sum(1, dtype=torch.int32).cpu()


def pick(
    slot: Slot,
    now: tuple[Tensor, Tensor] | None,
    before: tuple[Tensor, Tensor] | None,
    rng: random.Random,
    *,
    count: int,
) -> list[int]:
    """Columns (rows of an embedding) to read: half of them among those that this load changed, so that a tensor which
    was not applied cannot pass, however few of its values changed; the others anywhere."""
    start, stop = slot.choices
    if stop - start <= count:
        return list(range(start, stop))
    chosen: set[int] = set()
    if now is not None and before is not None:
        axis = 0 if slot.kind == "linear" else 1
        changed = (now[axis][start:stop] != before[axis][start:stop]).nonzero().flatten().tolist()
        chosen.update(start + c for c in rng.sample(changed, min(len(changed), count // 2)))
    while len(chosen) < count:
        chosen.add(rng.randrange(start, stop))
    return sorted(chosen)


# -- reading ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def read(model: nn.Module, slots: Iterable[Slot], picks: Picks) -> Iterator[tuple[Slot, Tensor]]:
    """What the live layers hold at these picks, in the shapes of `Slot.cut`. Slots of one layer share one call."""
    modules = dict(model.named_modules())
    by_layer: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.kind == "vector":
            yield slot, getattr(modules[slot.path], slot.leaf)[slot.out[0] : slot.out[1]].detach().clone()
        elif slot.kind == "embedding":
            yield slot, _looked_up(modules[slot.path], slot, picks[slot.key])
        else:
            by_layer.setdefault(slot.path, []).append(slot)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with _exact_products():
        for path, shared in by_layer.items():
            columns = [c - slot.columns[0] for slot in shared for c in picks[slot.key]]
            outputs_PO = _outputs(modules[path], columns, shared[0], dtype)
            start = 0
            for slot in shared:
                stop = start + len(picks[slot.key])
                yield slot, outputs_PO[start:stop, slot.out[0] : slot.out[1]]
                start = stop


def _looked_up(layer: Any, slot: Slot, rows: Sequence[int]) -> Tensor:
    ids = torch.as_tensor([row - slot.rows[0] for row in rows], device=layer.weight.device, dtype=torch.long)
    return layer.quant_method.embedding(layer, ids)


def _outputs(layer: Any, columns: Sequence[int], slot: Slot, dtype: torch.dtype) -> Tensor:
    """(P, O): the layer's own product with one unit vector per column; no bias, no gathering over ranks."""
    width = slot.columns[1] - slot.columns[0]
    weight = layer.weight
    parts = []
    for start in range(0, len(columns), CHUNK):
        chunk = torch.as_tensor(list(columns[start : start + CHUNK]), device=weight.device, dtype=torch.long)
        units_PI = torch.zeros(len(chunk), width, device=weight.device, dtype=dtype)
        units_PI.scatter_(1, chunk.unsqueeze(1), 1.0)
        parts.append(layer.quant_method.apply(layer, units_PI))
    return torch.cat(parts)


@contextmanager
def _exact_products() -> Iterator[None]:
    """TF32 would round the weights that are read; only float32 on CUDA has it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def first_difference(slot: Slot, live: Tensor, cut: Tensor, picks: Sequence[int]) -> str | None:
    """None, or where the live weights differ from the received ones."""
    wanted = cut.to(live.device, live.dtype) if live.is_floating_point() else cut.to(live.device)
    if live.shape != wanted.shape:
        return f"{slot.path} answers in the shape {tuple(live.shape)}, expected {tuple(wanted.shape)}"
    if torch.equal(live, wanted):
        return None
    if live.is_floating_point():
        tiny = torch.finfo(live.dtype).tiny
        live, wanted = live.masked_fill(live.abs() < tiny, 0), wanted.masked_fill(wanted.abs() < tiny, 0)
    wrong = (live != wanted).nonzero()
    if not len(wrong):
        return None
    at = wrong[0].tolist()
    where = f"element {at[0]}" if slot.kind == "vector" else (
        f"{'column' if slot.kind == 'linear' else 'row'} {picks[at[0]]}, place {at[1]}"
    )
    return (
        f"{slot.path} holds {live[tuple(at)].item():.9g} at {where}, received was {wanted[tuple(at)].item():.9g} "
        f"({len(wrong)} of {live.numel()} values read differ)"
    )


def digest(tensor: Tensor) -> str:
    """Equal for what `first_difference` calls equal."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0)
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
