"""Recognition of out-of-memory errors, and the second try with half the tokens per forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from engine.backends.torch.packing import Packable, longest_unit
from engine.errors import OutOfMemory

T = TypeVar("T")

_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # of an allocation that torch's allocator did not make
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device or the CPU is out of memory. The CPU's allocator and CUDA's libraries raise plain
    RuntimeErrors."""
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(part in message for part in _MESSAGES)


def retry_on_out_of_memory(
    run: Callable[[int], T],
    sequences: Sequence[Packable],
    max_tokens: int,
    *,
    device: torch.device,
    drop_gradients: Callable[[], None],
    whole_groups: bool = False,
) -> T:
    """Returns `run(max_tokens)`. If it runs out of memory, it is run once more from the start, with half the tokens.

    `drop_gradients` drops those of the failed try. With `whole_groups`, no group is split over micro-batches. Raises
    OutOfMemory when half of the tokens do not fit either.
    """
    tokens = max_tokens
    for _ in range(2):
        try:
            return run(tokens)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        # Free memory after the `except` block: the traceback there holds the tensors of the failed forward pass.
        drop_gradients()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        failed, longest = tokens, longest_unit(sequences, whole_groups=whole_groups)
        tokens = max(max_tokens // 2, longest)
        if tokens >= failed:
            break
    raise OutOfMemory(
        f"a pass of at most {failed} packed tokens (longest {'pair' if whole_groups else 'sequence'} {longest}) does "
        f"not fit {device} memory: {reason}. Lower max_tokens_per_forward (max_batch_size, now "
        f"{max_tokens}) or the longest sequence, or free memory held by other processes"
    )
