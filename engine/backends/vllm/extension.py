"""The class that runs inside vLLM's workers (`worker_extension_cls`): it loads weights, proves them, and checks later
that they are unchanged.

It works in the same way in this process, in the workers of a tensor-parallel group, and in a server that calls it by
/collective_rpc. Arguments and replies are therefore plain data, and an error is part of the reply (`error`), because a
transport could convert an exception. The only exception is a tensor that is passed inside one process.

A load has these steps. Every tensor is digested and compared with the trainer's manifest on its way to vLLM. vLLM loads
the tensors. A tied head is tied again. Slices of every live layer are read back and compared with the received tensors
(see `readback`). The digests of these slices are kept, so that `ostinato_check` can prove later, at the cost of a few
tokens, that the weights are still the same.

vLLM copies a LoRA adapter into stacked buffers of the layers, one slot per active adapter: A unchanged, and B
multiplied by the adapter's scale. The layers compute with these slots, so the slots are compared with the trainer's.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.replicas.broadcast import (
    BroadcastAborted,
    BroadcastGroup,
    GroupMember,
    Parts,
    device_info,
    receive,
)
from engine.backends.torch.lora import A_NAME, ADAPTER_CONFIG_FILE, ADAPTER_FILE, B_NAME, PEFT_PREFIX
from engine.backends.vllm import readback
from engine.backends.vllm.readback import ReadbackPlan, TensorSlot
from engine.backends.weight_files.digests import digest_tensor
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes
from engine.errors import BadSpec

PICKS_PER_LOAD = 8
"""Columns or rows that a load reads back per tensor."""
PICKS_PER_CHECK = 2
"""How many of these `ostinato_check` reads again, unless all are requested."""

Reply = dict[str, Any]
"""Reply to a remote call. All replies have "rank", "worker_id" and "error" (None without an error)."""


class WeightsMismatch(Exception):
    """Raised if the weights are not the expected ones. The message names the tensor."""


@dataclass(slots=True)
class _ProvenWeights:
    """The weights that this worker was proven to hold."""

    state: str
    plan: readback.ReadbackPlan
    picks: readback.Picks
    digests: dict[str, str]
    """By slot: digest of the values that were read back."""
    check_digests: dict[str, str]
    """By slot: digest of the values of the first `PICKS_PER_CHECK` picks only."""


@dataclass(slots=True)
class _TensorReceiver:
    """Compares the tensors of one load with the manifest while they pass, and keeps slices for the read-back."""

    manifest: Mapping[str, Sequence[Any]]
    plan: readback.ReadbackPlan
    rng: random.Random
    previous_fingerprints: Mapping[str, tuple[Tensor, Tensor]]
    """Of the tensors of the previous load, by name."""
    full: bool
    """Whether every column is read back."""
    received: set[str] = field(default_factory=set)
    fingerprints: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    picks: readback.Picks = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    """By slot: the values that the read-back must give."""
    complete: bool = False
    """Whether all tensors have passed."""
    seconds: float = 0.0
    """Time spent on comparisons."""

    def pass_on(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors. Raises WeightsMismatch at the first that differs from the manifest."""
        slots_by_tensor: dict[str, list[readback.TensorSlot]] = {}
        for slot in self.plan.slots:
            slots_by_tensor.setdefault(slot.tensor, []).append(slot)

        for name, tensor in tensors:
            started = time.perf_counter()
            self._compare(name, tensor)
            fingerprints = readback.fingerprints(tensor)
            if fingerprints is not None:
                self.fingerprints[name] = fingerprints
            # Choose what is read back of this tensor, and keep the expected values.
            for slot in slots_by_tensor.get(name, ()):
                count = slot.pick_range[1] - slot.pick_range[0] if self.full else PICKS_PER_LOAD
                previous = self.previous_fingerprints.get(name)
                picks = readback.pick(slot, fingerprints, previous, self.rng, count=count)
                self.picks[slot.key], self.expected[slot.key] = picks, slot.expected_values(tensor, picks)
            self.seconds += time.perf_counter() - started
            yield name, tensor

        missing = sorted(self.manifest.keys() - self.received)
        if missing:
            raise WeightsMismatch(
                f"tensor {missing[0]} did not arrive ({len(missing)} of {len(self.manifest)} are missing)"
            )
        self.complete = True

    def _compare(self, name: str, tensor: Tensor) -> None:
        if name in self.received:
            raise WeightsMismatch(f"tensor {name} arrived twice")
        if name not in self.manifest:
            raise WeightsMismatch(f"tensor {name} arrived, which the trainer did not stage")
        self.received.add(name)
        dtype, shape, expected_digest = self.manifest[name]
        if str(tensor.dtype) != dtype or tuple(tensor.shape) != tuple(shape):
            raise WeightsMismatch(
                f"tensor {name} arrived as {tensor.dtype} {tuple(tensor.shape)}, the trainer staged {dtype} "
                f"{tuple(shape)}"
            )
        digest = digest_tensor(tensor)
        if digest != expected_digest:
            raise WeightsMismatch(
                f"tensor {name} arrived with other bytes: digest {digest[:12]}…, staged {expected_digest[:12]}…"
            )


class Extension:
    """Methods that are mixed into vLLM's worker class, whose attributes (`model_runner`, `rank`, `reload_weights`, ...)
    they use. vLLM refuses an extension that has an attribute of the same name as its worker class."""

    model_runner: Any
    rank: int

    # -- weights ----------------------------------------------------------------------------------------------

    def ostinato_load(
        self,
        source: Sequence[str] | Mapping[str, Tensor] | str,
        manifest: Mapping[str, Sequence[Any]],
        state: str,
        full: bool = False,
        parts: Parts | None = None,
    ) -> Reply:
        """Loads the weights of `state` and proves them.

        Args:
            source: paths of safetensors files, the tensors themselves, or the name of a broadcast group.
            full: read back every column instead of a sample.
            parts: which member of the group sends which part.
        """
        started = time.perf_counter()
        self._ostinato_proven: _ProvenWeights | None = None
        model = self.model_runner.get_model()
        try:
            # Every live parameter needs a tensor.
            plan = readback.plan_readback(model, {name: tuple(entry[1]) for name, entry in manifest.items()})
            if plan.unfilled:
                raise WeightsMismatch(f"the trainer staged no tensor for the live parameter {plan.unfilled[0]}")
            # Load, and compare each tensor with the manifest on its way to vLLM.
            rng = random.Random(f"{self._worker_id()} {state}")
            previous_fingerprints = getattr(self, "_ostinato_fingerprints", {})
            receiver = _TensorReceiver(manifest, plan, rng, previous_fingerprints, full)
            self.ostinato_apply(receiver.pass_on(self._tensors(source, manifest, parts)))
            if not receiver.complete:
                raise WeightsMismatch("vLLM did not take every tensor")
            self.ostinato_retie(self.model_runner.get_model())
            loaded = time.perf_counter()
            # Read the live layers back.
            values, proven = self._read_back(plan, receiver, state)
        except (WeightsMismatch, BadSpec, BroadcastAborted) as error:
            return self._load_failed(source, str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's loaders, which raise anything
            return self._load_failed(source, f"vLLM did not load the weights: {type(error).__name__}: {error}")
        self._ostinato_fingerprints, self._ostinato_proven = receiver.fingerprints, proven
        ended = time.perf_counter()
        seconds = {"receive": receiver.seconds, "load": loaded - started - receiver.seconds, "readback": ended - loaded}
        return self._reply(state=state, tensors=len(manifest), values=values, unread=plan.unread, seconds=seconds)

    def _load_failed(self, source: Any, error: str) -> Reply:
        if isinstance(source, str):
            self._leave_group(f"rank {self.rank}: {error}")
        return self._reply(error=error, broken=not self._finish_reload())

    def _tensors(
        self,
        source: Sequence[str] | Mapping[str, Tensor] | str,
        manifest: Mapping[str, Sequence[Any]],
        parts: Parts | None,
    ) -> Iterator[tuple[str, Tensor]]:
        if isinstance(source, Mapping):
            yield from source.items()
        elif isinstance(source, str):
            member = self._member()
            if member is None or member.group.name != source:
                raise WeightsMismatch(f"it is no member of group {source}, whose broadcast it should receive")
            yield from receive(member, manifest, parts)
        else:
            for path in source:
                yield from read_tensors(Path(path))

    def ostinato_apply(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Loads the tensors with vLLM's own layerwise reload."""
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]

    @staticmethod
    def ostinato_retie(model: nn.Module) -> None:
        """Ties the language head to the embedding again. On the CPU a tied head has a prepacked copy of the embedding,
        which vLLM's reload does not update."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        heads: list[Any] = []
        embeddings: list[Any] = []
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                heads.append(module)
            elif isinstance(module, VocabParallelEmbedding):
                embeddings.append(module)
        if not getattr(model.config, "tie_word_embeddings", False) or not embeddings:
            return
        for head in heads:
            head.weight = embeddings[0].weight
            head.quant_method.process_weights_after_loading(head)

    def _finish_reload(self) -> bool:
        """Finishes a reload that was interrupted, because vLLM would refuse the next one otherwise. Layers that got no
        weights are restored. Returns False if this fails too; the process must be replaced then."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

        try:
            with set_current_vllm_config(self.model_runner.vllm_config):
                model = self.model_runner.get_model()
                finalize_layerwise_processing(model, self.model_runner.vllm_config.model_config)
        except Exception:  # noqa: BLE001 - the same boundary; the caller reports it as "broken"
            return False
        return True

    def _read_back(
        self, plan: readback.ReadbackPlan, receiver: _TensorReceiver, state: str
    ) -> tuple[int, _ProvenWeights]:
        """(number of values read, proof). Raises WeightsMismatch if a live layer differs from the received tensors."""
        values, proven = 0, _ProvenWeights(state, plan, receiver.picks, {}, {})
        for slot, live in readback.read_slots(self.model_runner.get_model(), plan.slots, receiver.picks):
            picks = receiver.picks[slot.key]
            difference = readback.first_difference(slot, live, receiver.expected[slot.key], picks)
            if difference:
                raise WeightsMismatch(f"tensor {slot.tensor} is not what the live model computes with: {difference}")
            values += live.numel()
            # A vector has no picks and is always compared as a whole.
            checked = live[: len(_check_picks(picks))] if picks else live
            proven.digests[slot.key] = readback.digest(live)
            proven.check_digests[slot.key] = readback.digest(checked)
        return values, proven

    def ostinato_check(self, state: str, full: bool = False) -> Reply:
        """Checks that the live weights are still those that were loaded as `state`. `full`: reads all slices again."""
        proven: _ProvenWeights | None = getattr(self, "_ostinato_proven", None)
        if proven is None or proven.state != state:
            present = proven.state if proven else "no proven weights"
            return self._reply(error=f"it holds {present}, expected {state}")
        try:
            picks, digests = proven.picks, proven.digests
            if not full:
                picks = {key: _check_picks(slot_picks) for key, slot_picks in proven.picks.items()}
                digests = proven.check_digests
            for slot, live in readback.read_slots(self.model_runner.get_model(), proven.plan.slots, picks):
                if readback.digest(live) != digests[slot.key]:
                    raise WeightsMismatch(f"tensor {slot.tensor} changed in {slot.path} since {state} was loaded")
        except WeightsMismatch as error:
            self._ostinato_proven = None
            return self._reply(error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's layers: what they raise after a bad reload
            self._ostinato_proven = None
            return self._reply(error=f"the live layers no longer answer: {type(error).__name__}: {error}")
        return self._reply(state=state)

    # -- broadcasts -------------------------------------------------------------------------------------------

    def ostinato_device(self) -> Reply:
        """Describes the device of this worker, which decides the backend of a broadcast group."""
        return self._reply(device_info=dict(device_info(self._device())))

    def ostinato_join_group(self, group: Mapping[str, Any], first_rank: int) -> Reply:
        """Leaves the current broadcast group, and joins another one as rank `first_rank` + this worker's rank."""
        self._leave_group("a member joined another group")
        try:
            member = GroupMember(BroadcastGroup(**group), first_rank + self.rank, self._device())
        except BroadcastAborted as error:
            return self._reply(error=str(error))
        self._ostinato_member: GroupMember | None = member
        return self._reply()

    def _member(self) -> GroupMember | None:
        return getattr(self, "_ostinato_member", None)

    def _leave_group(self, reason: str) -> None:
        member = self._member()
        if member is not None:
            member.leave(reason)
        self._ostinato_member = None

    def _device(self) -> torch.device:
        return next(self.model_runner.get_model().parameters()).device

    # -- adapters ---------------------------------------------------------------------------------------------

    def ostinato_load_adapter(
        self, folder: str, name: str, number: int, manifest: Mapping[str, Sequence[Any]]
    ) -> Reply:
        """Loads a peft folder and proves that the live slots hold it. The base must have been loaded before.

        Args:
            number: vLLM's number of the adapter, never used before in this engine.
        """
        proven: _ProvenWeights | None = getattr(self, "_ostinato_proven", None)
        if proven is None:
            return self._reply(error="an adapter came before the base's weights")
        try:
            self.ostinato_add_adapter(folder, name, number)
            manager, model = self._lora()
            digest = compare(manager, model, proven.plan, Path(folder), number, manifest)
        except (AdapterMismatch, BadSpec) as error:
            return self._reply(error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's LoRA loader, which raises anything
            return self._reply(error=f"vLLM did not load the adapter: {type(error).__name__}: {error}")
        self._proven_adapters()[name] = (number, digest)
        return self._reply(name=name)

    def ostinato_add_adapter(self, folder: str, name: str, number: int) -> None:
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(name, number, folder))  # type: ignore[attr-defined]

    def ostinato_check_adapter(self, name: str) -> Reply:
        """Checks that the live slots still hold what `ostinato_load_adapter` proved."""
        number, expected_digest = self._proven_adapters().get(name, (0, ""))
        if not expected_digest:
            return self._reply(error=f"it holds no adapter {name}")
        manager, model = self._lora()
        try:
            if digest(manager, model, number) != expected_digest:
                raise AdapterMismatch(f"the live adapter changed since {name} was loaded")
        except AdapterMismatch as error:
            del self._proven_adapters()[name]
            return self._reply(error=str(error))
        return self._reply(name=name)

    def ostinato_remove_adapter(self, name: str) -> Reply:
        number, _ = self._proven_adapters().pop(name, (0, ""))
        if number:
            self.remove_lora(number)  # type: ignore[attr-defined]
        return self._reply(name=name)

    def _lora(self) -> tuple[Any, nn.Module]:
        """(vLLM's LoRA manager, model)."""
        return self.model_runner.lora_manager._adapter_manager, self.model_runner.get_model()

    def _proven_adapters(self) -> dict[str, tuple[int, str]]:
        """By name: (vLLM's number, digest of the live slots)."""
        if not hasattr(self, "_ostinato_adapters"):
            self._ostinato_adapters: dict[str, tuple[int, str]] = {}
        return self._ostinato_adapters

    # -- replies ----------------------------------------------------------------------------------------------

    def _worker_id(self) -> str:
        """A random identifier of this worker, made once in the life of its process."""
        if not hasattr(self, "_ostinato_worker_id"):
            self._ostinato_worker_id = uuid.uuid4().hex
        return self._ostinato_worker_id

    def _reply(self, *, error: str | None = None, **values: Any) -> Reply:
        return {"rank": self.rank, "worker_id": self._worker_id(), "error": error, **values}


def _check_picks(picks: list[int]) -> list[int]:
    """Those that `ostinato_check` reads, unless all are requested."""
    return picks[:PICKS_PER_CHECK]


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
        dtype, shape, expected_digest = manifest[name]
        tensor = tensors[name]
        if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
            raise AdapterMismatch(f"tensor {name} arrived as {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
        if digest_tensor(tensor) != expected_digest:
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
