"""A preference task that a tiny model learns in seconds: of two answers, the one that says the digit of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = 10


def write_pairs(path: Path) -> Path:
    """Digits "0" … "9": the chosen answer repeats the prompt's digit, the rejected one another."""
    rows = [{"prompt": str(n), "chosen": str(n) * 3, "rejected": str((n + 5) % ROWS) * 3} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_ratings(path: Path) -> Path:
    """The same answers, each a row of its own, rated 1 and -1."""
    answers = [(n, str((n + shift) % ROWS) * 3, 1.0 if shift == 0 else -1.0) for n in range(ROWS) for shift in (0, 5)]
    rows = [{"prompt": str(n), "completion": answer, "metadata": {"res": res}} for n, answer, res in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preference_config(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A config of `dpo` and `reward_model`, small enough for tests; `changes` are dotted overrides with __ for dots."""
    config: dict[str, Any] = {
        "model": {"key": str(tiny_folder), "publish_as": "toy"},
        "data": {"train": {"kind": "file", "path": str(write_pairs(folder / "pairs.jsonl"))}},
        "algorithm": {"steps": 4, "samples_per_batch": 4},
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
