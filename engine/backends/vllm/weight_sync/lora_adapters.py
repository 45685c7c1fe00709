"""LoRA adapters inside vLLM's workers: hot-loaded, compared with the trainer's, read back out of the live slots.

vLLM copies an adapter into stacked buffers of the layers, one slot per active adapter, A as it is and B times the
adapter's scale. What the layers compute with is these slots, so it is these that are compared.

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
from engine.backends.vllm.weight_sync.readback import Plan, Slot
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes


class NotTheAdapter(Exception):
    """The slots do not hold what they should; the text says which tensor."""


def compare(
    manager: Any, model: Any, plan: Plan, folder: Path, number: int, manifest: Mapping[str, Sequence[Any]]
) -> str:
    """Proves that the live slots of adapter `number` hold the folder's tensors, and these are the manifest's. Returns
    the digest of the slots.

    Raises:
        NotTheAdapter: names the first tensor that differs.
    """
    tensors = dict(read_tensors(folder / ADAPTER_FILE))
    _check_received(tensors, manifest)
    scale = _scale(json.loads((folder / ADAPTER_CONFIG_FILE).read_text()))
    slots = {slot.tensor: slot for slot in plan.slots if slot.kind == "linear"}
    live = {(path, part): (a, b) for path, part, a, b in live_pairs(manager, model, number)}
    for layer in sorted({_layer(name) for name in tensors}):
        slot = slots.get(f"{layer}.weight")
        if slot is None:
            raise NotTheAdapter(f"the adapter's layer {layer} is none that the live model reads back")
        path = slot.path.removesuffix(".base_layer")
        pair = live.pop((path, _part(slot, plan)), None)
        if pair is None:
            raise NotTheAdapter(f"{path} takes no adapter in vLLM, the trainer's is on {layer}")
        a_RI, b_OR = pair
        wanted_RI = tensors[f"{PEFT_PREFIX}{layer}.{A_NAME}"][:, slot.columns[0] : slot.columns[1]].to(a_RI)
        wanted_OR = tensors[f"{PEFT_PREFIX}{layer}.{B_NAME}"][slot.rows[0] : slot.rows[1]].to(b_OR) * scale
        for name, found, wanted in ((A_NAME, a_RI, wanted_RI), (B_NAME, b_OR, wanted_OR)):
            if not _holds(found, wanted, padded=0 if name == A_NAME else 1):
                raise NotTheAdapter(f"tensor {layer}.{name} is not what {path} holds in the slot of this adapter")
    for (path, _), (a_RI, b_OR) in live.items():
        if a_RI.any() and b_OR.any():
            raise NotTheAdapter(f"{path} holds an adapter where the trainer has none")
    return digest(manager, model, number)


def _check_received(tensors: Mapping[str, Tensor], manifest: Mapping[str, Sequence[Any]]) -> None:
    for name in sorted(tensors.keys() | manifest.keys()):
        if name not in tensors or name not in manifest:
            what = "did not arrive" if name not in tensors else "arrived, which the trainer did not write"
            raise NotTheAdapter(f"tensor {name} {what}")
        dtype, shape, sha256 = manifest[name]
        tensor = tensors[name]
        if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
            raise NotTheAdapter(f"tensor {name} arrived as {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
        if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != sha256:
            raise NotTheAdapter(f"tensor {name} arrived with other bytes than the trainer's")


def digest(manager: Any, model: Any, number: int) -> str:
    """Of everything that the slots of this adapter hold."""
    whole = hashlib.sha256()
    for path, part, a_RI, b_OR in live_pairs(manager, model, number):
        whole.update(f"{path} {part}\n".encode())
        whole.update(tensor_bytes(a_RI))
        whole.update(tensor_bytes(b_OR))
    return whole.hexdigest()


def live_pairs(manager: Any, model: Any, number: int) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """(path, part of a fused layer, A, B) of the slot that the adapter computes in; activates it if it is held only.

    Raises:
        NotTheAdapter: vLLM does not have it any more.
    """
    if number not in manager.list_adapters():
        raise NotTheAdapter("vLLM has dropped the adapter")
    manager.activate_adapter(number)
    index = manager.lora_index_to_id.index(number)
    for path, module in sorted(model.named_modules()):
        stacked_a, stacked_b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
        if stacked_a is None or stacked_b is None:
            continue
        for part, (a, b) in enumerate(zip(stacked_a, stacked_b, strict=True)):
            yield path, part, a[index, 0], b[index, 0]


def _part(slot: Slot, plan: Plan) -> int:
    """Which of the tensors fused in its layer this one is."""
    starts = sorted({s.out[0] for s in plan.slots if s.path == slot.path and s.kind == "linear"})
    return starts.index(slot.out[0])


def _holds(found: Tensor, wanted: Tensor, *, padded: int) -> bool:
    """Equal, and zero where the slot is wider than this adapter's rank."""
    rank = wanted.shape[padded]
    return torch.equal(found.narrow(padded, 0, rank), wanted) and not found.narrow(
        padded, rank, found.shape[padded] - rank
    ).any()


def _layer(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).removesuffix(f".{A_NAME}").removesuffix(f".{B_NAME}")


def _scale(config: Mapping[str, Any]) -> float:
    return config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
