"""`ModelShape`: the dimensions of a model that decide its memory, and the number of its parameters. Without torch.

A shape comes from a config.json or from published dimensions. The count of parameters is exact for the families named
here; for other families it comes from the headers of the folder's safetensors files.

The formulas of a memory plan follow from a shape: bytes of activations, logits and KV caches. The activations are
counted by the method of arXiv:2205.05198, applied to the tensors that our own forward pass saves for the backward pass.
The other numbers come from the code that allocates the memory; each formula names it.

    P parameters · N ranks · T packed tokens · C tokens of a logits chunk · H hidden · Q query features · K key features
    I intermediate · V vocabulary · L layers · c bytes per number in the compute dtype (4 float32, 2 bfloat16)
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

CHUNK_BYTES = 1 << 29
"""Equal to engine.backends.torch.causal_lm.CHUNK_BYTES, which cannot be imported here because it needs torch. A test
compares the two."""
MASTER_BYTES = 4
"""Bytes of a float32 number: master weights, moments, and gradients of the torch trainer."""
BATCHED_TOKENS = 8192
"""Tokens of one forward of vLLM (max_num_batched_tokens). vLLM reserves memory for them when it starts."""


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


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a model's training state on one rank."""

    weights: float
    gradients: float
    optimizer: float
    """Both moments, and the master weights if they are not the same tensors as `weights`."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def torch_states(parameters: int, *, master: int = MASTER_BYTES) -> StateBytes:
    """The torch trainer's state: master weights (computed with under autocast), their gradients and two moments.

    `master` is the number of bytes of a master weight.
    """
    return StateBytes(master * parameters, master * parameters, 2 * master * parameters)


def autocast_weights(shape: ModelShape, compute: int, *, master: int = MASTER_BYTES) -> float:
    """Copies of the matrices in the compute dtype: c(L * matrices + VH), without VH for a scalar head.

    Autocast makes each copy on first use, and the graph keeps it until the backward pass ends. It makes none where both
    dtypes are equal.
    """
    if compute == master:
        return 0.0
    return compute * (shape.layers * shape.layer_linear + shape.language_head)


def layer_activations(shape: ModelShape, *, compute: int, autocast: bool) -> int:
    """Bytes that one layer saves per token for its backward pass.

    Float32: 4(6H + 4Q + 2K + 4I). Each of the two norms saves its input, the normalised input and its output (6H).
    Attention saves queries, keys and values as it gathers them, its output, the packed output and the projection's
    input (4Q + 2K). The MLP saves gate, up, silu(gate) and their product (4I); without a gate it saves up and its
    activation (2I). Bfloat16 weights: the norms compute in float32 and save their float32 input: 2(4 + 2 + 2)H + 2(4Q
    + 2K + 4I). Float32 weights under autocast: the residual stream is float32, and every linear layer saves a bfloat16
    copy of its input: 4 * 4H + 2 * 5H + 2(4Q + 2K + 4I)."""
    mlp = (4 if shape.gated else 2) * shape.intermediate
    attention_and_mlp = 4 * shape.queries + 2 * shape.keys + mlp
    if compute >= MASTER_BYTES:
        return compute * (6 * shape.hidden + attention_and_mlp)
    # Bytes per hidden feature: 26 = 4 * 4 + 2 * 5 under autocast, 16 = 2 * (4 + 2 + 2) with bfloat16 weights.
    hidden_bytes = 26 if autocast else 16
    return hidden_bytes * shape.hidden + compute * attention_and_mlp


def activations(shape: ModelShape, tokens: int, *, compute: int, autocast: bool, recompute: str) -> tuple[int, int]:
    """(bytes on the device, bytes in the machine's memory) that a forward pass of `tokens` tokens saves.

    "none" saves the activations of every layer. "recompute" saves the input of every layer (the residual stream), and
    all activations of the one layer that is computed again. "offload" keeps these inputs in the machine's memory.
    """
    one_layer = tokens * layer_activations(shape, compute=compute, autocast=autocast)
    if recompute == "none":
        return shape.layers * one_layer, 0
    # Under autocast the residual stream is float32.
    residual_bytes = max(compute, MASTER_BYTES) if autocast else compute
    inputs = shape.layers * tokens * shape.hidden * residual_bytes
    if recompute == "offload":
        return one_layer, inputs
    return one_layer + inputs, 0


def head_activations(shape: ModelShape, tokens: int, *, compute: int, trained: bool = True) -> int:
    """Bytes of the logits and their gradient at the start of the backward pass, if every token is trained.

    At most CHUNK_BYTES of logits are held at once; more are computed chunk by chunk. A logit and its gradient are held
    in the compute dtype (engine.backends.torch.causal_lm). A `trained` head adds its gradient in the compute
    dtype, in float32 too where that dtype is lower, and the float32 sum over the chunks. A scalar head has no logits:
    it saves its input, gathered and in its own precision."""
    if shape.scalar:
        # A lower precision is kept in addition to the float32 input.
        input_bytes = compute if compute >= MASTER_BYTES else compute + MASTER_BYTES
        return tokens * shape.hidden * input_bytes

    # The tensors of the logits that are held at once.
    chunk = max(1, CHUNK_BYTES // (compute * shape.vocabulary))
    tokens_at_once = min(tokens, chunk)
    logits = 2 * compute * tokens_at_once * shape.vocabulary
    if not trained:
        return logits

    # When the gradient of the head is made, the logits are already freed, and their gradient is not.
    gradient_bytes = MASTER_BYTES
    if compute < MASTER_BYTES:
        gradient_bytes += compute
    if tokens > chunk:
        gradient_bytes += MASTER_BYTES
    return max(logits, logits // 2 + gradient_bytes * shape.embedding)


def kv_bytes_per_token(shape: ModelShape, compute: int) -> int:
    """Bytes of the keys and values of all layers: 2LKc."""
    return 2 * shape.layers * shape.keys * compute


def torch_sampling(shape: ModelShape, *, rows: int, context: int, prompt_tokens: int, compute: int) -> tuple[int, int]:
    """(KV cache, working memory) of the torch sampler while `rows` completions of `context` tokens decode, in bytes.

    The cache has room for whole rows. The working memory holds the keys and values of the prompts of one prefill twice,
    because they are copied out of it, and four float32 numbers per logit (logits, logits divided by the temperature,
    padded logits, their exponentials)."""
    cache = rows * context * kv_bytes_per_token(shape, compute)
    prefill = 2 * min(prompt_tokens, rows * context) * kv_bytes_per_token(shape, compute)
    return cache, prefill + 4 * MASTER_BYTES * rows * shape.vocabulary


def vllm_work(shape: ModelShape, *, rows: int, tensor_parallel: int, compute: int) -> int:
    """Bytes that vLLM reserves per GPU for one forward: hidden states and residuals, the MLP's two inputs, and the
    float32 logits of every row twice."""
    elements = BATCHED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate // tensor_parallel)
    return compute * elements + 2 * MASTER_BYTES * rows * shape.vocabulary
