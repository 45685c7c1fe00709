"""The formulas of a memory plan: bytes of weights, gradients, moments, activations, logits and KV caches.

    P parameters · N ranks · T packed tokens · C tokens of a logits chunk · H hidden · Q query features · K key features
    I intermediate · V vocabulary · L layers · c bytes per number in the compute dtype (4 float32, 2 bfloat16)

The activations are counted by the method of arXiv:2205.05198, applied to the tensors that our own forward pass saves
for the backward pass. The other numbers come from the code that allocates the memory; each formula names it. The
states of ZeRO are counted by engine.backends.deepspeed.memory."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory_plan.shape import ModelShape

CHUNK_BYTES = 1 << 29
"""Equal to engine.backends.torch.causal_lm.CHUNK_BYTES, which cannot be imported here because it needs torch. A test
compares the two."""
MASTER_BYTES = 4
"""Bytes of a float32 number: master weights, moments, and gradients of the torch trainer."""
BATCHED_TOKENS = 8192
"""Tokens of one forward of vLLM (max_num_batched_tokens). vLLM reserves memory for them when it starts."""


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
