"""`ModelShape`: the dimensions of a model that decide its memory, and the number of its parameters. Without torch.

A shape comes from a config.json or from published dimensions. The count of parameters is exact for the families named
here; for other families it comes from the headers of the folder's safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import BadSpec
from engine.models.folder import (
    SCALAR_ARCHITECTURE,
    context_length_in,
    experts_in,
    folder_parameter_count,
    parameter_count,
    stored_config,
)
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How the models of a `model_type` differ from Llama. A string names the key of config.json that decides."""

    norms: int = 2
    """RMSNorms of the hidden size in each layer."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    """Whether queries and keys have an RMSNorm of the head size."""
    gated: bool = True
    layer_norm: bool = False
    """Whether the norms are LayerNorms, which have a bias, and not RMSNorms."""
    tied: bool = False
    """Whether embedding and head share their weights if config.json does not say it."""
    head_dim: int | None = None
    """Size of a head if config.json does not give it. None: hidden size / heads."""


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True),
    "qwen3": ModelFamily(qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True, head_dim=128),
    "smollm3": ModelFamily(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
    "granite": ModelFamily(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "phi3": ModelFamily(),
    "gemma": ModelFamily(qkv_bias="attention_bias", output_bias="attention_bias", tied=True, head_dim=256),
    "gemma2": ModelFamily(norms=4, qkv_bias="attention_bias", output_bias="attention_bias", tied=True, head_dim=256),
    "gemma3_text": ModelFamily(
        norms=4, qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True, tied=True, head_dim=256
    ),
    "gpt_neox": ModelFamily(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias=True, gated=False, layer_norm=True
    ),
}
_TRUE_BY_DEFAULT = {("gpt_neox", "attention_bias")}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. All counts are in elements, not bytes."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Longest sequence, in tokens."""
    parameters: int
    tied: bool
    gated: bool = True
    scalar: bool = False
    """Whether the model has a scalar head: one number per token, hidden-size weights, and no logits."""

    @property
    def queries(self) -> int:
        """Features of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of a token's keys. Its values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head. They are the largest tensors."""
        return self.vocabulary * self.hidden

    @property
    def language_head(self) -> int:
        """Elements of the matrix that computes logits. It may be the embedding."""
        return 0 if self.scalar else self.embedding

    @property
    def own_head(self) -> int:
        """Elements of a language head that is not the embedding."""
        return 0 if self.tied else self.language_head

    def with_scalar_head(self, *, keep_language_head: bool = False) -> ModelShape:
        """Returns the decoder with a scalar head in place of the language head.

        With `keep_language_head` both heads are counted: an adapter shares its base with runs that may need the
        language head.
        """
        if self.scalar:
            return self
        parameters = self.parameters + self.hidden
        if not keep_language_head:
            parameters -= self.own_head
        return replace(self, parameters=parameters, scalar=True)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(input, output) sizes of the linear layers of one decoder layer."""
        # A gated MLP has two matrices into the intermediate size: the gate and the input that it is multiplied with.
        up = [(self.hidden, self.intermediate)] * (2 if self.gated else 1)
        attention = [(self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys)]
        return [*attention, (self.queries, self.hidden), *up, (self.intermediate, self.hidden)]

    @property
    def layer_linear(self) -> int:
        """Elements of the matrices of one decoder layer."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    def lora(self, rank: int) -> int:
        """Returns the elements of a LoRA adapter on every linear layer but the head: rank * (input + output) each."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linears)


def shape_of(config: Mapping[str, Any], name: str, *, counted: int | None = None) -> ModelShape:
    """Returns the shape that a config.json describes.

    `counted` is the number of elements in the safetensors headers; it takes precedence over the count from the config.

    Raises:
        BadSpec: a mixture of experts; a missing dimension; an unknown family without `counted`.
    """
    # Refuse mixtures of experts, whose parameters these formulas would count wrongly.
    experts = experts_in(config)
    if experts:
        raise BadSpec(f"{name} is a mixture of experts ({experts}); only dense models are planned")

    # The config of a vision-language model has the config of its language model inside.
    config = {**config, **(config.get("text_config") or {})}
    model_type = str(config.get("model_type", ""))

    # An unknown family may have biases and norms of its own, so its parameters must be counted in the files.
    family = FAMILIES.get(model_type)
    if family is None and counted is None:
        raise BadSpec(
            f"{name} is of the unknown model_type {model_type!r}, and no safetensors file says how many parameters it "
            f"has; give a folder with weights, or one of the types {', '.join(FAMILIES)}"
        )
    family = family or ModelFamily()

    # Read the dimensions, with the family's defaults for keys that config.json leaves out.
    heads = _dimension(config, "num_attention_heads", name)
    hidden = _dimension(config, "hidden_size", name)
    shape = ModelShape(
        name=name,
        hidden=hidden,
        layers=_dimension(config, "num_hidden_layers", name),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or family.head_dim or hidden // heads),
        intermediate=_dimension(config, "intermediate_size", name),
        vocabulary=_dimension(config, "vocab_size", name),
        context=context_length_in(config) or 4096,
        parameters=counted or 0,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        gated=family.gated,
        scalar=any(str(class_name).endswith(SCALAR_ARCHITECTURE) for class_name in config.get("architectures") or ()),
    )
    return shape if counted else _with_count(shape, family, config, model_type)


def stored_shape(store: ObjectStore, model: ArtifactRef) -> ModelShape:
    """Returns the shape of a registered model: its config gives the dimensions, its files the number of parameters.

    Raises BadSpec, as `shape_of`, and CorruptArtifact."""
    return shape_of(stored_config(store, model), model.key, counted=parameter_count(store, model) or None)


def _with_count(shape: ModelShape, family: ModelFamily, config: Mapping[str, Any], model_type: str) -> ModelShape:
    """Returns the shape with the number of parameters that its dimensions imply."""

    def has(flag: bool | str) -> bool:
        if isinstance(flag, bool):
            return flag
        return bool(config.get(flag, (model_type, flag) in _TRUE_BY_DEFAULT))

    # Count one layer: matrices and norms, then the biases that the family or the config asks for.
    norm = shape.hidden * (2 if family.layer_norm else 1)
    layer = shape.layer_linear + family.norms * norm
    if has(family.qkv_bias):
        layer += shape.queries + 2 * shape.keys
    if has(family.output_bias):
        layer += shape.hidden
    if has(family.mlp_bias):
        layer += shape.hidden + shape.intermediate * (2 if shape.gated else 1)
    if family.head_norms:
        layer += 2 * shape.head_dim

    # All layers, the embedding, the heads, and the norm after the last layer.
    total = shape.embedding + shape.own_head + shape.layers * layer + norm + shape.hidden * shape.scalar
    return replace(shape, parameters=total)


def _dimension(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise BadSpec(f"config.json of {name} has {key}={value!r}; expected a positive number")
    return value


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    """Returns the config.json of a Llama-like model. `more` adds keys."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    others = {"num_key_value_heads": kv_heads, "intermediate_size": intermediate, "model_type": "llama"}
    return sizes | others | more


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "135M": (
        "SmolLM2-135M",
        _llama(576, 30, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True),
    ),
    "0.5B": (
        "Qwen2.5-0.5B",
        _llama(896, 24, 14, 2, 4864, vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True)
        | {"model_type": "qwen2"},
    ),
    "1.5B": (
        "Qwen2.5-1.5B",
        _llama(1536, 28, 12, 2, 8960, vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True)
        | {"model_type": "qwen2"},
    ),
    "8B": ("Llama-3.1-8B", _llama(4096, 32, 32, 8, 14336, vocab_size=128256, max_position_embeddings=131072)),
    "70B": ("Llama-3.1-70B", _llama(8192, 80, 64, 8, 28672, vocab_size=128256, max_position_embeddings=131072)),
}
"""(name, config.json) of published models, by the size in their names."""


def preset(size: str) -> ModelShape | None:
    """Returns the shape of a size in PRESETS, or None."""
    if size not in PRESETS:
        return None
    model, config = PRESETS[size]
    return shape_of(config, f"{size} ({model})")


def read_shape(folder: Path) -> ModelShape:
    """Returns the shape of a local Hugging Face folder, with the count of its safetensors files if it has some.

    Raises:
        BadSpec: no config.json, or a config.json that does not describe a shape.
        CorruptArtifact: a safetensors file without a header.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadSpec(f"{folder} has no readable config.json ({error}); give a Hugging Face model folder") from error
    counted = folder_parameter_count({file.name: file for file in sorted(folder.glob("*.safetensors"))})
    return shape_of(config, folder.name, counted=counted or None)
