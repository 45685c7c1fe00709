"""The formulas of a memory plan: bytes of weights, gradients, moments, activations, logits and KV caches.

    P parameters · N ranks · T packed tokens · C tokens of a logits chunk · H hidden · Q query features · K key features
    I intermediate · V vocabulary · L layers · c bytes per number in the compute dtype (4 float32, 2 bfloat16)

The states of ZeRO are counted by engine.backends.deepspeed.memory. Sources: the counting method of arXiv:2205.05198 for
activations, applied to what our own forward saves for its backward pass; the rest from the code that holds it, named
below.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory_plan.shape import ModelShape

CHUNK_ELEMENTS = 1 << 26
"""Equal to engine.backends.torch.causal_lm.CHUNK_ELEMENTS, which imports torch; a test compares them."""
COMPACT_COPY = 1.75
"""The torch sampler drops finished rows by a copy of at most 3/4 of the cache while the old one is still held
(torch_sampler.COMPACT_BELOW)."""
MASTER = 4
"""Bytes of a float32 number: master weights, gradients of the torch trainer, moments."""
BATCHED_TOKENS = 8192
"""Tokens of one forward of vLLM (max_num_batched_tokens), for which it sets memory aside when it starts."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    """Master weights, where they are others than `weights`, and both moments."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def torch_states(parameters: int, *, master: int = MASTER) -> States:
    """The torch trainer: master weights that it computes with under autocast, their gradients, two moments."""
    return States(master * parameters, master * parameters, 2 * master * parameters)


def autocast_weights(shape: ModelShape, compute: int, *, master: int = MASTER) -> float:
    """Copies of the matrices in the compute dtype: autocast makes each on first use, and the graph keeps it until the
    backward pass is over. c(L * matrices + VH), without VH for a scalar head; nothing where both dtypes are equal."""
    return 0.0 if compute == master else compute * (shape.layers * shape.layer_linear + shape.language_head)


def layer_activations(shape: ModelShape, *, compute: int, autocast: bool) -> int:
    """Bytes that one layer saves per token for its backward pass.

    Float32: 4(6H + 4Q + 2K + 4I). Per norm its input, the normalised input and its output (6H); queries and keys and
    values as attention gathers them, attention's output, that output packed, the projection's input (4Q + 2K); gate,
    up, silu(gate) and their product (4I). A model without a gate has up, its activation and no product (2I).
    Bfloat16 weights: norms compute in float32, of which the input is kept: 2(4 + 2 + 2)H + 2(4Q + 2K + 4I).
    Float32 weights under autocast: the residual stream is float32 and every linear layer keeps a bfloat16 copy of its
    own input: 4 * 4H + 2 * 5H + 2(4Q + 2K + 4I).
    """
    attention = 4 * shape.queries + 2 * shape.keys + (4 if shape.gated else 2) * shape.intermediate
    if compute >= MASTER:
        return compute * (6 * shape.hidden + attention)
    return (26 if autocast else 16) * shape.hidden + compute * attention


def activations(shape: ModelShape, tokens: int, *, compute: int, autocast: bool, recompute: str) -> tuple[int, int]:
    """(bytes on the device, bytes in the machine's memory) that a forward of `tokens` tokens keeps.

    "none": every layer's. "recompute": every layer's input (its residual stream), and everything of the one layer that
    runs again. "offload": those inputs in the machine's memory.
    """
    layer = tokens * layer_activations(shape, compute=compute, autocast=autocast)
    if recompute == "none":
        return shape.layers * layer, 0
    inputs = shape.layers * tokens * shape.hidden * (max(compute, MASTER) if autocast else compute)
    return (layer, inputs) if recompute == "offload" else (layer + inputs, 0)


def head_activations(shape: ModelShape, tokens: int, *, compute: int, trained: bool = True) -> int:
    """Logits and their gradient at the start of the backward pass, if every token is trained.

    Up to 2 * CHUNK_ELEMENTS logits are held at once, more are computed chunk by chunk. Of the tokens at once: the
    logits, and of the gradient of their logsumexp the difference, its exponential and the product, all float32: 16
    bytes a logit. Besides, if the head is `trained`: its gradient in the compute dtype and, where that is lower, in
    float32, and the sum of the chunks' (float32). A scalar head keeps its input, gathered and in its own precision.
    """
    if shape.scalar:
        return tokens * shape.hidden * (compute if compute >= MASTER else compute + MASTER)
    chunk = max(1, CHUNK_ELEMENTS // shape.vocabulary)
    whole = tokens <= 2 * chunk
    at_once = tokens if whole else chunk
    logits = 4 * MASTER * at_once * shape.vocabulary
    gradient = (MASTER + (0 if compute >= MASTER else compute) + (0 if whole else MASTER)) * shape.embedding * trained
    # the head's gradient is made when two of these four are gone
    return max(logits, logits // 2 + gradient)


def kv_bytes_per_token(shape: ModelShape, compute: int) -> int:
    """Keys and values of all layers: 2LKc."""
    return 2 * shape.layers * shape.keys * compute


def torch_sampling(shape: ModelShape, *, rows: int, context: int, prompt_tokens: int, compute: int) -> tuple[int, int]:
    """(KV cache, work) bytes of the torch sampler while `rows` completions of `context` tokens decode.

    The cache is allocated for whole rows, and copied when rows are dropped. Work: the keys and values of the prompts
    of one prefill, and four float32 numbers a logit (logits, logprobs, noise, scores)."""
    cache = int(COMPACT_COPY * rows * context * kv_bytes_per_token(shape, compute))
    prefill = min(prompt_tokens, rows * context) * kv_bytes_per_token(shape, compute)
    return cache, prefill + 4 * MASTER * rows * shape.vocabulary


def vllm_work(shape: ModelShape, *, rows: int, tensor_parallel: int, compute: int) -> int:
    """What vLLM sets aside per GPU for one forward: hidden states and residuals, the MLP's two inputs, float32 logits
    of every row twice."""
    tokens = BATCHED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate // tensor_parallel)
    return compute * tokens + 2 * MASTER * rows * shape.vocabulary
