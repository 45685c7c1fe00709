"""LoRA adapters inside vLLM's workers: compares a loaded adapter with the trainer's, tensor by tensor.

vLLM copies an adapter into stacked buffers of the layers, one slot per active adapter: A unchanged, and B multiplied by
the adapter's scale. The layers compute with these slots, so the slots are what is compared.

Axes: R rank · I input of a layer · O output
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.lora import A_NAME, ADAPTER_CONFIG_FILE, ADAPTER_FILE, B_NAME, PEFT_PREFIX
from engine.backends.vllm.readback import ReadbackPlan, TensorSlot
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes


class AdapterMismatch(Exception):
    """Raised if the slots do not hold the adapter. The message names the tensor."""


def compare(
    manager: Any, model: Any, plan: ReadbackPlan, folder: Path, number: int, manifest: Mapping[str, Sequence[Any]]
) -> str:
    """Proves that the live slots of adapter `number` hold the tensors of a peft folder, and that these are the
    manifest's. Returns the digest of the slots.

    Args:
        manager: vLLM's LoRA manager.

    Raises:
        AdapterMismatch: names the first tensor that differs.
    """
    # The folder's tensors must be the trainer's.
    tensors = dict(read_tensors(folder / ADAPTER_FILE))
    _check_received(tensors, manifest)

    # Each layer of the adapter must have a live slot with the same values.
    scale = _scale(json.loads((folder / ADAPTER_CONFIG_FILE).read_text()))
    slots = {slot.tensor: slot for slot in plan.slots if slot.kind == "linear"}
    live: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for path, part, a_RI, b_OR in live_pairs(manager, model, number):
        live[path, part] = (a_RI, b_OR)
    for layer in sorted({_layer_of(name) for name in tensors}):
        slot = slots.get(f"{layer}.weight")
        if slot is None:
            raise AdapterMismatch(f"the adapter's layer {layer} is none that the live model reads back")
        path = slot.path.removesuffix(".base_layer")
        pair = live.pop((path, _part_of(slot, plan)), None)
        if pair is None:
            raise AdapterMismatch(f"{path} takes no adapter in vLLM, the trainer's is on {layer}")
        a_RI, b_OR = pair
        expected_RI = tensors[f"{PEFT_PREFIX}{layer}.{A_NAME}"][:, slot.columns[0] : slot.columns[1]].to(a_RI)
        expected_OR = tensors[f"{PEFT_PREFIX}{layer}.{B_NAME}"][slot.rows[0] : slot.rows[1]].to(b_OR) * scale
        if not _slot_equals(a_RI, expected_RI, rank_axis=0):
            raise AdapterMismatch(f"tensor {layer}.{A_NAME} is not what {path} holds in the slot of this adapter")
        if not _slot_equals(b_OR, expected_OR, rank_axis=1):
            raise AdapterMismatch(f"tensor {layer}.{B_NAME} is not what {path} holds in the slot of this adapter")

    # The slots of all other layers must be empty: a product with one zero matrix is zero.
    for (path, _), (a_RI, b_OR) in live.items():
        if a_RI.any() and b_OR.any():
            raise AdapterMismatch(f"{path} holds an adapter where the trainer has none")
    return digest(manager, model, number)


def _check_received(tensors: Mapping[str, Tensor], manifest: Mapping[str, Sequence[Any]]) -> None:
    for name in sorted(tensors.keys() | manifest.keys()):
        if name not in tensors:
            raise AdapterMismatch(f"tensor {name} did not arrive")
        if name not in manifest:
            raise AdapterMismatch(f"tensor {name} arrived, which the trainer did not write")
        dtype, shape, sha256 = manifest[name]
        tensor = tensors[name]
        if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
            raise AdapterMismatch(f"tensor {name} arrived as {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
        if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != sha256:
            raise AdapterMismatch(f"tensor {name} arrived with other bytes than the trainer's")


def digest(manager: Any, model: Any, number: int) -> str:
    """A digest of everything that the slots of this adapter hold."""
    sha256 = hashlib.sha256()
    for path, part, a_RI, b_OR in live_pairs(manager, model, number):
        sha256.update(f"{path} {part}\n".encode())
        sha256.update(tensor_bytes(a_RI))
        sha256.update(tensor_bytes(b_OR))
    return sha256.hexdigest()


def live_pairs(manager: Any, model: Any, number: int) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """(path, part of a fused layer, A, B) of each slot of the adapter. Activates the adapter if it is loaded only.

    Raises:
        AdapterMismatch: vLLM no longer has the adapter.
    """
    if number not in manager.list_adapters():
        raise AdapterMismatch("vLLM has dropped the adapter")
    manager.activate_adapter(number)
    index = manager.lora_index_to_id.index(number)
    for path, module in sorted(model.named_modules()):
        stacked_a, stacked_b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
        if stacked_a is None or stacked_b is None:
            continue
        for part, (a, b) in enumerate(zip(stacked_a, stacked_b, strict=True)):
            yield path, part, a[index, 0], b[index, 0]


def _part_of(slot: TensorSlot, plan: ReadbackPlan) -> int:
    """The index of this tensor among those that are fused in its layer."""
    starts: set[int] = set()
    for other in plan.slots:
        if other.path == slot.path and other.kind == "linear":
            starts.add(other.outputs[0])
    return sorted(starts).index(slot.outputs[0])


def _slot_equals(live: Tensor, expected: Tensor, *, rank_axis: int) -> bool:
    """Whether they are equal, and the slot is zero where it is wider than this adapter's rank."""
    rank = expected.shape[rank_axis]
    padding = live.narrow(rank_axis, rank, live.shape[rank_axis] - rank)
    return torch.equal(live.narrow(rank_axis, 0, rank), expected) and not padding.any()


def _layer_of(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).removesuffix(f".{A_NAME}").removesuffix(f".{B_NAME}")


def _scale(config: Mapping[str, Any]) -> float:
    return config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
