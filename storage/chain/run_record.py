"""run.json: the configuration that a run was started with, and the check that a resume has the same one."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal
from uuid import uuid4

from pydantic import JsonValue, ValidationError

from storage.chain.leases import check_not_deleted
from storage.chain.records import PolicyRef
from storage.errors import CorruptArtifact, ObjectNotFound, SemanticMismatch
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.index import record_run
from storage.store.objects import ObjectStore, read_json, store_id

PACKAGES = (
    "ostinato", "prefect", "torch", "transformers", "vllm", "deepspeed", "numpy", "pyarrow", "safetensors",
    "tokenizers",
)  # fmt: skip
"""Distributions whose versions are recorded, because a result may depend on them."""
_ABSENT = "(absent)"


class RunInfo(Frozen):
    """The content of run.json, which never changes: what the run was started with."""

    schema_version: int = 1
    run: str
    semantic: dict[str, JsonValue]
    """Settings that decide the result: data, model, algorithm, sampling."""
    other: dict[str, JsonValue]
    """Settings that do not decide the result: loggers, URLs, worker counts, retention."""
    code_version: str
    machine: dict[str, JsonValue]
    attempt: str
    created: str
    warnings: tuple[str, ...] = ()
    """What a person should know of the run's inputs, although it may start."""


class RunOpening(Frozen):
    """The result of create_or_check_run."""

    created: bool
    """Whether the run is new. False for a resume."""
    warnings: tuple[str, ...]
    """Those of the run, then differences from its start that do not change its meaning."""
    info: RunInfo


def create_or_check_run(
    store: ObjectStore,
    run: str,
    *,
    semantic: Mapping[str, Any],
    other: Mapping[str, Any],
    code_version: str,
    warnings: tuple[str, ...] = (),
) -> RunOpening:
    """Records a new run, or checks that the recorded one has the same semantic configuration.

    Raises SemanticMismatch, which names each differing key, both values, and what to do. Another code version, package
    or machine is only a warning, so that a run can be resumed after a bug was fixed. Raises RunBeingDeleted.
    """
    check_not_deleted(store, keys.validate_run(run))
    new_info = RunInfo(
        run=run,
        semantic=json.loads(canonical_json(dict(semantic))),
        other=json.loads(canonical_json(dict(other))),
        code_version=code_version,
        machine=machine_info(),
        attempt=uuid4().hex,
        created=datetime.now(UTC).isoformat(),
        warnings=warnings,
    )
    # give the store an id, so that it is recognized after its disk was unmounted
    store_id(store)
    record_run(store, run)
    put = store.put_if_absent(keys.run_json(run), canonical_json(new_info))
    if put.won:
        return RunOpening(created=True, warnings=warnings, info=new_info)

    # the run exists: compare its configuration with this one
    recorded = _parse(put.data, keys.run_json(run))
    check_same_semantic(recorded, new_info.semantic)
    differences_noted = (*recorded.warnings, *_warnings(recorded, new_info))
    return RunOpening(created=False, warnings=differences_noted, info=recorded)


def check_same_semantic(recorded: RunInfo, semantic: Mapping[str, Any]) -> None:
    """Raises SemanticMismatch if a run was started with other settings that decide its result."""
    differences = list(_differences(recorded.semantic, json.loads(canonical_json(dict(semantic)))))
    if differences:
        listed = "\n".join(f"  {key}: the run has {old}, given {new}" for key, old, new in differences)
        raise SemanticMismatch(
            f"run {recorded.run!r} was started with another configuration:\n{listed}\n"
            "resume it with its own values, choose another run key, or fork it ('ostinato fork') to change them mid-way"
        )


def read_run(store: ObjectStore, run: str) -> RunInfo:
    """Reads what a run was started with. Raises ObjectNotFound, CorruptArtifact."""
    return _parse(store.get(keys.run_json(run)), keys.run_json(run))


def find_run(store: ObjectStore, run: str) -> RunInfo | None:
    """Like read_run, but returns None when there is no run.json: for a fork that has not run yet."""
    try:
        return read_run(store, run)
    except ObjectNotFound:
        return None


def machine_info() -> dict[str, JsonValue]:
    """Returns the versions of Python, the platform and PACKAGES."""
    packages: dict[str, JsonValue] = {}
    for name in PACKAGES:
        installed = _installed_version(name)
        if installed is not None:
            packages[name] = installed
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}


@cache
def _installed_version(name: str) -> str | None:
    """Returns the version of a distribution, or None if it is absent. Cached: its metadata file is parsed each time."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parse(data: bytes, key: str) -> RunInfo:
    try:
        return RunInfo.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable run (or of a newer version): {error}") from error


def _warnings(recorded: RunInfo, current: RunInfo) -> Iterator[str]:
    if recorded.code_version != current.code_version:
        yield f"code version: the run was started by {recorded.code_version}, this is {current.code_version}"
    for key, old, new in _differences(recorded.machine, current.machine):
        yield f"{key}: the run was started with {old}, this is {new}"


def _differences(old: JsonValue, new: JsonValue, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, old value, new value) of each leaf that differs."""
    # descend into dictionaries, and compare everything else as a whole
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            key_path = f"{path}.{key}" if path else key
            if key not in old:
                yield key_path, _ABSENT, json.dumps(new[key])
            elif key not in new:
                yield key_path, json.dumps(old[key]), _ABSENT
            else:
                yield from _differences(old[key], new[key], key_path)
    # True == 1 in Python, but not in a configuration
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield path, json.dumps(old), json.dumps(new)


class StageInfo(Frozen):
    """The content of stage.json, written by the first model that begins the stage."""

    start: PolicyRef
    reference: PolicyRef
    optimizer: Literal["reset"] = "reset"


def claim_stage(store: ObjectStore, start: PolicyRef) -> None:
    """Records `start` as the start of its stage, unless the stage has begun already."""
    info = StageInfo(start=start, reference=start)
    store.put_if_absent(keys.stage_json(start.run, start.stage), canonical_json(info))


def stage_owner(store: ObjectStore, run: str, stage: str) -> str | None:
    """Returns the name of the model that began the stage, or None if it has not begun. Raises CorruptArtifact."""
    key = keys.stage_json(run, stage)
    body = read_json(store, key)
    if body is None:
        return None
    try:
        return StageInfo.model_validate(body).start.model
    except ValidationError as error:
        raise CorruptArtifact(f"{key} does not say what the stage starts from: {error}") from error
