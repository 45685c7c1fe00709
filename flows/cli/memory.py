"""The command line's memory of unfinished runs, so that the same command again resumes instead of starting anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from uuid import uuid4

from flows.configs.common import FlowConfig
from storage.serialization import canonical_json, digest

MEMORY = Path(".ostinato") / "unfinished.json"


def find_or_create_run_key(flow: str, config: FlowConfig, *, new: bool) -> tuple[str, bool]:
    """(run key, whether it is an unfinished run of an equal config). A new key is remembered until `forget_run_key`."""
    known = _read()
    name = _name(flow, config)
    if not new and name in known:
        return known[name], True
    run = f"{flow}-{uuid4().hex[:8]}"
    _write(known | {name: run})
    return run, False


def forget_run_key(flow: str, config: FlowConfig) -> None:
    """The run is finished: the next equal command is a new one."""
    known = _read()
    known.pop(_name(flow, config), None)
    _write(known)


def _name(flow: str, config: FlowConfig) -> str:
    """Equal flow, semantic config and store. The run's own key is no part of it."""
    return digest(canonical_json([flow, config.semantic(), config.storage.url]))[:16]


def _read() -> dict[str, str]:
    if not MEMORY.is_file():
        return {}
    return dict(json.loads(MEMORY.read_text()))


def _write(known: dict[str, str]) -> None:
    MEMORY.parent.mkdir(exist_ok=True)
    # renamed into place: a kill in the middle must not lose the keys of other runs
    temporary = MEMORY.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(MEMORY)
