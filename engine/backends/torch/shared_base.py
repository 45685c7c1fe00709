"""One frozen base model in memory, and the policies that are adapters on it.

What the base holds: every weight once. Where compute is in a lower precision than the master weights, linear layers
are held in the compute dtype only, since autocast would round exactly these on every call; embeddings and norms stay
in the master dtype, so that the residual stream does. Policy 0 of an adapter therefore equals the fully trained
model's policy 0 to the bit, in float32 and under bfloat16 autocast alike. Adapters are in the master dtype.

A sampler in a lower precision shares the linear layers and adds one copy of the rest per base, whatever the number of
adapters, and a copy of its adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.backends.torch.causal_lm import CausalLM, frozen_copy
from engine.backends.torch.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PEFT_PREFIX,
    Pairs,
    new_pairs,
    pair_tensors,
    peft_config,
    replace_linears,
    target_layers,
    using,
)
from engine.backends.torch.scalar_lm import HEAD_NAME, ScalarLM, new_head, with_scalar_head
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.digests import digest_tensors
from engine.backends.weight_files.tensor_files import write_tensors
from engine.errors import BadSpec
from engine.models.folder import scalar_head_message
from engine.specs.adapters import LoraSpec


class SharedBase:
    """Takes over a freshly loaded model: freezes it, lets its linear layers take adapters, moves it to `device`.

    `digest` is the weights' digest as loaded, equal to that of a full trainer before its first update."""

    def __init__(self, model: CausalLM, *, device: torch.device, key: str = "") -> None:
        self.key = key
        self.digest, self.digests = digest_tensors(model.named_weights())
        self._score = copy.deepcopy(model.head) if model.scalar else None  # before it is lowered
        self.layers = replace_linears(model)
        module = model.module.requires_grad_(False)
        _lower_linears(module, model.compute_dtype)
        self.model = model.with_module(module.to(device), compute_dtype=model.compute_dtype, master_dtype=model.dtype)
        self._sampling: CausalLM | None = None

    def scalar_model(self, *, init_seed: int) -> ScalarLM:
        """The base's decoder under a scalar head of its own: a copy of the base's, or a new one as `init_seed` draws
        it. Raises BadModelFolder for an architecture that has none."""
        head = new_head(self.model, init_seed) if self._score is None else copy.deepcopy(self._score)
        head.to(self.model.device).requires_grad_(True)
        return with_scalar_head(self.model, head, self.key or "the base model")

    def sampling_model(self) -> CausalLM:
        """The base in the compute dtype throughout, as samplers use it: itself, or the one copy."""
        if self.model.compute_dtype == self.model.dtype:
            return self.model
        if self._sampling is None:
            module = frozen_copy(self.model.module, self.model.compute_dtype)
            self._sampling = self.model.with_module(module, compute_dtype=self.model.compute_dtype)
        return self._sampling

    def nbytes(self) -> int:
        """Bytes of the weights held now, each once: the base's own and, once there is a sampler, what its copy adds."""
        models = [self.model] if self._sampling is None else [self.model, self._sampling]
        held = {t.data_ptr(): t.nbytes for model in models for _, t in model.named_weights()}
        return sum(held.values())


def _lower_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Linear layers in `dtype`, but for weights that another kind of layer shares (a tied head)."""
    shared = {id(p) for m in module.modules() if not isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    for child in module.modules():
        if isinstance(child, nn.Linear):
            for parameter in child.parameters(recurse=False):
                if id(parameter) not in shared:
                    parameter.data = parameter.data.to(dtype)


class SharedTrainer(TorchTrainer):
    """A policy on a shared base: its pairs are in the base's layers for the time of each call."""

    def __init__(self, base: SharedBase, pairs: Pairs) -> None:
        super().__init__(base.model)
        self.base, self.pairs = base, pairs

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return sorted(pair_tensors(self.pairs))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.trained()

    def in_use(self) -> AbstractContextManager[object]:
        return using(self.base.layers, self.pairs)

    @torch.no_grad()
    def export_merged(self, folder: Path) -> dict[str, Path]:
        """W + scale * B @ A of every layer, in the master dtype, as a fully trained model is exported. Takes memory for
        one whole model while it writes."""
        folder.mkdir(parents=True, exist_ok=True)
        module: Any = self.model.module
        state = {name: tensor.to(self.model.dtype) for name, tensor in module.state_dict().items()}
        for name, pair in self.pairs.items():
            weight = f"{name}.weight"
            state[weight] = state[weight] + pair.delta()
        module.save_pretrained(folder, state_dict=state, safe_serialization=True)
        return {path.name: path for path in sorted(folder.iterdir())}


class AdapterTrainer(SharedTrainer):
    """Trains one LoRA adapter, and a scalar head where the spec asks for one. Checkpoints and digests hold these only;
    the digest names the base's."""

    def __init__(self, base: SharedBase, spec: LoraSpec, *, init_seed: int) -> None:
        targets = target_layers(base.model, base.layers, spec)
        super().__init__(base, new_pairs(targets, spec, init_seed=init_seed, dtype=base.model.dtype))
        self.spec = spec
        if spec.head == "scalar":
            self.model = base.scalar_model(init_seed=init_seed)
        elif base.model.scalar:
            raise BadSpec(scalar_head_message(base.key or "the base model"))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """With a scalar head, that too: it is the adapter's own."""
        if not self.scalar:
            return super().trained()
        head = [(f"{HEAD_NAME}.{name}", parameter) for name, parameter in self.model.head.named_parameters()]
        return sorted([*super().trained(), *head])

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_tensors(self.weights(), base=self.base.digest)

    def export(self, folder: Path) -> dict[str, Path]:
        """A peft adapter folder, which names the base by its registry key."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: folder / name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)}
        write_tensors(files[ADAPTER_FILE], ((PEFT_PREFIX + name, tensor) for name, tensor in self.weights()))
        files[ADAPTER_CONFIG_FILE].write_text(peft_config(self.spec, self.pairs, self.base.key))
        return files


class AdapterOff(SharedTrainer):
    """The base itself, read only: logprobs, digest and export. Everything that would change or save it is refused."""

    def __init__(self, base: SharedBase) -> None:
        super().__init__(base, {})

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return self.base.digest, self.base.digests

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise BadSpec("the frozen base of adapters was asked for an update; train an adapter on it instead")

    def write_checkpoint(self, folder: Path) -> NoReturn:
        raise BadSpec("the frozen base of adapters needs no checkpoint: it is a registered model")

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> NoReturn:
        raise BadSpec("a checkpoint was to be read into the frozen base of adapters; read it into an adapter")
