"""What vLLM is built for: the architecture of a model's config, whose models can share it, and its options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.models.folder import UNKNOWN_CONTEXT, context_length_in

EXTENSION = "engine.backends.vllm.extension.Extension"
"""Import path of the class that runs inside vLLM's workers: it loads weights, and reads them back from live layers."""

_IGNORED_KEYS = {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of config.json that do not describe the architecture."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How vLLM is built for one architecture. Derived from a `VllmSpec` and a trainer."""

    dtype: Literal["float32", "bfloat16"]
    max_context: int
    """Longest prompt and completion together, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tensor_parallel: int = 1
    kv_cache_bytes: int | None = None
    """Bytes of the KV cache. None: what `gpu_share` leaves."""
    gpu_share: float = 0.9
    """Part of a GPU's memory that vLLM may take, weights and KV cache."""
    eager: bool = True
    """Whether vLLM runs without compilation and CUDA graphs."""
    max_lora_rank: int | None = None
    """Highest rank of a LoRA adapter. None: built without LoRA, which costs a third of the decoding speed."""
    max_loras: int = 1
    """Number of adapters that decode together."""
    lora_targets: tuple[str, ...] = ()
    """Last parts of the names of the layers that adapters may change. Never the head, with which vLLM cannot score
    prompts."""
    sleep: bool = False
    """Whether `sleep` frees memory."""
    max_rows: int = 256
    """Completions that decode together, at most."""
    extension: str = EXTENSION
    """Import path of the class that runs inside vLLM's workers."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The architecture of one config folder. Models of equal `digest` differ only in their weights."""

    digest: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


def architecture_of(folder: Path, eos_token_ids: Sequence[int] | None = None) -> Architecture:
    """Reads config.json and, if it exists, generation_config.json.

    `eos_token_ids` are the ids that end a turn; None: those of the configs."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text_config = config.get("text_config", config)
    generation_file = folder / "generation_config.json"
    generation_config = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    if eos_token_ids is None:
        eos_token_ids = _eos_token_ids(generation_config, config, text_config)
    described = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    digested = json.dumps([described, eos_token_ids], sort_keys=True).encode()
    return Architecture(
        digest=hashlib.sha256(digested).hexdigest(),
        vocab_size=int(text_config["vocab_size"]),
        context_length=context_length_in(text_config) or UNKNOWN_CONTEXT,
        eos_token_ids=tuple(eos_token_ids),
    )


def _eos_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of the first config that has some."""
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            if isinstance(ids, list):
                return tuple(ids)
            return (ids,) if isinstance(ids, int) else ()
    return ()
