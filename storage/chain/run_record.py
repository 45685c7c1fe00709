"""A run and its key: the same key is the same run as long as what decides its result is the same."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import uuid4

from pydantic import JsonValue, ValidationError

from storage.errors import CorruptArtifact, ObjectNotFound, SemanticMismatch
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.identity import store_id
from storage.store.objects import ObjectStore

PACKAGES = (
    "ostinato", "prefect", "torch", "transformers", "vllm", "deepspeed", "numpy", "pyarrow", "safetensors",
    "tokenizers",
)  # fmt: skip
"""Distributions whose versions are recorded: those that a result may depend on."""
_ABSENT = "(absent)"


class RunInfo(Frozen):
    """runs/<run>/run.json: what the run was started with. It never changes."""

    schema_version: int = 1
    run: str
    semantic: dict[str, JsonValue]
    """What decides the result: data, model, algorithm, sampling."""
    other: dict[str, JsonValue]
    """What does not: loggers, URLs, worker counts, retention."""
    code_version: str
    machine: dict[str, JsonValue]
    attempt: str
    created: str


class RunOpening(Frozen):
    """The answer to create_or_check_run."""

    created: bool
    """False: the run existed, and this is a resume."""
    warnings: tuple[str, ...]
    """What differs from the start of the run without changing what it means."""
    info: RunInfo


def create_or_check_run(
    store: ObjectStore, run: str, *, semantic: Mapping[str, Any], other: Mapping[str, Any], code_version: str
) -> RunOpening:
    """Records the run, or checks that the recorded one means the same.

    Raises SemanticMismatch with each differing key, both values, and the way out. Another code version, package or
    machine is a warning: crash, fix the bug, deploy, resume must work.
    """
    mine = RunInfo(
        run=keys.validate_run(run),
        semantic=json.loads(canonical_json(dict(semantic))),
        other=json.loads(canonical_json(dict(other))),
        code_version=code_version,
        machine=machine_info(),
        attempt=uuid4().hex,
        created=datetime.now(UTC).isoformat(),
    )
    store_id(store)  # a store with an id is recognised again after its disk was away
    put = store.put_if_absent(keys.run_json(run), canonical_json(mine))
    if put.won:
        return RunOpening(created=True, warnings=(), info=mine)
    there = _parse(put.data, keys.run_json(run))
    if differing := list(_differences(there.semantic, mine.semantic)):
        listed = "\n".join(f"  {key}: the run has {old}, given {new}" for key, old, new in differing)
        raise SemanticMismatch(
            f"run {run!r} was started with another configuration:\n{listed}\n"
            "resume it with its own values, choose another run key, or fork it (`ostinato fork`) to change them mid-way"
        )
    return RunOpening(created=False, warnings=tuple(_warnings(there, mine)), info=there)


def read_run(store: ObjectStore, run: str) -> RunInfo:
    """What a run was started with. Raises ObjectNotFound, CorruptArtifact."""
    return _parse(store.get(keys.run_json(run)), keys.run_json(run))


def find_run(store: ObjectStore, run: str) -> RunInfo | None:
    """Like read_run, but returns None when there is no run.json: for a fork that has not run yet."""
    try:
        return read_run(store, run)
    except ObjectNotFound:
        return None


def machine_info() -> dict[str, JsonValue]:
    """Python, platform and the versions of the packages that a result may depend on."""
    packages: dict[str, JsonValue] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}


def _parse(data: bytes, key: str) -> RunInfo:
    try:
        return RunInfo.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable run (or of a newer version): {error}") from error


def _warnings(there: RunInfo, mine: RunInfo) -> Iterator[str]:
    if there.code_version != mine.code_version:
        yield f"code version: the run was started by {there.code_version}, this is {mine.code_version}"
    for key, old, new in _differences(there.machine, mine.machine):
        yield f"{key}: the run was started with {old}, this is {new}"


def _differences(old: JsonValue, new: JsonValue, at: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, old value, new value) of each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            where = f"{at}.{key}" if at else key
            if key not in old:
                yield where, _ABSENT, json.dumps(new[key])
            elif key not in new:
                yield where, json.dumps(old[key]), _ABSENT
            else:
                yield from _differences(old[key], new[key], where)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield at, json.dumps(old), json.dumps(new)
