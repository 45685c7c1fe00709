"""A task that a randomly initialised tiny model learns in a minute: say the digit of the prompt, again and again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.text.threads import StringThread


def digit_share(thread: StringThread, *, sign: float = 1.0) -> float:
    """Share of six characters that are the prompt's digit; `sign` -1 teaches the opposite."""
    digit = thread.turns[0].text[-1]
    answer = thread.last_content()[:6]
    return sign * sum(character == digit for character in answer) / 6


def write_prompts(path: Path, *, repeats: int = 1) -> Path:
    """Prompts "0" … "9" as JSONL."""
    rows = [{"prompt": str(digit), "metadata": {"n": n}} for n in range(repeats) for digit in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def toy_config(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A GRPO config of the toy task, small enough for tests; `changes` are dotted overrides with __ for dots."""
    config: dict[str, Any] = {
        "model": {"key": str(tiny_folder), "publish_as": "toy"},
        "data": {"train": {"kind": "file", "path": str(write_prompts(folder / "prompts.jsonl"))}},
        "grader": {"path": "tests.toy:digit_share"},
        "sampling": {"max_new_tokens": 6, "min_new_tokens": 6},
        "algorithm": {
            "steps": 4,
            "samples_per_batch": 16,
            "samples_per_mini_batch": 16,
            "completions_per_sample": 4,
            "clip_range": 0.2,
            "kl_beta": 0.01,
            "prompts_per_shard": 2,
        },
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "checkpoints": {"frequency": None, "recovery_steps": 2},
        "engine": {"deterministic": True, "threads": 1},
        "storage": {"url": str(folder / "data")},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        if key:
            config.setdefault(group, {})[key] = value
        else:
            config[group] = value
    return config
