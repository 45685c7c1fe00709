"""Checks a config as a whole before its run is created: every wrong field at once, and what the run would take.

A run itself stops at the first group of problems (flows.configs.overrides, then flows.runs.input_checks). A form shows
all of them at their fields.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.models.hub import hub_repo_of_key
from engine.specs.engine import EngineSpec
from engine.validation_messages import field_keys
from flows.configs.common import TrainingConfig
from flows.configs.evaluation import EvaluationFlowConfig, Suite, semantic
from flows.configs.forms import FormConfig, merge_further
from flows.configs.overrides import WHOLE, ConfigError, load_config, validation_problems
from flows.runs.durations import measure_store
from flows.runs.estimate import estimate
from flows.runs.input_checks import check_length, check_warmup, hub_commits, input_problems
from flows.runs.session import workspace_of
from storage.chain.leases import check_not_deleted
from storage.chain.run_record import check_same_semantic, find_run
from storage.errors import StorageError
from storage.store.objects import ObjectStore
from tasks.load import load_prompts

MAX_ROUNDS = 8
"""How often a config is validated without the values that were wrong."""
STAND_INS: dict[str, Any] = {"key": ".", "path": "tasks.graders:ExactMatch", "train": {"kind": "file", "path": "."}}
"""Values in place of missing ones, so that the rules about several fields are checked, too."""
REMEDY = "give it"
MISSING_KEY = f"missing; {REMEDY}"
PREFLIGHT_RUN = "preflight"
"""Key of a run that is never created. Only a run that exists has commits of the hub of its own."""


@dataclass(frozen=True)
class CheckedConfig:
    """The result of a check."""

    config: FormConfig | None
    """None: it has problems."""
    problems: dict[str, str]
    """Dotted path of the field, or WHOLE -> what is wrong with it."""


def check_config(model: type[FormConfig], values: dict[str, Any], store: ObjectStore) -> CheckedConfig:
    """Checks values for a config of a flow, and that what they name is there. Writes nothing."""
    problems: dict[str, str] = {}
    trial, config = copy.deepcopy(merge_further(values)), None
    # after each round without the values that were wrong, so that the rules about the others are reached
    for _ in range(MAX_ROUNDS):
        try:
            config = model.model_validate(trial)
            break
        except ValidationError as error:
            for path, message in validation_problems(error, model, trial, remedy=REMEDY):
                problems.setdefault(path, message)
            if not _leave_out(trial, error):
                break
    if config is None:
        return CheckedConfig(None, problems or {WHOLE: "the config does not fit"})
    for path, message in (*_problems_of_key(config, store), *_problems_outside(config, store)):
        # the stand-in of a wrong value is not there either
        if not any(path == known or path.startswith(f"{known}.") for known in problems):
            problems[path] = message
    # of a missing group, its missing keys are named
    for path in [path for path, message in problems.items() if message == MISSING_KEY]:
        if any(other.startswith(f"{path}.") for other in problems):
            del problems[path]
    return CheckedConfig(None if problems else config, problems)


def _leave_out(values: dict[str, Any], error: ValidationError) -> bool:
    """Removes the wrong values, and puts stand-ins in place of missing ones. Returns whether anything changed."""
    changed = False
    for problem in error.errors(include_url=False):
        path = field_keys(problem, values)
        group: Any = values
        for part in path[:-1]:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if not path or not isinstance(group, dict):
            # an item of a list, or a rule about the whole config
            if len(path) > 1 and values.pop(path[0], None) is not None:
                changed = True
        elif problem["type"] == "missing":
            name = path[-1]
            is_group = isinstance(group.get(name), dict) or name not in STAND_INS
            group[name] = {} if is_group else copy.deepcopy(STAND_INS[name])
            changed = True
        elif path[-1] in group:
            del group[path[-1]]
            changed = True
    return changed


def _problems_of_key(config: FormConfig, store: ObjectStore) -> Iterator[tuple[str, str]]:
    """Yields (path, message) if the run's key belongs to a run with other settings. What its data and model contain is
    compared only when the run opens, which loads them."""
    if isinstance(config, TrainingConfig):
        settings = config.semantic()
    elif isinstance(config, EvaluationFlowConfig) and isinstance(config.suite, Suite):
        settings = semantic(config.suite)
    else:
        return
    if not config.run:
        return
    try:
        check_not_deleted(store, config.run)
        recorded = find_run(store, config.run)
        if recorded is not None:
            inputs = {name: value for name, value in recorded.semantic.items() if name == "inputs"}
            check_same_semantic(recorded, settings | inputs)
    except StorageError as error:
        yield "run", str(error)


def _problems_outside(config: FormConfig, store: ObjectStore) -> Iterator[tuple[str, str]]:
    """Yields (path, message) of the inputs that are not there, and of a warm-up that is too long."""
    try:
        if isinstance(config, TrainingConfig):
            check_warmup(config)
    except ConfigError as error:
        # the message begins with the field, such as optimizer.warmup_steps=20
        yield str(error).partition("=")[0], str(error)
    commits: dict[str, str] = {}
    try:
        commits = hub_commits(config, store, PREFLIGHT_RUN)
    except ConfigError as error:
        for line in str(error).splitlines():
            path, _, message = line.partition(": ")
            yield path, message
        return
    for imports_code in (False, True):
        yield from input_problems(config, store, commits, imports_code=imports_code)


async def expected_of_run(config: TrainingConfig, store: ObjectStore, engine: EngineSpec) -> str:
    """Returns what a run of a checked config would take, in one line. Loads its datasets into the store, where the run
    finds them.

    Raises:
        DoesNotFit: the engine's memory or the store's disk cannot hold the run.
        ConfigError: the data has fewer rows than a batch.
        EngineError, StorageError: the engine does not answer, or the data cannot be read.
    """
    if hub_repo_of_key(config.model.key) is not None:
        return "no estimate: the model is downloaded from the hub first; the log of the run has the estimate"
    workspace = workspace_of(config, config.run or PREFLIGHT_RUN).model_copy(
        update={"engine": engine, "store": store.url}
    )
    inputs = list(config.data.inputs.values())
    heldout_rows = config.data.heldout_rows
    if heldout_rows is not None:
        inputs.append((heldout_rows, config.data.heldout_use))
    # in threads, so that the caller's event loop serves others
    loaded = [await asyncio.to_thread(load_prompts, workspace, source, use) for source, use in inputs]
    datasets, heldout = loaded[: len(config.data.inputs)], next(iter(loaded[len(config.data.inputs) :]), None)
    check_length(config, *(data.rows for data in datasets))
    info, speed = await workspace.connect().info(), await asyncio.to_thread(measure_store, store)
    expected = estimate(store, config, None, datasets, info, heldout=heldout, speed=speed)
    expected.check(info)
    return expected.text(info)


def group_of_fields(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Returns the group whose keys have fields of their own in a form. None: the value has one field as a whole."""
    field = model.model_fields.get(name)
    group = getattr(model, "form_groups", {}).get(name, field.annotation if field else None)
    return group if isinstance(group, type) and issubclass(group, BaseModel) else None


def field_texts(model: type[BaseModel], values: dict[str, Any]) -> dict[str, str]:
    """Returns dotted path -> text of each key of a config that a form has a field for. A group of one kind has a field
    for each of its keys; any other value has a field as a whole."""
    return {path: _text(value) for path, value in _flat(model, values, "")}


def _flat(model: type[BaseModel], values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        inner = group_of_fields(model, name)
        if inner is not None and isinstance(value, dict):
            yield from _flat(inner, value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    """The text that a field shows for a value, and that is read back as it."""
    if isinstance(value, str):
        try:
            if load_config(None, [f"a={value}"]) == {"a": value}:
                return value
        except ConfigError:
            pass
    return json.dumps(value, ensure_ascii=False)
