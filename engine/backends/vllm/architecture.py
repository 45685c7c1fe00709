"""What a model's config says of its samplers: who can share one, and within which limits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_THE_ARCHITECTURE = {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Of one config folder. Models of equal `digest` differ in their weights only."""

    digest: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


def architecture_of(folder: Path) -> Architecture:
    """Reads config.json and, where there is one, generation_config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    generation = folder / "generation_config.json"
    said = json.loads(generation.read_text()) if generation.is_file() else {}
    eos = next((c["eos_token_id"] for c in (said, config, text) if c.get("eos_token_id") is not None), ())
    ids = tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_ARCHITECTURE}
    whole = json.dumps([kept, ids], sort_keys=True).encode()
    return Architecture(
        digest=hashlib.sha256(whole).hexdigest(),
        vocab_size=int(text["vocab_size"]),
        context_length=int(text.get("max_position_embeddings", 1 << 30)),
        eos_token_ids=ids,
    )
