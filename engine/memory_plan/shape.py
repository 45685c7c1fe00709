"""What of a model decides its memory: dimensions, and parameters counted from them. From config.json, or published.

No torch. Counts are exact for the families named here; for others a folder's safetensors headers give the count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import BadSpec
from engine.models.folder import SCALAR_ARCHITECTURE
from engine.models.size import folder_parameter_count


@dataclass(frozen=True, slots=True)
class Family:
    """How a `model_type` departs from Llama. A string names the config's key that decides."""

    norms: int = 2
    """RMSNorms of the hidden size per layer."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    """RMSNorms of the head size on queries and on keys."""
    gated: bool = True
    layer_norm: bool = False
    """LayerNorm, with a bias, instead of RMSNorm."""
    tied: bool = False
    head_dim: int | None = None
    """Defaults where config.json is silent."""


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True, head_dim=128),
    "smollm3": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
    "granite": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "phi3": Family(),
    "gemma": Family(qkv_bias="attention_bias", output_bias="attention_bias", tied=True, head_dim=256),
    "gemma2": Family(
        norms=4, qkv_bias="attention_bias", output_bias="attention_bias", tied=True, head_dim=256
    ),
    "gemma3_text": Family(
        norms=4, qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True, tied=True, head_dim=256
    ),
    "gpt_neox": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias=True, gated=False, layer_norm=True
    ),
}
_TRUE_BY_DEFAULT = {("gpt_neox", "attention_bias")}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. All counts are elements, not bytes."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Longest sequence, tokens."""
    parameters: int
    tied: bool
    gated: bool = True
    scalar: bool = False
    """One number per token, by a head of as many elements as the hidden size; no logits."""

    @property
    def queries(self) -> int:
        """Features of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of a token's keys; of its values, as many."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head: the largest tensors."""
        return self.vocabulary * self.hidden

    @property
    def language_head(self) -> int:
        """Elements of the matrix that gives logits, the embedding's where they are tied."""
        return 0 if self.scalar else self.embedding

    @property
    def own_head(self) -> int:
        """Elements of a language head that no embedding shares."""
        return 0 if self.tied else self.language_head

    def with_scalar_head(self, *, beside_adapter: bool = False) -> ModelShape:
        """The same decoder under a scalar head; the base that adapters share keeps its language head."""
        if self.scalar:
            return self
        dropped = 0 if beside_adapter else self.own_head
        return replace(self, parameters=self.parameters - dropped + self.hidden, scalar=True)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's linear layers."""
        up = [(self.hidden, self.intermediate)] * (2 if self.gated else 1)
        attention = [(self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys)]
        return [*attention, (self.queries, self.hidden), *up, (self.intermediate, self.hidden)]

    @property
    def layer_linear(self) -> int:
        """Elements of one layer's matrices."""
        return sum(i * o for i, o in self.linears)

    def lora(self, rank: int) -> int:
        """Elements of a LoRA pair of that rank on every linear layer but the head: rank * (in + out) each."""
        return self.layers * rank * sum(i + o for i, o in self.linears)


def shape_of(config: Mapping[str, Any], name: str, *, counted: int | None = None) -> ModelShape:
    """The shape in a config.json. `counted`: elements in the safetensors headers, which outrank our own count.

    Raises:
        BadSpec: a mixture of experts; a missing dimension; an unknown family of which nothing was counted.
    """
    kind = str(config.get("model_type", ""))
    experts = next((key for key in _EXPERTS if (config.get(key) or 0) > 1), None)
    if experts is not None:
        raise BadSpec(f"{name} is a mixture of experts ({experts}={config[experts]}); only dense models are planned")
    family = FAMILIES.get(kind)
    if family is None and counted is None:
        raise BadSpec(
            f"{name} is of the unknown model_type {kind!r}, and no safetensors file says how many parameters it has; "
            f"give a folder with weights, or one of the types {', '.join(FAMILIES)}"
        )
    family = family or Family()
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
        context=int(config.get("max_position_embeddings") or 4096),
        parameters=counted or 0,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        gated=family.gated,
        scalar=any(str(name).endswith(SCALAR_ARCHITECTURE) for name in config.get("architectures") or ()),
    )
    return shape if counted else _with_count(shape, family, config, kind)


def _with_count(shape: ModelShape, family: Family, config: Mapping[str, Any], kind: str) -> ModelShape:
    def has(flag: bool | str) -> bool:
        return flag if isinstance(flag, bool) else bool(config.get(flag, (kind, flag) in _TRUE_BY_DEFAULT))

    norm = shape.hidden * (2 if family.layer_norm else 1)
    layer = shape.layer_linear + family.norms * norm
    layer += (shape.queries + 2 * shape.keys) * has(family.qkv_bias) + shape.hidden * has(family.output_bias)
    layer += (shape.hidden + shape.intermediate * (2 if shape.gated else 1)) * has(family.mlp_bias)
    layer += 2 * shape.head_dim * family.head_norms
    total = shape.embedding + shape.own_head + shape.layers * layer + norm + shape.hidden * shape.scalar
    return replace(shape, parameters=total)


def _dimension(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise BadSpec(f"config.json of {name} has {key}={value!r}; expected a positive number")
    return value


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
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
"""Published dimensions, by the size that people call them."""


def preset(size: str) -> ModelShape | None:
    """The shape of a size in PRESETS, or None."""
    if size not in PRESETS:
        return None
    model, config = PRESETS[size]
    return shape_of(config, f"{size} ({model})")


def read_shape(folder: Path) -> ModelShape:
    """The shape of a local Hugging Face folder, with the count of its safetensors files where it has some.

    Raises:
        BadSpec: no config.json, or one that says no shape.
        CorruptArtifact: a safetensors file without a header.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadSpec(f"{folder} has no readable config.json ({error}); give a Hugging Face model folder") from error
    counted = folder_parameter_count({file.name: file for file in sorted(folder.glob("*.safetensors"))})
    return shape_of(config, folder.name, counted=counted or None)
