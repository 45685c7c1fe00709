"""What the machine can do, and what each phase of our steps needs: operations and bytes.

The bound of a phase is the sum over its parts of max(operations / GEMM peak, bytes / memory bandwidth). A phase's share
of the roofline is its bound divided by its CPU time.

N is the number of elements of the model's matrices, the head included. Operations per token:

    forward           2 N + attention                (logprobs, prefill, decoding)
    forward, backward 6 N + 3 x attention            (training)

The head counts for trained or sampled tokens only, and attention for pairs (query, key) that are attended: see
bench/gpu/flops.py. A prompt that several sequences of a group share counts once. Bytes: decoding a token reads all
weights once per decoding step in bfloat16, and the keys and values of every row. AdamW reads weight, gradient and two
moments, and writes weight and moments, all in float32.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu.flops import Work, forward_flops, model_flops
from bench.speed.turns import Setting, Turns
from engine.memory_plan.shape import ModelShape, shape_of

ROWS = 1024
"""Rows of the measured matrix products: the tokens of a step."""
SECONDS = 0.15
"""Least CPU time of one measurement."""
STREAM_ELEMENTS = 1 << 25
"""float32 elements that the measurement of the memory bandwidth reads: more than any cache holds."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Sequences = list[tuple[str, int, int]]
"""(group, tokens, trained tokens at the end) of each sequence. Sequences of a group share what is not trained."""
Part = dict[str, float]
"""Operations and bytes that overlap."""


def shape_of_folder(model: str) -> ModelShape:
    """The dimensions of the model in this folder."""
    return shape_of(json.loads(Path(model, "config.json").read_text()), "model")


# -- what a phase needs --------------------------------------------------------------------------------------------


def causal(length: int) -> int:
    """Attended pairs of a causal sequence."""
    return length * (length + 1) // 2


def work_of(sequences: Sequences) -> Work:
    """The tokens, pairs and trained tokens of one pass over the sequences, with shared prompts computed once."""
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for group, length, trained in sequences:
        groups[group].append((length - trained, trained))
    tokens = pairs = all_trained = 0
    for members in groups.values():
        prefix = min(prompt for prompt, _ in members)
        tokens += prefix
        pairs += causal(prefix)
        for prompt, trained in members:
            own = prompt - prefix + trained
            tokens += own
            pairs += own * prefix + causal(own)
            all_trained += trained
    return Work(tokens=tokens, pairs=pairs, trained=all_trained)


def train_parts(shape: ModelShape, sequences: Sequences) -> list[Part]:
    """One forward and backward pass, and one AdamW update of float32 weights."""
    return [
        {"flops": model_flops(shape, work_of(sequences)), "bytes": 0.0},
        {"flops": 0.0, "bytes": 7 * 4.0 * shape.parameters},
    ]


def score_parts(shape: ModelShape, sequences: Sequences) -> list[Part]:
    """One forward pass."""
    return [{"flops": forward_flops(shape, work_of(sequences)), "bytes": 0.0}]


def decode_parts(shape: ModelShape, prompts: list[int], new_tokens: int, *, prompts_once: int = 1) -> list[Part]:
    """The prefill of the prompts, and `new_tokens` decoding steps of all rows. `prompts` has the tokens of each row's
    prompt, of which `prompts_once` rows after one another share one. The prefill samples the first token."""
    unique = prompts[::prompts_once]
    prefill = Work(tokens=sum(unique), pairs=sum(map(causal, unique)), trained=len(unique))
    rows, steps = len(prompts), new_tokens - 1
    # in decoding step k, a row attends to its prompt, to the k tokens before, and to itself
    pairs = sum(prompts) * steps + rows * causal(steps)
    decoding = Work(tokens=rows * steps, pairs=pairs, trained=rows * steps)
    key_values = pairs * 2 * shape.keys * shape.layers
    weights = steps * (shape.layers * shape.layer_linear + shape.embedding)
    return [
        {"flops": forward_flops(shape, prefill), "bytes": 0.0},
        {"flops": forward_flops(shape, decoding), "bytes": 2.0 * (weights + key_values)},
    ]


def bound_seconds(parts: list[Part], *, peak: float, bandwidth: float) -> float:
    """The least time of the parts, one after the other. `peak` in operations, `bandwidth` in bytes per second."""
    return sum(max(part["flops"] / peak, part["bytes"] / bandwidth) for part in parts)


# -- what the machine can do ---------------------------------------------------------------------------------------


def machine(setting: Setting, turns: Turns) -> None:
    """An arm that measures the machine: operations per second of the model's matrix products, and bytes per second.

    Reports them as the phases of the turn."""
    shape = shape_of_folder(setting.model)
    sizes = sorted({*shape.linears, (shape.hidden, shape.vocabulary)})
    stream = torch.ones(STREAM_ELEMENTS)
    other = torch.ones(STREAM_ELEMENTS)
    while turns.begin():
        measured: dict[str, float] = {}
        for dtype_name, dtype in DTYPES.items():
            for inputs, outputs in sizes:
                measured[f"{dtype_name} {ROWS}x{inputs}x{outputs}"] = gemm_speed(inputs, outputs, dtype)
        measured["read sum"] = repeated(stream.sum, stream.nbytes)
        measured["read dot"] = repeated(lambda: stream.dot(other), 2 * stream.nbytes)
        turns.end(0, phases=measured)


def gemm_speed(inputs: int, outputs: int, dtype: torch.dtype) -> float:
    """Operations per CPU-second of a linear layer on ROWS rows."""
    values, weight = torch.randn(ROWS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return repeated(lambda: torch.nn.functional.linear(values, weight), 2.0 * ROWS * inputs * outputs)


def repeated(call: Callable[[], object], amount: float) -> float:
    """`amount` times the calls per CPU-second, after one call that is not counted."""
    call()
    began, calls = time.process_time(), 0
    while time.process_time() - began < SECONDS:
        call()
        calls += 1
    return amount * calls / (time.process_time() - began)
