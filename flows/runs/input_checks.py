"""Checks at the start of a run that everything which its config names is there: before an engine, a model or a dataset
is loaded. What only the engine's machine knows is not checked. Branches of the hub are replaced by their commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.errors import BadModelFolder
from engine.import_paths import ImportPathError
from engine.models.folder import ModelFolder, local_folder, registered_model
from engine.models.hub import check_hub_model, hub_repo_of_key
from engine.models.openai_model import SCHEME
from flows.configs.common import TrainingConfig
from flows.configs.distill import TeacherConfig
from flows.configs.environments import AgentConfig, EnvironmentConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.inputs import GraderConfig, ModelConfig
from flows.configs.optimizer import OptimizerConfig
from flows.configs.overrides import ConfigError
from flows.parameters import Dataset, Grader, Model
from flows.runs.recorded_config import HUB
from storage.chain.fork import read_fork
from storage.chain.run_record import find_run
from storage.errors import PermanentStorageError
from storage.registry.decisions import resolve_model
from storage.registry.hub import HubError, HubRepo, resolve_commit, with_commit_of
from storage.store.objects import ObjectStore
from tasks.datasets.errors import DatasetError
from tasks.datasets.spec import DeclaredDataset, MixtureDataset
from tasks.environments.spec import EnvironmentSpecError, agent_spec, environment_spec
from tasks.graders.spec import GraderSpecError, grader_spec

IMPORTED = (GraderConfig, EnvironmentConfig, AgentConfig, Grader)
"""Parts that name code, besides datasets."""
INPUTS = (Model, DeclaredDataset, *IMPORTED)
"""Parts of configs that name something outside of the config, besides ModelConfig and TeacherConfig."""
MISSING = (
    BadModelFolder, PermanentStorageError, DatasetError, ImportPathError, GraderSpecError, EnvironmentSpecError,
    ValidationError,
)  # fmt: skip
"""The errors of an input that is not there, or cannot be used."""


def check_inputs(config: BaseModel, store: ObjectStore, commits: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError that names each field whose file, model or dataset is not there. If all are there: each field
    whose grader, environment or other code cannot be used. `commits`: those that the run uses of the hub's branches."""
    # an import may take seconds, so that files are checked first
    for imports_code in (False, True):
        problems = [f"{path}: {why}" for path, why in input_problems(config, store, commits, imports_code=imports_code)]
        if problems:
            raise ConfigError("\n".join(problems))


def input_problems(
    config: BaseModel, store: ObjectStore, commits: Mapping[str, str] | None = None, *, imports_code: bool
) -> Iterator[tuple[str, str]]:
    """Yields (dotted path, message) of each input that is not there or cannot be used: of those that name code, or of
    the others."""
    for path, spec in named_inputs(config):
        if _imports_code(spec) != imports_code:
            continue
        try:
            _check(spec, store, commits or {})
        except MISSING as error:
            # the messages about graders and environments begin with these words
            field = path.rpartition(".")[2]
            yield path, str(error).removeprefix(f"{field} ")


def check_warmup(config: TrainingConfig) -> None:
    """Raises ConfigError for a warm-up that is longer than the run. A run that began with one may continue."""
    for name, stage in config.stages.items():
        # the steps of a round of rejection sampling depend on what it keeps
        prefix, steps = f"{name}." if name else "", getattr(stage.algorithm, "steps", None)
        _check_warmup_of(prefix, "optimizer", stage.optimizer, steps)
        if stage.critic is not None:
            _check_warmup_of(prefix, "value_model.optimizer", stage.critic.optimizer_over(stage.optimizer), steps)


def check_length(config: TrainingConfig, *rows: int) -> None:
    """Raises ConfigError if a stage would train no policy. `rows` are those of each stage's training data."""
    for stage, count in zip(config.stages.values(), rows, strict=True):
        try:
            stage.check_rows(count)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_warmup_of(stage: str, field: str, optimizer: OptimizerConfig, steps: int | None) -> None:
    warmup = optimizer.warmup_steps
    if steps is not None and warmup is not None and warmup > steps:
        raise ConfigError(
            f"{stage}{field}.warmup_steps={warmup} is more than {stage}algorithm.steps={steps}, so the learning rate "
            "would never be at its highest; lower warmup_steps, or train longer"
        )


def named_inputs(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yields every part of a config that names something outside, with its dotted path: specs, and models as text."""
    yield from _inputs(config)
    if isinstance(config, EvaluationFlowConfig):
        for index, key in enumerate(config.models):
            yield f"models.{index}", key


def _inputs(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every part of a config that names something outside, with its dotted path."""
    if isinstance(value, ModelConfig) or (isinstance(value, TeacherConfig) and value.key is not None):
        yield f"{path}.key", value
    elif isinstance(value, TeacherConfig):
        for name, key in value.by_value.items():
            yield f"{path}.by_value.{name}", TeacherConfig(key=key)
    elif isinstance(value, INPUTS) and not isinstance(value, MixtureDataset):
        yield path, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _inputs(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, Dataset):
        yield from _inputs(value.spec, path)
    elif isinstance(value, tuple | list | set | frozenset):
        for index, item in enumerate(value):
            yield from _inputs(item, f"{path}.{index}")


def _imports_code(spec: Any) -> bool:
    return spec.imports_code if isinstance(spec, DeclaredDataset) else isinstance(spec, IMPORTED)


def _check(spec: Any, store: ObjectStore, commits: Mapping[str, str]) -> None:
    """Raises one of MISSING if what the spec names is not there."""
    match spec:
        case str():
            _check_model(resolve_model(store, spec), store, commits)
        case ModelConfig(key=str() as key) | TeacherConfig(key=str() as key) | Model(key=key):
            _check_model(key, store, commits)
        case DeclaredDataset():
            spec.check(store)
        case GraderConfig():
            grader_spec(spec.path, spec.arguments)
        case Grader():
            spec.build()
        case EnvironmentConfig():
            environment_spec(spec.path, spec.arguments)
        case AgentConfig():
            agent_spec(spec.path, spec.command)


def _check_model(key: str, store: ObjectStore, commits: Mapping[str, str]) -> None:
    if key.startswith(SCHEME):
        return  # a model that another server serves
    folder, repo = local_folder(key), hub_repo_of_key(key)
    if repo is not None:
        check_hub_model(store, with_commit_of(repo, commits))
    elif folder is None:
        registered_model(store, key)
    else:
        ModelFolder.of(folder)


def hub_commits(config: BaseModel, store: ObjectStore, run: str) -> dict[str, str]:
    """The commit of each branch of the hub that a config names, by the address of the branch: the one that the run
    recorded, or else the current one. Raises ConfigError, which names the fields."""
    recorded = _recorded_commits(store, run)
    commits: dict[str, str] = {}
    problems = []
    for path, value in named_inputs(config):
        try:
            repo = hub_repo_of_input(value)
            if repo is not None and not repo.is_pinned:
                commits[repo.uri] = recorded.get(repo.uri) or str(resolve_commit(repo).revision)
        except (HubError, BadModelFolder, DatasetError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return commits


def commits_entry(commits: dict[str, str]) -> dict[str, Any]:
    """The entry of run.json with the commits. Empty for a run that uses no hub."""
    return {HUB: commits} if commits else {}


def _recorded_commits(store: ObjectStore, run: str) -> dict[str, str]:
    """The commits that run.json holds or, for a fork that has not run yet, run.json of its origin."""
    origin = run
    while (info := find_run(store, origin)) is None:
        fork = read_fork(store, origin)
        if fork is None:
            return {}
        origin = fork.run
    recorded = info.other.get(HUB)
    if not isinstance(recorded, dict):
        return {}
    return {address: str(commit) for address, commit in recorded.items()}


def hub_repo_of_input(value: Any) -> HubRepo | None:
    """The repository that an input of a config names. None: it names none."""
    match value:
        case str() as key:
            return hub_repo_of_key(key)
        case ModelConfig(key=str() as key) | TeacherConfig(key=str() as key) | Model(key=key):
            return hub_repo_of_key(key)
        case DeclaredDataset():
            return value.hub_repo()
    return None
