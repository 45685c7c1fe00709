"""The config that a run was started with, read from the store. Written to a file, it continues the run or a fork of it.

The store has no file of a run that was started from a form, and none of a recipe. It contains no credentials, because
no config does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.catalogue import AnyTraining
from flows.configs.common import TrainingConfig
from flows.configs.distill import TEACHER
from flows.configs.evaluation import EvaluationFlowConfig, SuiteGrader
from flows.configs.forms import FormConfig
from flows.configs.overrides import RULES, describe_validation
from flows.ops.state import write_private
from storage.chain.fork import read_fork
from storage.chain.leases import check_not_deleted
from storage.chain.listing import run_chains, stages_of
from storage.chain.run_record import RunInfo, find_run, read_run
from storage.errors import CorruptArtifact, ObjectNotFound, StorageError
from storage.registry.datasets import list_datasets
from storage.registry.models import find_model, list_versions
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore

_ENGINE: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
_TRAINING: TypeAdapter[Any] = TypeAdapter(AnyTraining)
FLOW = "flow"
"""Key of the flow's name in the part of run.json that does not decide the result."""
HUB = "hub"
"""Key of the hub's commits in the same part."""


class _Dumper(yaml.SafeDumper):
    """Quotes texts that a config file or PyYAML would read as something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in RULES:
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class RecordedConfig:
    """The config of a run."""

    run: str
    flow: str | None
    """Name of the training flow. None for a recipe, whose values are its parameters."""
    values: dict[str, Any]
    """Values to write, without those that equal their default."""
    is_complete: bool = True
    """False for a run of an earlier version, which did not record all settings."""
    models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Digests of the models that the run began with, by the key of the config that names them."""

    @property
    def text(self) -> str:
        """The config as YAML."""
        command = "evaluate" if self.flow == "evaluation" else f"run {self.flow}"
        command = f"'ostinato {command} --config FILE'" if self.flow else "the parameters of its recipe"
        head = f"# The config of run {self.run}: {command}\n"
        if not self.is_complete:
            head += (
                "# An earlier version started the run, and did not record model.publish_as, data.heldout, and limits "
                "such as\n# grader.timeout_seconds. Add those that were set.\n"
            )
        return head + config_yaml(self.values)

    def copied(self, store: ObjectStore) -> dict[str, Any]:
        """The values for another run: without the key, and with the versions of models that this run began with, which
        `name` and `name@champion` may name no longer."""
        values = {name: value for name, value in self.values.items() if name != "run"}
        if self.flow == "evaluation":
            values["models"] = [self._with_version(store, key, "models") for key in values.get("models", ())]
        elif self.flow is not None:
            for part in ("model", "value_model", "teacher"):
                # a value model without a key begins as the policy
                if key := values.get(part, {}).get("key"):
                    values[part] = values[part] | {"key": self._with_version(store, key, part)}
            if teachers := values.get("teacher", {}).get("by_value"):
                versions = {value: self._with_version(store, key, "teacher") for value, key in teachers.items()}
                values["teacher"] = values["teacher"] | {"by_value": versions}
        return values

    def _with_version(self, store: ObjectStore, key: str, part: str) -> str:
        """`name@version` of a registered model that the run began with. Any other key is returned unchanged."""
        name = key.partition("@")[0]
        for version in list_versions(store, name) if keys.is_name(name) else ():
            ref = find_model(store, name, version)
            if ref is not None and ref.sha256 in self.models.get(part, ()):
                return f"{name}@{version}"
        return key

    @property
    def engine_token(self) -> str | None:
        """Name of the environment variable with the token of the engine server. None without an engine server."""
        engine = self.values.get("engine", {})
        return engine.get("token_env", "OSTINATO_ENGINE_TOKEN") if engine.get("kind") == "http" else None


def config_yaml(values: dict[str, Any]) -> str:
    """The values as YAML, which `flows.configs.overrides.load_config` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def read_config(store: ObjectStore, run: str) -> RecordedConfig:
    """Reads the config of a run. A fork that has not run yet has the config of its origin, with its own run key and
    store. Raises ObjectNotFound, CorruptArtifact, RunBeingDeleted."""
    check_not_deleted(store, run)
    info = _find_info(store, run)
    # only training flows and recipes have a seed of their own
    if "seed" not in info.semantic:
        # earlier versions recorded no evaluation's config
        if FLOW in info.other:
            return _evaluation_config(run, info)
        what = "a comparison, or an evaluation of an earlier version, and has no config"
        raise ObjectNotFound(f"run {run!r} trains nothing: it is {what}")
    is_fork = info.run != run
    values = {"run": run} | _merged(info.semantic, info.other) | {"run": run}
    # the run keeps its record of the hub's commits
    values.pop(HUB, None)
    if is_fork:
        values["storage"] = {"url": store.url}
    # training flows record their name, and earlier versions of them at least their checkpoints; recipes record neither
    if not {FLOW, "checkpoints"} & info.other.keys():
        # the config of a recipe may have fields of these names
        location = {"run": run} | ({"storage": values["storage"]} if is_fork else {})
        return RecordedConfig(run=run, flow=None, values=_recipe_values(values, info.run) | location)
    # the digests of the inputs
    digests = values.pop("inputs", {})
    flow = values.pop(FLOW, None) or _flow_of_stages(store, info)
    is_complete = "publish_as" in values["model"]
    try:
        training = _TRAINING.validate_python({"kind": flow, "config": values})
    except ValidationError as error:
        problems = describe_validation(error, TrainingConfig)
        raise CorruptArtifact(f"{keys.run_json(info.run)} is not a config of this version: {problems}") from error
    models = _chain_models(store, run, training.config)
    if "model" in digests:
        models["model"] = frozenset({digests["model"]})
    return RecordedConfig(run, flow, _short(training.config), is_complete, models)


def _chain_models(store: ObjectStore, run: str, config: TrainingConfig) -> dict[str, frozenset[str]]:
    """Digests of the models from which the chains of the value model and the teacher start. The record of a run has
    none of them."""
    parts = {TEACHER: "teacher"}
    if config.critic is not None:
        parts[config.critic.name] = "value_model"
    models: dict[str, frozenset[str]] = {}
    for chain in run_chains(store, run):
        # several teachers are numbered
        part = parts.get(TEACHER if chain.model.startswith(f"{TEACHER}-") else chain.model)
        root = chain.root() if part is not None else None
        if part is not None and root is not None and root.base is not None:
            models[part] = models.get(part, frozenset()) | {root.base.sha256}
    return models


def _evaluation_config(run: str, info: RunInfo) -> RecordedConfig:
    values = {name: value for name, value in info.other.items() if name not in (FLOW, HUB)}
    inputs: Any = info.semantic["inputs"]
    try:
        config = EvaluationFlowConfig.model_validate({"run": run} | values)
    except ValidationError as error:
        problems = describe_validation(error, EvaluationFlowConfig)
        raise CorruptArtifact(f"{keys.run_json(run)} is not a config of this version: {problems}") from error
    models = {"models": frozenset(filter(None, inputs["models"].values()))}
    return RecordedConfig(run, "evaluation", _short(config), models=models)


def suite_of_run(store: ObjectStore, run: str) -> dict[str, Any]:
    """Returns dotted key -> value of an evaluation's config that a training knows: its held-out rows and its grader.
    What the run does not have, or what cannot be read, is left out."""
    suite: dict[str, Any] = {}
    try:
        recorded = read_config(store, run)
        if recorded.flow is None:
            return {}
        source = _heldout_source(store, run, recorded.values["data"].get("heldout"))
    except StorageError:
        return {}
    if source is not None:
        suite["suite.datasets"] = [{"source": source}]
    grader = recorded.values.get("grader", {})
    if "path" in grader:
        suite["suite.graders"] = [{name: value for name, value in grader.items() if name in SuiteGrader.model_fields}]
    return suite


def _heldout_source(store: ObjectStore, run: str, heldout: dict[str, Any] | None) -> dict[str, Any] | None:
    """The dataset of the held-out rows of a run. That of a split is a dataset of the store, which the run made."""
    if heldout is None or heldout["kind"] != "split":
        return heldout
    # both parts of a split have the whole dataset as their parent, and the run recorded the part that it trained on
    inputs: Any = read_run(store, run).semantic["inputs"]
    versions = list_datasets(store)
    wholes = {version.ref.parents for version in versions if version.ref.sha256 in inputs.values()}
    for version in versions:
        if version.ref.parents in wholes and version.ref.sha256 not in inputs.values():
            extra = read_manifest(store, version.ref.key).extra
            if (extra.get("part"), extra.get("split")) == ("heldout", heldout["split"]):
                return {"kind": "registered", "key": version.key}
    return None


def write_config(config: RecordedConfig, folder: Path) -> tuple[Path, bool]:
    """Writes the config to RUN.yaml in the folder. Returns (path, whether it was written). An existing file is kept,
    since it may have been edited. Raises OSError."""
    # no key of a run has a plus sign, so that two runs have two files
    path = folder / f"{config.run.replace('/', '+')}.yaml"
    if path.exists():
        return path, False
    write_private(path, config.text)
    return path, True


def _recipe_values(values: dict[str, Any], run: str) -> dict[str, Any]:
    """The parameters of a recipe: the fields of its config, if it has one, are at the top. Raises CorruptArtifact."""
    config = values.pop("config", None)
    if isinstance(config, dict):
        values |= config
    if "engine" in values:
        try:
            spec = _ENGINE.validate_python(values.pop("engine"))
        except ValidationError as error:
            problems = describe_validation(error, LocalEngineSpec)
            raise CorruptArtifact(f"{keys.run_json(run)} has no engine of this version: {problems}") from error
        if spec != LocalEngineSpec():
            values["engine"] = _without_defaults(spec)
    return values


def _find_info(store: ObjectStore, run: str) -> RunInfo:
    """Returns the record of the run. For a fork that has not run yet, that of its nearest origin that has run."""
    origin = run
    while (info := find_run(store, origin)) is None:
        fork = read_fork(store, origin)
        if fork is None:
            raise ObjectNotFound(f"run {run!r} has no config in {store.url}; 'ostinato runs ls' lists the runs")
        origin = fork.run
    return info


def _flow_of_stages(store: ObjectStore, info: RunInfo) -> str:
    """Returns the flow of a run whose record does not name it: that of its first stage."""
    if {"sft", "gspo"} <= info.semantic.keys():
        return "sft_to_gspo"
    stages = stages_of(store, info.run)
    if not stages:
        raise ObjectNotFound(f"run {info.run!r} has not begun, and its record does not name its flow")
    return keys.stage_kind(stages[0])


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one. Groups that are in both are merged."""
    merged = dict(first)
    for name, value in second.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[name] = _merged(old, value)
        else:
            merged[name] = value
    return merged


def _short(config: FormConfig) -> dict[str, Any]:
    """The values of a config without those that equal their default, if they give the same config, else all."""
    values = _without_defaults(config)
    if type(config).model_validate(values) == config:
        return values
    return config.model_dump(mode="json")


def _without_defaults(record: BaseModel) -> dict[str, Any]:
    values = record.model_dump(mode="json")
    for name, setting in type(record).model_fields.items():
        value = getattr(record, name)
        # a kind tells which class the values are of
        if name != "kind" and value == setting.get_default(call_default_factory=True):
            values.pop(name, None)
        elif isinstance(value, BaseModel):
            values[name] = _without_defaults(value)
        elif isinstance(value, tuple) and all(isinstance(item, BaseModel) for item in value):
            values[name] = [_without_defaults(item) for item in value]
    return values
