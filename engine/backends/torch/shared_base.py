"""One frozen base model in memory, and the policies that are adapters on it.

The base holds every weight once. Where the compute precision is lower than the master precision, linear layers are held
in the compute dtype only, because autocast would round exactly these on every call. Embeddings and norms stay in the
master dtype, so that the residual stream does. So policy 0 of an adapter is equal to policy 0 of the fully trained
model, bit for bit, in float32 and under bfloat16 autocast. Adapters are in the master dtype.

A sampler in a lower precision shares the linear layers. It adds one copy of the other weights per base, whatever the
number of adapters, and a copy of its adapter.

With QLoRA (arXiv:2305.14314) the linear layers are held in 4 bits (engine.backends.torch.lora). Policy 0 then
computes with the dequantised weights, as the sampler and merged exports do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.protocol import ReadOnlyPolicy, is_sampled_on_base
from engine.backends.torch.causal_lm import CausalLM, frozen_copy
from engine.backends.torch.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PEFT_PREFIX,
    LoraLinear,
    LoraLinear4bit,
    LoraPairs,
    four_bit_layer,
    new_pairs,
    pair_tensors,
    peft_config,
    replace_linears,
    target_layers,
    use_pairs,
)
from engine.backends.torch.scalar_lm import HEAD_NAME, ScalarLM, new_head, with_scalar_head
from engine.backends.torch.trainer import STAGED_FILE, TorchTrainer, files_in
from engine.backends.weight_files.digests import digest_tensors
from engine.backends.weight_files.tensor_files import write_tensors
from engine.errors import BadSpec
from engine.models.folder import scalar_head_message
from engine.specs.adapters import LoraSpec


class SharedBase:
    """A frozen model whose linear layers take adapters. It takes over a freshly loaded model, and moves it to `device`.

    `digest` is the digest of the weights as loaded, equal to that of a full trainer before its first update, also with
    `load_in_4bit`."""

    def __init__(self, model: CausalLM, *, device: torch.device, key: str = "", load_in_4bit: bool = False) -> None:
        self.key = key
        self.digest, self.digests = digest_tensors(model.named_weights())
        self._score = copy.deepcopy(model.head) if model.scalar else None  # in master precision
        module = model.module.requires_grad_(False)
        for parameter in linear_parameters(module):
            parameter.data = parameter.data.to(model.compute_dtype)
        # Replace the linear layers first, so that the frozen copy for samplers has the new ones.
        new_layer = partial(four_bit_layer, device=device) if load_in_4bit else LoraLinear
        self.layers = replace_linears(model, new_layer)
        self.model = model.with_module(module.to(device), compute_dtype=model.compute_dtype, master_dtype=model.dtype)
        self._sampling: CausalLM | None = None

    def scalar_model(self, *, init_seed: int) -> ScalarLM:
        """The base's decoder under a scalar head of its own: a copy of the base's scalar head, or else a new head from
        `init_seed`. Raises BadModelFolder for an architecture that has no scalar model."""
        if self._score is None:
            head = new_head(self.model, init_seed)
        else:
            head = copy.deepcopy(self._score)
        head.to(self.model.device).requires_grad_(True)
        return with_scalar_head(self.model, head, self.key or "the base model")

    def sampling_model(self) -> CausalLM:
        """The base with all weights in the compute dtype, for samplers: the base itself, or a copy that all samplers
        share."""
        if self.model.compute_dtype == self.model.dtype:
            return self.model
        if self._sampling is None:
            module = frozen_copy(self.model.module, self.model.compute_dtype)
            self._sampling = self.model.with_module(module, compute_dtype=self.model.compute_dtype)
        return self._sampling

    @property
    def alive(self) -> bool:
        return True

    def nbytes(self) -> int:
        """Bytes of the weights in memory now, each counted once: those of the base, and those that the samplers' copy
        adds."""
        models = [self.model]
        if self._sampling is not None:
            models.append(self._sampling)
        # The copy shares the linear layers. Their bytes are counted once, by address.
        sizes: dict[int, int] = {}
        for model in models:
            for _, tensor in model.named_weights():
                sizes[tensor.data_ptr()] = tensor.nbytes
        in_4_bits = [layer for layer in self.layers.values() if isinstance(layer, LoraLinear4bit)]
        return sum(sizes.values()) + sum(layer.scales_nbytes for layer in in_4_bits)


def linear_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of linear layers, except weights that a layer of another kind shares (a tied head). These are what
    autocast would cast on every call."""
    # Parameters of other layers keep their precision, also where a linear layer uses them too.
    shared: set[int] = set()
    for child in module.modules():
        if not isinstance(child, nn.Linear):
            shared.update(map(id, child.parameters(recurse=False)))
    parameters: list[nn.Parameter] = []
    for child in module.modules():
        if isinstance(child, nn.Linear):
            parameters += [parameter for parameter in child.parameters(recurse=False) if id(parameter) not in shared]
    return parameters


class SharedTrainer(TorchTrainer):
    """A policy on a shared base. During each call, its pairs are in the base's layers."""

    base: SharedBase

    def __init__(self, base: SharedBase, pairs: LoraPairs) -> None:
        super().__init__(base.model)
        self.base, self.pairs = base, pairs

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return sorted(pair_tensors(self.pairs))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.trained_parameters()

    def with_own_weights(self) -> AbstractContextManager[object]:
        return use_pairs(self.base.layers, self.pairs)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        pairs = {} if is_sampled_on_base(self) else self.pairs
        weights = ((name, self._merged(name, tensor, pairs)) for name, tensor in self.model.exported_weights())
        write_tensors(folder / STAGED_FILE, weights, floating=dtype)
        return [folder / STAGED_FILE]

    def _merged(self, name: str, tensor: Tensor, pairs: LoraPairs) -> Tensor:
        """The model's tensor of this name, with the pair of its layer merged into it. A weight in 4 bits is dequantised
        first."""
        layer_name, _, kind = name.rpartition(".")
        if kind != "weight" or layer_name not in self.base.layers:
            return tensor
        weight_OI = self.base.layers[layer_name].base_weight()
        return pairs[layer_name].merged(weight_OI) if layer_name in pairs else weight_OI

    @torch.no_grad()
    def export_merged(self, folder: Path) -> dict[str, Path]:
        """Writes W + scale * B @ A of every layer, in the master dtype, in the format of a fully trained model. With a
        base in 4 bits, W is the dequantised weight, so that the written model computes what the policy computes. While
        it writes, it takes the memory of one whole model."""
        folder.mkdir(parents=True, exist_ok=True)
        module: Any = self.model.module
        # Compute the sum in a copy: the base's weights must not change.
        state: dict[str, Tensor] = {}
        for name, tensor in module.state_dict().items():
            state[name] = self._merged(name, tensor, self.pairs).to(self.model.dtype)
        module.save_pretrained(folder, state_dict=state, safe_serialization=True)
        return files_in(folder)


class AdapterTrainer(SharedTrainer):
    """Trains one LoRA adapter, and a scalar head if the spec has one. Checkpoints and digests contain only these; the
    digest includes the base's digest."""

    adapter: LoraSpec

    def __init__(self, base: SharedBase, spec: LoraSpec, *, init_seed: int) -> None:
        # The pairs are drawn on the base's names and dtype, before the head may be replaced.
        targets = target_layers(base.model, base.layers, spec)
        pairs = new_pairs(targets, spec, init_seed=init_seed, dtype=base.model.dtype, device=base.model.device)
        super().__init__(base, pairs)
        self.adapter = spec
        if spec.head == "scalar":
            self.model = base.scalar_model(init_seed=init_seed)
        elif base.model.scalar:
            raise BadSpec(scalar_head_message(base.key or "the base model"))

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The pairs, and the adapter's scalar head if it has one."""
        if not self.scalar:
            return super().trained_parameters()
        head = [(f"{HEAD_NAME}.{name}", parameter) for name, parameter in self.model.head.named_parameters()]
        return sorted([*super().trained_parameters(), *head])

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_tensors(self.weights(), base=self.base.digest)

    def export(self, folder: Path) -> dict[str, Path]:
        """Writes a peft adapter folder, which names the base by its registry key."""
        folder.mkdir(parents=True, exist_ok=True)
        config_file, adapter_file = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_FILE
        write_tensors(adapter_file, ((PEFT_PREFIX + name, tensor) for name, tensor in self.weights()))
        config_file.write_text(peft_config(self.adapter, self.pairs, self.base.key))
        return {ADAPTER_CONFIG_FILE: config_file, ADAPTER_FILE: adapter_file}


class AdapterOff(ReadOnlyPolicy, SharedTrainer):
    """The base itself, which can only be read: logprobs, digest and export."""

    def __init__(self, base: SharedBase) -> None:
        super().__init__(base, {})

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return self.base.digest, self.base.digests
