"""LoRA (arXiv:2106.09685): linear layers that add a low-rank pair of matrices for the time of a call.

The layers replace a model's own under the same names and with the same weights. So everything else about the model
(packing, head, digests, export) stays as it was, and a layer without a pair computes exactly what it did before. Pairs
are not part of the module: many adapters share one base model, and an attribute of the layer says which is in use.
Names, shapes, scale and the distribution of A are peft's. peft itself wraps the whole model in another one, which hides
the decoder.

In 4 bits (QLoRA, arXiv:2305.14314), a frozen weight is cut into blocks of 64 numbers. bitsandbytes keeps the largest
magnitude of a block in float32, and the index of the nearest of the 16 NF4 values for each number: 4.5 bits per weight.
A pass dequantises the weight of one layer at a time. A layer keeps its plain weight if its input size is no multiple of
64.

Axes: I input feature · O output feature · R rank
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.scalar_lm import HEAD_NAME
from engine.backends.weight_files.tensor_files import read_tensors
from engine.errors import BadSpec
from engine.specs.adapters import ALL_LINEAR, LoraSpec

A_NAME, B_NAME, MAGNITUDE_NAME = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
PEFT_PREFIX = "base_model.model."
ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

BLOCK = 64
"""Numbers that share a scale: bitsandbytes' default, and that of the paper."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The matrices of one adapter for one layer, whose weight becomes W + scale * B @ A.

    With DoRA (arXiv:2402.09353) each row of that sum is scaled to the length m: m * (W + sBA) / |W + sBA|."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    """DoRA's m. None without DoRA."""
    fixed_norm_O: Tensor | None = None
    """|W + sBA| of a pair that does not change, so that it is not computed at each call."""

    @torch.no_grad()
    def merged(self, weight_OI: Tensor) -> Tensor:
        """The weight that the layer computes with, in the dtype of the adapter."""
        dtype = self.a_RI.dtype if self.magnitude_O is None else self.magnitude_O.dtype
        sum_OI = weight_OI.to(dtype) + self.scale * (self.b_OR.to(dtype) @ self.a_RI.to(dtype))
        if self.magnitude_O is None:
            return sum_OI
        return sum_OI * (self.magnitude_O / row_norms(sum_OI)).unsqueeze(1)

    @torch.no_grad()
    def norm(self, weight_OI: Tensor) -> Tensor:
        """DoRA's |W + sBA| of each row (O,)."""
        with torch.autocast(weight_OI.device.type, enabled=False):
            return row_norms(replace(self, magnitude_O=None).merged(weight_OI.to(self.a_RI.dtype)))


def row_norms(weight_OI: Tensor) -> Tensor:
    """The Euclidean length of each row (O,)."""
    return torch.linalg.vector_norm(weight_OI, dim=1)


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight and, during a call, the pair of the adapter in use."""

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a second weight
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight, self.bias = original.weight, original.bias
        self.pair: LoraPair | None = None

    def forward(self, input: Tensor) -> Tensor:
        output, pair = self.base_output(input), self.pair
        if pair is None:
            return output
        added = pair.scale * linear(linear(input, pair.a_RI), pair.b_OR)
        if pair.magnitude_O is None:
            return output + added
        # DoRA. As in section 4.3 of the paper, the norm has no gradient. A factor of 1 leaves the output as it is, to
        # the bit, so policy 0 is the base.
        norm_O = pair.norm(self.base_weight()) if pair.fixed_norm_O is None else pair.fixed_norm_O
        factor_O = pair.magnitude_O / norm_O
        without_bias = output if self.bias is None else output - self.bias
        return output + ((factor_O - 1) * without_bias + factor_O * added).to(output.dtype)

    def base_output(self, input: Tensor) -> Tensor:
        """The output without a pair."""
        return linear(input, self.weight, self.bias)

    def base_weight(self) -> Tensor:
        """The weight (O, I) without a pair."""
        return self.weight


LoraPairs = Mapping[str, LoraPair]
"""The pairs of an adapter, by the name of the layer, sorted by name."""


def replace_linears(
    model: CausalLM, new_layer: Callable[[nn.Linear], LoraLinear] = LoraLinear
) -> dict[str, LoraLinear]:
    """Replaces every linear layer but the head by `new_layer` of it; returns the new layers by name, sorted."""
    layers = {}
    for name, child in sorted(model.module.named_modules()):
        if type(child) is nn.Linear and child is not model.head:
            parent, _, attribute = name.rpartition(".")
            layers[name] = new_layer(child)
            setattr(model.module.get_submodule(parent), attribute, layers[name])
    return layers


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """The LoraLinear layers of a module, or of a copy of it, by name, sorted."""
    return {name: child for name, child in sorted(module.named_modules()) if isinstance(child, LoraLinear)}


@contextmanager
def use_pairs(layers: Mapping[str, LoraLinear], pairs: LoraPairs) -> Iterator[None]:
    """Within this context the layers compute with these pairs. Afterwards, also after an error, they have their former
    pairs again."""
    # Restore the former pairs, instead of none: calls may be nested.
    before = {name: layer.pair for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.pair = pairs.get(name)
        yield
    finally:
        for name, layer in layers.items():
            layer.pair = before[name]


def target_layers(model: CausalLM, layers: Mapping[str, LoraLinear], spec: LoraSpec) -> dict[str, LoraLinear]:
    """The layers that `spec` names, sorted.

    Raises:
        BadSpec: a name matches no linear layer, or only the language head, or the model has no linear layers.
    """
    if not layers:
        raise BadSpec(
            "the model has no plain linear layers besides its head, so LoRA has nothing to adapt; train the whole model"
        )
    if spec.target_modules == ALL_LINEAR:
        return dict(layers)
    # Every name must match a layer, and the error names the first that does not.
    for target in spec.target_modules:
        if not any(_matches(target, name) for name in layers):
            reason = "no linear layer of the model"
            for name, module in model.module.named_modules():
                if module is model.head and _matches(target, name):
                    reason = "the language head, which is not adapted"
            raise BadSpec(
                f"target_modules names {target!r}, which is {reason}; expected 'all-linear' or some of "
                f"{', '.join(short_names(layers))}"
            )
    # Keep the order of the layers, which is sorted by name.
    targets = {}
    for name, layer in layers.items():
        if any(_matches(target, name) for target in spec.target_modules):
            targets[name] = layer
    return targets


def _matches(target: str, layer: str) -> bool:
    return layer == target or layer.endswith("." + target)


def short_names(layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names, each once, as peft lists them."""
    return sorted({name.rpartition(".")[2] for name in layers})


def new_pairs(
    targets: Mapping[str, LoraLinear],
    spec: LoraSpec,
    *,
    init_seed: int,
    dtype: torch.dtype,
    device: torch.device,
    gathered_weight: Callable[[LoraLinear], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> dict[str, LoraPair]:
    """Pairs of a new adapter. A is uniform in ±1/sqrt(I), which is peft's kaiming_uniform_(a=sqrt(5)); B is zero.
    DoRA's magnitudes are the lengths of the rows of W.

    Each A is drawn from a generator of its own, on the CPU in float32, whatever the device and dtype. Within
    `gathered_weight(layer)` the layer has its whole weight.
    """
    pairs = {}
    for name, layer in targets.items():
        # The seed depends on the layer's name, so a layer's A does not depend on which others are adapted.
        seed = hashlib.sha256(f"{init_seed} {name}.{A_NAME}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        bound = 1 / sqrt(layer.in_features)
        a_RI = torch.empty(spec.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        pair = LoraPair(
            nn.Parameter(a_RI.to(device, dtype)),
            nn.Parameter(torch.zeros(layer.out_features, spec.rank, device=device, dtype=dtype)),
            spec.scale,
        )
        if spec.use_dora:
            with gathered_weight(layer):
                pair = replace(pair, magnitude_O=nn.Parameter(pair.norm(layer.base_weight())))
        pairs[name] = pair
    return pairs


def sampling_pairs(pairs: LoraPairs, layers: Mapping[str, LoraLinear], dtype: torch.dtype) -> dict[str, LoraPair]:
    """Copies of the matrices in `dtype`, without gradients, for a sampler. DoRA's magnitudes keep their dtype, in which
    their small changes would get lost, and its norms are those of the sampler's `layers`."""
    copies = {}
    for name, pair in pairs.items():
        a_RI, b_OR = pair.a_RI.detach().to(dtype, copy=True), pair.b_OR.detach().to(dtype, copy=True)
        copied = LoraPair(a_RI, b_OR, pair.scale)
        if pair.magnitude_O is not None:
            # The norm of the weights in the trainer's precision, as in the trainer.
            norm_O, magnitude_O = pair.norm(layers[name].base_weight()), pair.magnitude_O.detach().clone()
            copied = replace(copied, magnitude_O=magnitude_O, fixed_norm_O=norm_O)
        copies[name] = copied
    return copies


def pair_tensors(pairs: LoraPairs) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of A and B of every layer, and of its magnitudes with DoRA."""
    for name, pair in pairs.items():
        yield f"{name}.{A_NAME}", pair.a_RI
        yield f"{name}.{B_NAME}", pair.b_OR
        if pair.magnitude_O is not None:
            yield f"{name}.{MAGNITUDE_NAME}", pair.magnitude_O


def read_pairs(folder: Path, scale: float, device: torch.device) -> dict[str, LoraPair]:
    """The pairs of a peft folder without DoRA, as they are stored there."""
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in read_tensors(folder / ADAPTER_FILE):
        tensors[stored_name.removeprefix(PEFT_PREFIX)] = tensor.to(device)
    pairs: dict[str, LoraPair] = {}
    for name in sorted(tensors):
        if name.endswith(A_NAME):
            layer = name.removesuffix(f".{A_NAME}")
            pairs[layer] = LoraPair(tensors[name], tensors[f"{layer}.{B_NAME}"], scale)
    return pairs


def peft_config(spec: LoraSpec, pairs: LoraPairs, base_model: str) -> str:
    """The text of adapter_config.json."""
    targets = list(spec.target_modules)
    if spec.target_modules == ALL_LINEAR:
        targets = short_names(pairs)
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.head == "scalar" else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": targets,
        "use_rslora": spec.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if spec.use_dora:
        fields["use_dora"] = True
    # The adapter file contains the scalar head too.
    if spec.head == "scalar":
        fields["modules_to_save"] = [HEAD_NAME]
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def four_bit_layer(original: nn.Linear, *, device: torch.device) -> LoraLinear:
    """The layer in 4 bits, or with its plain weight if its input size is no multiple of 64."""
    # On CPUs with AVX-512, bitsandbytes 0.50.2 dequantises such weights wrongly: of shape (3, 96), for example.
    if original.in_features % BLOCK:
        return LoraLinear(original)
    return LoraLinear4bit(original, device=device)


class LoraLinear4bit(LoraLinear):
    """A LoraLinear whose weight is quantised on `device`. It is dequantised to the dtype that it had."""

    def __init__(self, original: nn.Linear, *, device: torch.device) -> None:
        from bitsandbytes.nn import Params4bit

        super().__init__(original)
        self.dtype = original.weight.dtype
        plain: Any = Params4bit(original.weight.data, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
        self.weight: Any = plain.to(device)  # which quantises it

    def base_output(self, input: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        # Autocast does not reach into matmul_4bit, so cast as autocast would.
        return matmul_4bit(input.to(self.dtype), self.weight, bias=self.bias, quant_state=self.weight.quant_state)

    def base_weight(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight, self.weight.quant_state)

    @property
    def scales_nbytes(self) -> int:
        """Bytes of the largest magnitudes of the blocks."""
        return self.weight.quant_state.absmax.nbytes


def check_four_bit(device: torch.device, dtype: torch.dtype) -> None:
    """Raises BadSpec unless bitsandbytes is installed and computes with 4-bit weights on this device."""
    beginning = "load_in_4bit=true was given, "
    try:
        installed = version("bitsandbytes")
    except PackageNotFoundError:
        raise BadSpec(
            f"{beginning}and the package bitsandbytes is not installed where the engine runs; install it with "
            "pip install 'ostinato[qlora]', or leave load_in_4bit out"
        ) from None
    try:
        layer = LoraLinear4bit(nn.Linear(BLOCK, 1, bias=False, dtype=dtype), device=device)
        layer(torch.zeros(1, BLOCK, dtype=dtype, device=device))
    except Exception as error:  # the boundary to bitsandbytes: a missing kernel may raise any type of exception
        raise BadSpec(
            f"{beginning}and bitsandbytes {installed} does not compute with 4-bit weights in {dtype} on the device "
            f"{str(device)!r}: {error}. Install a version that supports the device, or leave load_in_4bit out"
        ) from error
